import subprocess
import sys

import pytest

import gradlane
from gradlane.cli import main


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "gradlane", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version():
    assert run("--version").stdout == f"gradlane {gradlane.__version__}\n"


def test_help_tells_the_verbs_without_torch():
    code = "import sys; from gradlane.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--steps", "0"), "steps=0 trains nothing; use 1 or more"),
        (("demo", "--ranks", "1"), "ranks=1 has nobody to talk to; use 2 or more"),
        (("demo", "--arm", "Maen()"), "did you mean Mean?"),
        (("demo", "--steps", "many"), "invalid int value"),
        (("bench", "--link", "100mb"), "link '100mb' is not known; write a rate in kbit, mbit, gbit"),
        (("bench", "--ranks", "0"), "ranks=0 cannot be compared; use 2 to 64"),
        (("bench", "--model", "tests.workloads:raises"), "raised RuntimeError: no such data set"),
        (("bench", "--json", "missing/out.json"), "missing/out.json cannot be written: No such file"),
        (("bench", "--plot", "bars.gif"), "use a name that ends in .svg or .png"),
        (("trace", "missing.jsonl"), "No such file or directory: 'missing.jsonl'"),
        (("trace", "missing.jsonl", "--steps", "5:2"), "No such file"),
        ((), "the following arguments are required"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_the_demo_prints_one_table():
    done = run("demo", "--steps", "2", "--arm", "Mean()", "--arm", "Cast(Mean(), bfloat16)")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "x │" in line]
    assert len(rows) == 3
    assert "1.00x" in rows[1]
    assert "2.00x" in rows[2]
    losses = [row.split("│")[2].strip() for row in rows]
    assert losses[0] == losses[1]  # Mean is DDP, bit for bit
