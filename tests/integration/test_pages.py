"""The examples of the frameworks' pages, copied into an empty folder and run as the page says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PAGES = [  # the framework, which example of its page, and who starts the processes
    ("lightning", 0, ()),
    ("lightning", 1, ()),
    ("accelerate", 0, TORCHRUN),
    ("transformers", 0, TORCHRUN),
    ("ray", 0, ()),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "index", "launcher"),
    PAGES,
    ids=("lightning", "fabric", "accelerate", "trainer", "ray"),
)
def test_the_example_runs_as_it_stands(framework, index, launcher, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f'needs pip install -e ".[{framework}]"')
    examples = re.findall(r"```py\n(.*?)```", (DOCS / f"{framework}.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(examples[index])
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(loss) < 4
    (ratio,) = re.findall(r"[\d,]+ bytes sent by each rank, ratio ([\d.]+)", done.stdout)
    assert 3.5 < float(ratio) < 4.1


def test_every_example_of_the_pages_is_run():
    for page in DOCS.glob("*.md"):
        blocks = page.read_text().count("```py\n")
        assert blocks == sum(page.stem == framework for framework, *_ in PAGES), page.name
