"""The examples of the frameworks' pages, copied into an empty folder and run as the page says."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
ON_CPUS = """
import runpy
from tests.integration.accelerate_on_cpus import let_cpus_shard

let_cpus_shard()
runpy.run_path("train.py", run_name="__main__")
"""
PAGES = [  # the framework, which example of its page, and what starts it; the last two are written for GPUs
    ("lightning", 0, ("train.py",)),
    ("lightning", 1, ("train.py",)),
    ("lightning", 2, ("train.py",)),
    ("lightning", 3, ("train.py",)),
    ("accelerate", 0, (*TORCHRUN, "2", "train.py")),
    ("transformers", 0, (*TORCHRUN, "2", "train.py")),
    ("ray", 0, ("train.py",)),
    ("accelerate", 1, (*TORCHRUN, "4", "on_cpus.py")),
    ("transformers", 1, (*TORCHRUN, "4", "on_cpus.py")),
]
NAMES = (
    "lightning", "lightning fsdp", "fabric", "fabric fsdp", "accelerate", "trainer", "ray", "accelerate fsdp",
    "trainer fsdp",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "index", "command"), PAGES, ids=NAMES)
def test_the_example_runs_as_it_stands(framework, index, command, tmp_path):
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f'needs pip install -e ".[{framework}]"')
    examples = re.findall(r"```py\n(.*?)```", (DOCS / f"{framework}.md").read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(examples[index])
    (tmp_path / "on_cpus.py").write_text(ON_CPUS)
    on_cpus = (
        {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(DOCS.parent)} if "on_cpus.py" in command else {}
    )
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **on_cpus},
    )
    assert done.returncode == 0, done.stderr
    assert "has made a DDP model here" not in done.stderr
    (loss,) = re.findall(r"^loss ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(loss) < 4
    (ratio,) = re.findall(r"[\d,]+ bytes sent by each rank, ratio ([\d.]+)", done.stdout)
    assert 3.5 < float(ratio) < 4.1


def test_every_example_of_the_pages_is_run():
    for page in set(DOCS.glob("*.md")) - {DOCS / "config-files.md"}:  # test_config_systems.py runs that one
        blocks = page.read_text().count("```py\n")
        assert blocks == sum(page.stem == framework for framework, *_ in PAGES), page.name
