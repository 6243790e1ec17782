"""The page of ``gradlane report`` in a real browser: wide and narrow, light and dark."""

import json
import time

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
    plan = samples.plan_document(ratios={**samples.PLANNED, long_name: 30})
    documents = {"bench.json": bench, "train.json": train, "plan.json": plan}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    write_page([folder / name for name in documents], folder / "page.html")
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


def column(browser, at):
    cells = f"document.querySelector('#file-2 table').querySelectorAll('tr:not(.detail) > :nth-child({at})')"
    return browser.ask(f"[...{cells}].slice(1).map(cell => cell.textContent.trim())")


def bytes_of(text):
    number, unit = text.split()
    return float(number) * {"B": 1, "kB": 1e3, "MB": 1e6}[unit]


@pytest.mark.parametrize(
    ("sent", "units", "unknown"), [(5, {"kB", "MB"}, []), (8, {"MB"}, ["\u2013"])], ids=["step", "target"]
)
def test_a_click_sorts_a_table_by_the_size_of_its_figures(browser, page, sent, units, unknown):
    """An arm that did not reach the target has a dash, which comes last."""
    browser.show(page.as_uri(), 1280, "light")
    before = column(browser, sent)
    click = f"document.querySelectorAll('#file-2 table th[scope=col] button')[{sent - 1}].click()"
    browser.ask(click)
    after = column(browser, sent)
    assert sorted(before) == sorted(after)
    assert before != after
    rising = after[: len(after) - len(unknown)]
    assert after == [*rising, *unknown]
    assert {text.split()[1] for text in rising} == units
    assert list(map(bytes_of, rising)) == sorted(map(bytes_of, rising))
    browser.ask(click)
    assert column(browser, sent) == [*rising[::-1], *unknown]


COLOURS = """(async () => {
  window.found = [];
  for (const figure of document.querySelectorAll("figure")) {
    const image = new Image();
    image.src = await picture(figure);
    await image.decode();
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.width, image.height];
    canvas.getContext("2d").drawImage(image, 0, 0);
    const pixels = canvas.getContext("2d").getImageData(0, 0, image.width, image.height).data;
    found.push([image.src.slice(0, 22), image.width, new Set(new Uint32Array(pixels.buffer)).size]);
  }
  window.finished = true;
})()"""


def test_every_figure_becomes_a_png(browser, page):
    browser.show(page.as_uri(), 1280, "light")
    browser.ask(COLOURS)
    end = time.monotonic() + 30
    while not browser.ask("window.finished"):
        assert time.monotonic() < end, "a figure was not drawn"
        time.sleep(0.1)
    found = browser.ask("found")
    assert len(found) == browser.ask("document.querySelectorAll('button.png').length") > 8
    assert {kind for kind, *_ in found} == {"data:image/png;base64,"}
    assert min(width for _, width, _ in found) > 600
    assert min(colours for *_, colours in found) > 50  # an empty one has one
    assert browser.ask("document.querySelectorAll('figure').length") == len(found)  # no copy is left behind


def test_no_figure_hides_beside_a_small_screen(browser, page):
    browser.show(page.as_uri(), 400, "light")
    wide = "[...document.querySelectorAll('td, th')].filter(cell => cell.getBoundingClientRect().right > 400)"
    assert browser.ask(f"{wide}.map(cell => cell.textContent).join()") == ""
