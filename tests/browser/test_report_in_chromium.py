"""The page of ``gradlane report`` in a real browser: wide and narrow, light and dark."""

import json

import pytest

from gradlane.report.write import write_page

from ..support import report_samples as samples

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    bench, train = samples.bench_document(), samples.train_document()
    long_name = (
        "ErrorFeedback(Cast(TopK(0.001), bfloat16), decay=0.99_and_a_word_that_cannot_be_broken_anywhere)"
    )
    bench["results"].append(samples.failed_result(long_name, "crashed", samples.TRACEBACK))
    train["results"].append(samples.train_result(long_name, 100))
    bench["made"]["command"] += " --arm " + 300 * "x"
    for name, document in (("bench.json", bench), ("train.json", train)):
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    write_page([folder / "bench.json", folder / "train.json"], folder / "page.html")
    return folder / "page.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_overflows_and_nothing_is_fetched(browser, page, width, scheme, tmp_path):
    browser.show(page.as_uri(), width, scheme)
    browser.ask("document.querySelectorAll('details').forEach(part => {part.name = ''; part.open = true})")
    assert browser.requests() == [page.as_uri()]
    assert browser.ask("innerWidth") == width
    assert browser.ask("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    # Only tables may be wider than the page, each within a box of its own.
    wide = "[...document.querySelectorAll('main *')].filter(part => !part.closest('.scroll')"
    wide += " && part.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
    assert browser.ask(f"{wide}.map(part => part.outerHTML.slice(0, 80)).join()") == ""
    dark = browser.ask("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    assert dark == (scheme == "dark")
    picture = tmp_path / f"{width}-{scheme}.png"
    browser.screenshot(picture)
    assert picture.stat().st_size > 50_000


def test_text_in_charts_keeps_a_readable_size(browser, page):
    for width in (1280, 400):
        browser.show(page.as_uri(), width, "light")
        sizes = (
            "[...document.querySelectorAll('svg text')].filter(text => text.getBoundingClientRect().height)"
        )
        assert browser.ask(f"Math.min(...{sizes}.map(text => text.getBoundingClientRect().height))") >= 11
