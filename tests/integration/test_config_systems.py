"""docs/config-files.md as it stands: the scripts and the YAML of the page, in an empty folder."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "config-files.md").read_text()
SCRIPTS = re.findall(r"```py\n(.*?)```", PAGE, re.DOTALL)
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def run(folder, *command):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return done.returncode, done.stdout, done.stderr


def needs(*modules):
    if missing := [name for name in modules if importlib.util.find_spec(name) is None]:
        pytest.skip(f'{", ".join(missing)}: needs pip install -e ".[frameworks]"')


@pytest.mark.parametrize(("index", "ratio"), [(1, "3.9"), (2, "3.8")], ids=["text", "class path"])
def test_lightning_cli_names_a_strategy(index, ratio, tmp_path):
    needs("lightning", "jsonargparse")
    (tmp_path / "train.py").write_text(SCRIPTS[0])
    (tmp_path / "text.yaml").write_text(YAML[index])
    code, shown, said = run(tmp_path, "train.py", "fit", "--config", "text.yaml")
    assert code == 0, said
    assert f"{ratio}" in re.findall(r"([\d.]+) times fewer bytes", shown)[0]


def test_lightning_cli_refuses_a_wrong_option_before_anything_starts(tmp_path):
    needs("lightning", "jsonargparse")
    (tmp_path / "train.py").write_text(SCRIPTS[0])
    (tmp_path / "text.yaml").write_text(YAML[2].replace("block: 128", "blocks: 128"))
    code, shown, said = run(tmp_path, "train.py", "fit", "--config", "text.yaml")
    assert code != 0
    assert "Epoch" not in shown
    assert "blocks" in said


def test_hydra_takes_both_forms_and_overrides(tmp_path):
    needs("hydra")
    (tmp_path / "choose.py").write_text(SCRIPTS[1])
    (tmp_path / "conf.yaml").write_text(YAML[3])
    code, shown, said = run(tmp_path, "choose.py")
    assert code == 0, said
    assert shown.splitlines() == ["ErrorFeedback(Sharded(Int4()))", "ErrorFeedback(Sharded(Int4(block=64)))"]
    given = ('strategy="Cast(Mean(), bfloat16)"', "built.inner.codec.block=128")
    code, shown, said = run(tmp_path, "choose.py", *given)
    assert code == 0, said
    assert shown.splitlines() == ["Cast(Mean(), bfloat16)", "ErrorFeedback(Sharded(Int4(block=128)))"]
