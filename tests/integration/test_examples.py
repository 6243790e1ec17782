"""Scripts of examples/ with a framework, started as their first lines say."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run(framework, *command):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f'needs pip install -e ".[{framework}]"')
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("strategy", "fewer"), [("ErrorFeedback(Sharded(Int8()))", 3.9), ("LocalSteps(Mean(), every=8)", 6)]
)
def test_lightning(strategy, fewer):
    shown = run("lightning", EXAMPLES / "lightning_text.py", "--strategy", strategy)
    loss, ratio = map(float, re.findall(r"loss ([\d.]+), ([\d.]+) times", shown)[0])
    assert loss < 0.5  # ln 128 = 4.9 at the start
    assert ratio > fewer


def test_accelerate_goes_on_where_it_stopped(tmp_path):
    def losses(folder, epochs):
        script = (EXAMPLES / "accelerate_text.py", "--folder", folder, "--epochs", epochs)
        return re.findall(r"epoch (\d): loss ([\d.]+)", run("accelerate", *TORCHRUN, *script))

    whole = losses(tmp_path / "whole", 3)
    assert float(whole[-1][1]) < 0.1
    assert losses(tmp_path / "parts", 2) == whole[:2]
    assert losses(tmp_path / "parts", 3) == whole[2:]


def test_transformers_finetunes_what_it_made():
    shown = run("transformers", *TORCHRUN, EXAMPLES / "transformers_finetune.py")
    first, last, ratio = map(float, re.findall(r"loss ([\d.]+), then ([\d.]+), ([\d.]+) times", shown)[0])
    assert last < first - 1
    assert ratio > 3.9
