"""Whole scripts, as a user runs them: torchrun, a real interpreter's end, nothing left behind."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = (ROOT / "examples" / "train.py").read_text()

ENDINGS = {
    "as shown": TRAIN,
    "nothing closed": TRAIN.replace("    attachment.close()\n", "").replace("    gl.shutdown()", "    pass"),
    "destroyed, not closed": TRAIN.replace("    attachment.close()\n", "").replace(
        "    gl.shutdown()", "    dist.destroy_process_group()"
    ),
}


def torchrun(script, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("repeat", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_every_end_is_a_clean_one(ending, repeat, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(ENDINGS[ending])
    for _ in range(repeat):
        done = torchrun(script, "--steps", "5")
        assert done.returncode == 0, done.stderr
        assert re.search(r"[\d,]+ bytes sent by each rank, ratio 2.00", done.stdout)


def test_the_example_learns():
    done = torchrun(ROOT / "examples" / "train.py", "--steps", "41", "--strategy", "Mean()")
    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 3
    assert losses[-1] < losses[0] / 2
