"""What all verbs share: help with examples, files of options, JSON, completion, 80 columns."""

import json
import re
import shlex
import shutil
import subprocess

import pytest
from rich.console import Console

from gradlane.cli import main
from gradlane.cli.bench_table import print_record
from gradlane.cli.config_file import with_config
from gradlane.cli.main import CONFIGURED, VERBS, parser_and_verbs
from gradlane.cli.plan_table import print_plan
from gradlane.cli.train_view import print_document

from ..support import report_samples as samples

NAMES = [verb.NAME for verb in VERBS]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def parsed(verb, *words):
    """The options that a verb would be run with."""
    parser, verbs = parser_and_verbs()
    return vars(parser.parse_args([verb, *with_config(verb, verbs[verb], words)]))


@pytest.mark.parametrize("verb", VERBS, ids=NAMES)
def test_the_examples_of_every_help_are_commands_that_parse(verb, capsys):
    with pytest.raises(SystemExit):
        main([verb.NAME, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    examples = shown.partition("examples:\n")[2].splitlines()
    commands = [line.split("gradlane ", 1)[1] for line in examples if "gradlane " in line]
    assert len(commands) > 1
    for command in commands:
        words = shlex.split(re.split(r"   | \|", command)[0].replace('sh)"', "sh"))
        assert words[0] == verb.NAME
        parser_and_verbs()[0].parse_args(words)


def test_help_names_every_verb_the_way_and_the_exit_codes(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"    {name}" in shown for name in NAMES)
    assert "gradlane plan --link 1gbit" in shown
    assert "exit codes: 0 done, 1 `doctor` found something broken, 2 wrong input" in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    "text",
    [
        'link = ["1gbit", "100mbit"]\nper-node = 2\nsteps = 5',
        '[bench]\nlink = ["1gbit", "100mbit"]\nper_node = 2\nsteps = 5\n[plan]\nranks = 4',
    ],
    ids=["alone", "table"],
)
def test_options_come_from_a_file_and_the_command_line_overrides_them(text, tmp_path):
    file = tmp_path / "bench.toml"
    file.write_text(text)
    found = parsed("bench", "--config", str(file))
    assert (found["link"], found["per_node"], found["steps"]) == (["1gbit", "100mbit"], 2, 5)
    found = parsed("bench", "--config", str(file), "--link", "none", "--steps=7")
    assert (found["link"], found["per_node"], found["steps"]) == (["none"], 2, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepps = 5", "bench has no option stepps; did you mean steps?"),
        ("colour = 5", "bench has no option colour; `gradlane bench --help` lists them"),
        ("config = 'x.toml'", "bench has no option config"),
        ("steps = [5, 6]", "steps takes one value, got a list of 2"),
        ("[plan]\nranks = 2", "has no [bench]; it has [plan]"),
        ("steps = 5\n[bench]\nranks = [2]", "steps stands in no table; move it below [bench]"),
        ("steps = ", "cannot be read as TOML"),
    ],
)
def test_a_file_of_options_that_is_wrong_is_refused(text, message, tmp_path, capsys):
    file = tmp_path / "bench.toml"
    file.write_text(text)
    assert main(["bench", "--config", str(file)]) == 2
    assert f"{file}" in (said := capsys.readouterr().err)
    assert message in said
    assert main(["bench", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read as TOML: [Errno 2]" in capsys.readouterr().err


def test_a_value_of_a_wrong_type_in_a_file_is_refused_as_in_the_command_line(tmp_path, capsys):
    (tmp_path / "x.toml").write_text("steps = 'many'")
    with pytest.raises(SystemExit) as end:
        main(["train", "--config", str(tmp_path / "x.toml")])
    assert end.value.code == 2
    assert "--steps: invalid int value: 'many'" in capsys.readouterr().err


def test_verbs_that_take_many_options_take_a_file():
    assert {verb.NAME for verb in CONFIGURED} == {"demo", "plan", "bench", "train"}


def test_plan_prints_json_alone_or_writes_it(tmp_path, capsys):
    given = ("plan", "--parameters", "1M", "--compute", "10ms", "--link", "100mbit", "--strategy", "Mean()")
    assert main([*given, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in record["results"]] == ["ddp", "Mean()"]
    assert main([*given, "--json", str(tmp_path / "plan.json")]) == 0
    assert "compute alone 10 ms" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["settings"] == record["settings"]


def test_doctor_and_strategies_print_json_alone(capsys):
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["findings"]
    assert main(["strategies", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["PowerSGD"]["kind"] == "strategy"
    assert entries["PowerSGD"]["options"]["rank"] == "4"
    assert entries["Cast"]["options"]["inner"] is None
    assert main(["strategies", "Int8", "--json"]) == 0
    assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == ["Int8"]


def test_report_tells_what_the_files_say(tmp_path, capsys):
    file, page = tmp_path / "train.json", tmp_path / "page.html"
    file.write_text(json.dumps(samples.train_document()))
    assert main(["report", str(file), "--out", str(page)]) == 0
    sentence, *_, last = capsys.readouterr().out.splitlines()
    assert sentence.startswith("ErrorFeedback(TopK(0.01)) reached 3.25 bits/byte 4.6 times sooner")
    assert last == f"wrote {page}"
    assert main(["report", str(file), "--out", str(page), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["page"] == str(page)
    assert said["verdicts"][str(file)][0] == sentence


def completed(line, tmp_path):
    """What bash offers for a line."""
    (tmp_path / "a file").touch()
    words = " ".join(shlex.quote(word) for word in line.split(" "))
    script = (
        f'eval "$(cat script)"\nCOMP_WORDS=({words})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n_gradlane\n'
    )
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_verbs_options_and_choices(tmp_path, capsys):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    assert completed("gradlane pl", tmp_path) == ["plan"]
    assert set(completed("gradlane ", tmp_path)) == {*NAMES, "--help", "--version"}
    assert completed("gradlane bench --wa", tmp_path) == ["--warmup"]
    assert completed("gradlane train --wa", tmp_path) == []
    assert completed("gradlane completion z", tmp_path) == ["zsh"]
    assert completed("gradlane report a", tmp_path) == []  # bash then offers files


def test_the_scripts_of_other_shells_have_every_option(capsys):
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("autoload -U +X bashcompinit && bashcompinit\n")
    assert main(["completion", "fish"]) == 0
    fish = capsys.readouterr().out
    assert "'__fish_seen_subcommand_from bench' -l warmup" in fish
    assert fish.count("-a ") == len(NAMES)
    if shell := shutil.which("fish"):
        subprocess.run([shell, "-n", "-c", fish], check=True)


def test_tables_fit_80_columns(capsys):
    plan = samples.plan_document(ratios={**samples.PLANNED, "ErrorFeedback(Gathered(TopK(0.01)))": 90})
    plan["settings"]["from"], plan["ddp_s"] = "measurements", 0.04
    print_plan(plan)
    train = samples.train_document()
    for result in train["results"]:
        result |= {"lr": 0.1, "tuning": [], "remark": ""}
    print_document(train, Console())
    bench = samples.bench_document()
    for result in bench["results"]:
        result |= {"nodes": None, "uplink_bytes": None, "speedup_hsdp": None}
    print_record(bench)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 60
    assert [line for line in lines if len(line.rstrip()) > 80 and not line.endswith(".")] == []
