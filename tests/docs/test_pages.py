"""What every page promises to somebody who is new: it begins with what to type, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
READMES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "src").rglob("README.md"))]
NOTHING_TO_TYPE = {"index", "changelog", "contributing", "idea", "versions"}  # the first begins with reasons
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page):
    """The anchors of its headings, as the site and a browser of repositories make them."""
    headings = HEADING.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_begins_with_what_to_type(page):
    if page.stem not in NOTHING_TO_TYPE:
        title, empty, first = page.read_text(encoding="utf-8").splitlines()[:3]
        assert title.startswith("# ")
        assert empty == ""
        assert first.startswith("```")


@pytest.mark.parametrize("page", [*READMES, *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if path == "" else page.parent / path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_page_of_examples_lists_them_all():
    listed = set(re.findall(r"\.\./examples/([\w.]+)", (ROOT / "docs" / "examples.md").read_text()))
    assert listed == {path.name for path in (ROOT / "examples").iterdir() if path.is_file()}
