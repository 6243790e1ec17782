"""The documentation site in a real browser, read from a folder: wide and narrow, and its search."""

import time

import pytest

from ..docs.build import build

pytestmark = pytest.mark.slow

PAGES = ["index", "getting-started", "choosing", "aggregation", "figures", "api/attach", "api/strategies"]
PAGES += ["command-line", "config-files", "examples"]
# Tables and code may be wider than the page, each within a box of its own.
WIDE = """[...document.querySelectorAll('article *')]
    .filter(part => !part.closest('.table-wrapper, .highlight'))
    .filter(part => part.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
    .map(part => part.outerHTML.slice(0, 80)).join()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return build(tmp_path_factory.mktemp("docs"))


@pytest.mark.parametrize("width", [1440, 1366, 1280, 1000, 400])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_overflows_and_nothing_is_fetched(browser, site, name, width):
    page = site / f"{name}.html"
    browser.show(page.as_uri(), width, "light")
    assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert browser.ask(WIDE) == ""
    assert {address.partition(":")[0] for address in browser.requests()} <= {"file", "data"}


def test_search_works_without_a_server(browser, site):
    browser.show(f"{(site / 'search.html').as_uri()}?q=PowerSGD", 1280, "light")
    end = time.monotonic() + 20
    while browser.ask("document.querySelectorAll('#search-results li').length") < 4:  # they come one by one
        assert time.monotonic() < end, "the search found next to nothing"
        time.sleep(0.1)
