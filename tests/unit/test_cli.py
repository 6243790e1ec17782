import json
import subprocess
import sys

import pytest
import torch

import gradlane
from gradlane.cli import main
from gradlane.kernels.native import kernels_in_use
from gradlane.kernels.triton_state import device_kernels_in_use
from gradlane.strategies.text import exported_parts

from ..support import scripts

pytestmark = pytest.mark.networks


def test_version():
    command = [sys.executable, "-m", "gradlane", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    first, second = done.stdout.splitlines()
    assert first == f"gradlane {gradlane.__version__}"
    words, on_gpus = second.split("; on GPUs ")
    assert words == f"kernels: {kernels_in_use()}"
    assert on_gpus == device_kernels_in_use(torch.device("cuda"))


def test_version_says_why_gpus_have_no_kernels():
    printed = scripts.gradlane("--version", GRADLANE_TRITON="0").stdout
    assert printed.endswith("; on GPUs torch (GRADLANE_TRITON=0)\n")


def test_help_lists_the_verbs_without_torch():
    code = "import sys; from gradlane.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "demo" in done.stdout


def test_without_a_verb_it_shows_the_way(capsys):
    assert main([]) == 0
    assert "bench" in capsys.readouterr().out


def test_strategies_lists_every_name_of_a_text_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["strategies"]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "}
    assert listed == set(exported_parts())
    assert max(map(len, lines)) <= 80


def test_strategies_tells_all_about_one(capsys):
    assert main(["strategies", "PowerSGD"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PowerSGD(rank=4, min_compression_rate=2")
    assert "P is made orthonormal" in shown
    assert main(["strategies", "powersgd"]) == 2
    assert "did you mean PowerSGD?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("demo", "--steps", "0"), "steps=0 trains nothing; use 1 or more"),
        (("demo", "--ranks", "1"), "ranks=1 has no peer to exchange gradients with; use 2 or more"),
        (("demo", "--arm", "Maen()"), "did you mean Mean?"),
        (("demo", "--steps", "many"), "invalid int value"),
        (("bench", "--link", "100mb"), "link '100mb' is not known; write a rate in kbit, mbit, gbit"),
        (("bench", "--ranks", "0"), "ranks=0 cannot be compared; use 2 to 64"),
        (("bench", "--nodes", "2"), "--nodes 2 does not say how many ranks a node has; add --per-node 2"),
        (("bench", "--per-node", "2"), "--per-node 2 has no number of nodes; add --nodes 2"),
        (
            ("bench", "--nodes", "2", "--per-node", "2", "--ranks", "4"),
            "--ranks and --nodes exclude each other: 2 nodes of 2 have 4 ranks; leave --ranks out",
        ),
        (("bench", "--nodes", "1", "--per-node", "2"), "nodes=1 has no link between nodes; use 2 or more"),
        (("bench", "--arm", "hsdp"), "without --nodes there are none; add --nodes 2 --per-node 2"),
        (("train", "--arm", "hsdp"), "arm 'hsdp' is for gradlane bench --nodes; gradlane train has DDP only"),
        (("bench", "--model", "tests.support.workloads:raises"), "raised RuntimeError: no such data set"),
        (("bench", "--json", "missing/out.json"), "missing/out.json cannot be written: No such file"),
        (("bench", "--page", "missing/page.html"), "missing/page.html cannot be written: No such file"),
        (("trace", "missing.jsonl"), "No such file or directory: 'missing.jsonl'"),
        (("trace", "missing.jsonl", "--steps", "5:2"), "No such file"),
        (("demo", "--out", "no/such/folder/page.html"), "cannot be written"),
        (("train", "--task", "chess"), "task 'chess' is not known; use bytes or digits"),
        (("train", "--arm", "Maen()"), "did you mean Mean?"),
        (("train", "--arm", "torch.fp8"), "arm 'torch.fp8' is not known; torch's hooks are torch.allreduce"),
        (("train", "--link", "fast"), "link 'fast' is not known"),
        (("train", "--steps", "0"), "steps=0 trains nothing; use 1 or more"),
        (("train", "--ranks", "1"), "ranks=1 has no peer to exchange gradients with; use 2 or more"),
        (("train", "--ranks", "65"), "ranks=65 are too many for one machine; use 2 to 64"),
        (("train", "--seeds", "0"), "seeds=0 is outside of 1 to 30"),
        (("train", "--seeds", "31"), "seeds=31 is outside of 1 to 30"),
        (("train", "--lr", "0"), "lr=0.0 cannot train; use a number above 0, say 0.1"),
        (("train", "--lr", "nan"), "lr=nan cannot train"),
        (("train", "--lr", "0.1,-0.2"), "lr=-0.2 cannot train; use a number above 0, say 0.1"),
        (("train", "--lr", "0.1,0.2,0.1"), "lr=0.1,0.2,0.1 has 0.1 twice; name each rate once"),
        (("train", "--lr", ""), "lr='' has an empty place; write numbers above 0 with commas between"),
        (("train", "--lr", "0.1,low"), "lr='0.1,low' is not a number; write numbers above 0"),
        (("train", "--optimizer", "lion"), "optimizer 'lion' is not known; use sgd or adam"),
        (("train", "--batch", "0"), "batch=0 holds nothing; use 1 or more"),
        (
            ("train", "--width", "66"),
            "width=66 is not a width of these models; use a multiple of 4 from 4 to 4096",
        ),
        (("train", "--task", "digits", "--width", "0"), "width=0 is not a width"),
        (("train", "--every", "0"), "every=0 is not a number of steps; use 1 or more"),
        (("train", "--target", "inf"), "target=inf is not a loss; use a finite number"),
        (("train", "--budget", "0"), "budget=0 is not a time to train"),
        (("train", "--json", "no/such/folder/out.json"), "cannot be written"),
        (("train", "--seeds", "some"), "invalid int value"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_2(arguments, message, capsys):
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_task_whose_data_are_not_installed_says_how_to_get_them(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(("train", "--task", "digits", "--steps", "1")) == 2
    assert "needs scikit-learn, which is not installed; pip install scikit-learn" in capsys.readouterr().err


def test_the_demo_prints_one_table_and_makes_a_page(tmp_path):
    page, figures = tmp_path / "demo.html", tmp_path / "demo.json"
    arms = ("Mean()", "Cast(Mean(), bfloat16)")
    done = scripts.gradlane(
        *("demo", "--steps", "2", "--out", str(page), "--json", str(figures)),
        *(part for arm in arms for part in ("--arm", arm)),
    )
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if " ok " in line]
    assert [line.split("  ")[0].strip() for line in table] == ["ddp", *arms]
    assert f"wrote {page}" in done.stdout
    assert "Cast(Mean(), bfloat16)" in page.read_text()
    dense, mean, cast = json.loads(figures.read_text())["results"]
    assert dense["runs"][0]["loss"] == mean["runs"][0]["loss"]  # Mean is DDP, bit for bit
    assert dense["bytes_per_step"] == mean["bytes_per_step"] == 2 * cast["bytes_per_step"]
