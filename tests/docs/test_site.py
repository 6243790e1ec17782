"""The documentation site: it builds without a warning, is complete, and needs no network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import gradlane
import gradlane.compat
import gradlane.doctor
import gradlane.local

from .build import DOCS, build

pytestmark = pytest.mark.slow  # `make docs` builds it too
FRAMEWORKS = {"accelerate", "lightning", "ray", "transformers"}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="module")
def described(site):
    """Every Python name that has an entry in the reference."""
    pages = [path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html")]
    return {name for page in pages for name in re.findall(r'<dt [^>]*id="([\w.]+)"', page)}


@pytest.mark.parametrize(
    "module", [gradlane, gradlane.compat, gradlane.doctor, gradlane.local], ids=lambda module: module.__name__
)
def test_every_public_name_is_in_the_reference(module, described):
    public = {f"{module.__name__}.{name}" for name in module.__all__ if name != "__version__"}
    missing = sorted(public - described)
    assert missing == [], "give these an entry in a page of docs/api/"


def test_the_integrations_are_in_the_reference_without_their_frameworks(described):
    """Read from their sources: the frameworks need not be installed."""
    public = set()
    for path in (Path(gradlane.__file__).parent / "integrations").glob("*.py"):
        if not set(re.findall(r"^(?:from|import) (\w+)", path.read_text(), re.MULTILINE)) & FRAMEWORKS:
            continue
        names = re.findall(r"^(?:def|class) ([A-Za-z]\w*)", path.read_text(), re.MULTILINE)
        page = "lightning" if path.stem == "fabric" else path.stem  # from where it is imported
        public |= {f"gradlane.integrations.{page}.{name}" for name in names}
    assert len(public) == 8
    assert not sorted(public - described)


def test_every_page_is_built(site):
    sources = {path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")}
    assert len(sources) > 10
    assert not [path for path in sources if not (site / path).is_file()]


class Fetched(HTMLParser):
    """Addresses that a browser loads by itself; links are not among them."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in ("script", "img", "iframe", "source"):
            self.addresses.append(given.get("src"))
        if tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.addresses.append(given.get("href"))


def test_pages_fetch_nothing_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    for page in pages:
        parser = Fetched()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.addresses
        assert not [at for at in parser.addresses if at and re.match(r"(https?:)?//", at)], page
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//|@import[^;]*//", styles)
