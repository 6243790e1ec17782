"""Whole scripts, as a user runs them: torchrun, a real interpreter's end, nothing left behind."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from ..support import scripts

ROOT = Path(__file__).parents[2]
TRAIN = (ROOT / "examples" / "train.py").read_text()

ENDINGS = {
    "as shown": TRAIN,
    "nothing closed": TRAIN.replace("    attachment.close()\n", "").replace("    gl.shutdown()", "    pass"),
    "destroyed, not closed": TRAIN.replace("    attachment.close()\n", "").replace(
        "    gl.shutdown()", "    dist.destroy_process_group()"
    ),
}


def torchrun(script, *arguments, ranks=2):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return python(*launcher, str(script), *arguments)


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def forked(script, *arguments, ranks=2):
    """As torchrun, without its seconds."""
    return scripts.run(script, *arguments, ranks=ranks)


launched = pytest.mark.parametrize("launch", [forked, pytest.param(torchrun, marks=pytest.mark.slow)])


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("launch", "repeat"), [(forked, 1), pytest.param(torchrun, 20, marks=pytest.mark.slow)]
)
@pytest.mark.timeout(900)  # twenty starts of torchrun took over 300 s on a busy machine
def test_every_end_is_a_clean_one(ending, launch, repeat, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ENDINGS[ending])
    for _ in range(repeat):
        done = launch(script, "--steps", "5")
        assert done.returncode == 0, done.stderr
        assert re.search(r"[\d,]+ bytes sent by each rank, ratio 2.00", done.stdout)


LAST_WORDS = """
import os, sys, time
import torch
import torch.distributed as dist
import gradlane as gl

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
attachment = gl.attach(model, "ErrorFeedback(Sharded(Int4()))")
sys.setswitchinterval(60)  # who waits for the GIL gets it where it is let go, and nowhere else
model(torch.randn(8, 64)).sum().backward()
{close}
last = torch.ones(4)
dist.all_reduce(last)  # as a Trainer does that gathers the loss: torch's worker has still to let go of it
until = time.monotonic() + {late} * (dist.get_rank() == 0)
while time.monotonic() < until:  # busy: to sleep would be to let go of the GIL
    pass
"""


@launched
@pytest.mark.parametrize("close", ["attachment.close()", ""], ids=["closed", "not closed"])
@pytest.mark.parametrize("late", [0, 1], ids=["together", "rank 0 last"])
def test_the_end_waits_for_the_workers_of_all_groups(launch, close, late, tmp_path):
    """torch alone aborts here ("terminate called without an active exception")."""
    script = tmp_path / "train.py"
    script.write_text(LAST_WORDS.format(close=close, late=late))
    done = launch(script, ranks=3)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("launch", "example"),
    [
        (torchrun, "train.py"),
        (forked, "own_loop.py"),
        pytest.param(torchrun, "own_loop.py", marks=pytest.mark.slow),
    ],
)
def test_the_example_learns(launch, example):
    done = launch(ROOT / "examples" / example, "--steps", "41", "--strategy", "Mean()")
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("launch", [torchrun, forked])
def test_the_small_gpt_goes_on_where_it_was_stopped(launch, tmp_path):
    def run(steps, folder):
        done = launch(ROOT / "examples" / "gpt.py", "--steps", str(steps), "--checkpoint", str(folder))
        assert done.returncode == 0, done.stderr
        return re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)

    (_, first), (_, last) = run(8, tmp_path / "whole")
    assert float(last) < float(first) - 1
    run(5, tmp_path / "parts")
    assert run(8, tmp_path / "parts") == [("7", last)]


def test_the_notebook_runs_from_top_to_bottom(capsys):
    notebook = json.loads((ROOT / "examples" / "own_strategy.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    names = {}
    for cell in cells:
        exec(compile(cell, "a cell", "exec"), names)
    assert re.search(r"mean 32.3 -> 0.00000, vote 32.3 -> 0.0", capsys.readouterr().out)
    assert names["gl"].check_strategy(names["MajorityVote"]()) == []


@launched
def test_a_rule_of_ones_own_leaves_the_giveaway_alone(launch):
    done = launch(ROOT / "examples" / "own_aggregation.py")
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"(\w+): ([+-][\d.]+) on the giveaway", done.stdout))
    assert float(found["mean"]) > 0.15
    assert abs(float(found["agreeing"])) < 0.02


def test_the_rule_of_ones_own_is_under_fifteen_lines():
    script = ast.parse((ROOT / "examples" / "own_aggregation.py").read_text())
    (rule,) = [n for n in script.body if isinstance(n, ast.FunctionDef) and n.name == "agreeing"]
    assert rule.end_lineno - rule.lineno < 15


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(scripts.run, id="python"),
        pytest.param(partial(forked, ranks=4), id="forked", marks=pytest.mark.slow),
        pytest.param(python, marks=pytest.mark.slow),
        pytest.param(partial(torchrun, ranks=4), id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_four_sites_of_which_one_is_broken(launch):
    done = launch(str(ROOT / "examples" / "federated_sites.py"))
    assert done.returncode == 0, done.stderr
    right = {name: float(share) for share, name in re.findall(r"([\d.]+)% right: (.+)", done.stdout)}
    assert len(right) == 6
    best = right["by samples, the broken site known"]
    assert best > 88
    assert right["trimmed mean, by samples"] > best - 2
    assert right["trimmed mean"] > best - 4
    assert max(right["mean"], right["by samples"]) < 65
