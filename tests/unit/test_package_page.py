"""What a package index shows: the README, with links that lead somewhere."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import gradlane

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\]\(([^)]+)\)")
FOLDERS = ("tests", "docs", "examples", "src/gradlane")
LEFT_BEHIND = re.compile(r"__pycache__|\.egg-info|\.so$|/\.[^/]*$")  # by builds and tests
ADDRESS = "https://example.org/them/gradlane"


@pytest.fixture(scope="module")
def build(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return runpy.run_path("setup.py", run_name="read")


def test_without_an_address_relative_links_are_plain_text(build):
    shown = build["description"](README, "")
    assert LINK.findall(shown)
    assert all(link.startswith("https://") for link in LINK.findall(shown))
    assert "has never run on a GPU" in shown.replace("\n", " ")
    assert build["urls"]("") == {}


def test_with_an_address_every_link_leads_to_the_repository(build):
    shown = build["description"](README, ADDRESS)
    found = LINK.findall(shown)
    assert f"{ADDRESS}/blob/main/docs/getting-started.md" in found
    assert f"{ADDRESS}/blob/main/docs/lightning.md#fabric" in found
    assert len(found) == len(LINK.findall(README))
    assert all(link.startswith("https://") for link in found)
    assert build["urls"](ADDRESS)["Issues"] == f"{ADDRESS}/issues"


def test_pictures_are_raw_files_or_left_out(build):
    picture = "![a chart](docs/_static/chart.svg)"
    assert build["description"](picture, ADDRESS) == f"![a chart]({ADDRESS}/raw/main/docs/_static/chart.svg)"
    assert build["description"](picture, "") == ""


def test_the_citation_and_the_changelog_know_the_version():
    assert f"version: {gradlane.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## \[([\w.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert gradlane.__version__ in headings


@pytest.mark.slow
def test_a_source_distribution_has_tests_docs_and_examples(tmp_path):
    """Built in a copy: setuptools leaves files beside the sources."""
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "build", "site", "results")
    shutil.copytree(ROOT, copy, ignore=left_out)
    (copy / "benchmarks" / "results").mkdir()
    (copy / "benchmarks" / "results" / "README.md").touch()
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = [*ROOT.glob("*.sh"), *ROOT.glob("*.md")]
    sources += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {str(path.relative_to(ROOT)) for path in sources if not LEFT_BEHIND.search(str(path))}
    assert len(wanted) > 500
    assert wanted - names == set()
