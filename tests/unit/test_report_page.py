"""The page of ``gradlane report``: what it holds, and what it says about files it cannot read."""

import csv
import html
import json
import re
from html.parser import HTMLParser
from urllib.parse import unquote

import pytest

from gradlane.cli import main
from gradlane.report.write import write_record_page

from ..support import report_samples as samples

VOID = {"meta", "link", "br", "img", "hr", "input", "wbr"}


class Page(HTMLParser):
    """Checks that every element is closed; keeps the text, the attributes and the drawings."""

    def __init__(self, source):
        super().__init__()
        self.open, self.words, self.attributes, self.source = [], [], [], source
        self.feed(source)
        self.close()
        assert not self.open, f"never closed: {self.open}"
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.attributes += [(tag, *pair) for pair in attributes]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} is closed within another element"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def count(self, tag, name, value):
        return self.attributes.count((tag, name, value))


@pytest.fixture
def page(tmp_path, capsys):
    def make(*documents):
        paths = [tmp_path / f"input-{at}.json" for at in range(len(documents))]
        for path, document in zip(paths, documents, strict=True):
            path.write_text(json.dumps(document), encoding="utf-8")
        out = tmp_path / "page.html"
        code = main(["report", *map(str, paths), "--out", str(out)])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        assert printed.out.endswith(f"wrote {out}\n")
        return Page(out.read_text(encoding="utf-8"))

    return make


def assert_clean(page):
    assert not re.search(r"https?:|//\w|url\(|@import", page.source)
    links = [a[2] for a in page.attributes if a[1] in ("src", "href", "srcset")]
    assert not [link for link in links if not link.startswith(("#", "data:text/csv;"))]
    assert not re.search(r"\b(nan|inf|None|null|Infinity)\b", page.source.partition("<script>")[0])
    assert page.source.count("<script") == 1
    named = page.count("svg", "role", "img") + page.count("svg", "aria-hidden", "true")
    assert page.source.count("<svg") == named + page.count(
        "svg", "class", "plot"
    )  # a plot is part of a chart


def test_everything_that_was_run_is_on_the_page(page):
    bench, train = samples.bench_document(), samples.train_document()
    made = page(bench, train)
    assert_clean(made)
    for document in (bench, train):
        for result in document["results"]:
            assert html.escape(result["arm"]) in made.source
        for key in document["settings"]:
            assert key in made.text
        assert document["made"]["command"] in made.text
    assert "2026-11-15 23:10 UTC" in made.text
    assert "6 arms on 3 links (loopback, 1gbit, 100mbit)" in made.text
    assert "threads \u2013 links loopback, 1gbit, 100mbit interleaved yes" in made.text
    assert made.count("svg", "class", "line-chart") == 3
    assert made.count("svg", "class", "timeline") == 3 * 4 * 2
    assert made.count("svg", "class", "bar") == 3 * 5 + 3 * 4 + 5 + 4  # no bar for compute alone
    assert made.source.count('<th scope="col">') > 10
    assert made.source.count("<caption>") == 1 + 3 + 1


def test_the_page_answers_first(page):
    """The verdict, then pictures, then tables; how it was run is folded, at the end."""
    made = page(samples.train_document())
    order = ("reached 3.25 bits/byte", 'class="line-chart"', "<table>", '<details class="how">')
    places = [made.source.index(part) for part in order]
    assert places == sorted(places)
    assert made.source.index('class="lead"') < places[0] < made.source.index("<h2>")


@pytest.mark.parametrize(
    ("text", "markup"),
    [
        ("`gradlane train --seeds 3` shows", "<code>gradlane train --seeds 3</code> shows"),
        ("<b> and `a < b`", "&lt;b&gt; and <code>a &lt; b</code>"),
        ("one ` alone <b>", "one ` alone &lt;b&gt;"),
    ],
)
def test_a_command_in_the_verdict_is_code(text, markup, monkeypatch, page):
    monkeypatch.setattr("gradlane.report.write.verdict", lambda document: [text])
    assert markup in page(samples.train_document()).source


def test_every_figure_and_table_has_its_numbers_as_csv(page):
    made = page(samples.bench_document(), samples.train_document(), samples.plan_document())
    files = {}
    for tag, name, value in made.attributes:
        if tag == "a" and name == "href" and value.startswith("data:"):
            text = unquote(value.partition(",")[2])
        elif tag == "a" and name == "download":
            files[value] = list(csv.DictReader(text.splitlines()))
    assert len(files) == made.source.count("<figure") + made.source.count("<table")
    run = samples.train_document()["results"][1]["runs"][2]
    shown = [
        (float(row["seconds"]), float(row["loss"]))
        for row in files["file-2-loss-against-seconds.csv"]
        if (row["arm"], row["seed"]) == ("Cast(Mean(), bfloat16)", "2")
    ]
    assert shown == list(zip(run["seconds"], run["loss"], strict=True))
    assert float(files["file-1-3-phases.csv"][0]["encode, s"]) == 0.004
    assert files["file-3-plan.csv"][0]["arm"] == "ddp"


def test_a_page_of_a_record_in_memory_names_no_file(tmp_path):
    write_record_page(samples.train_document(), None, tmp_path / "page.html")
    assert ".json" not in (tmp_path / "page.html").read_text()
    write_record_page(samples.train_document(), tmp_path / "kept.json", tmp_path / "page.html")
    assert "in kept.json" in (tmp_path / "page.html").read_text()


def test_a_plan_has_its_forecasts_its_crossings_and_more_ranks(page):
    plan = samples.plan_document()
    made = page(plan, samples.bench_document())
    assert_clean(made)
    assert "One training step was predicted for 4 arms, with 2 ranks." in made.text
    assert "The fastest is ErrorFeedback(PowerSGD(4)), predicted 7.6 times as fast as plain DDP" in made.text
    assert "The one that loses least and pays is Cast(Mean(), bfloat16), predicted 1.78 times" in made.text
    row = "Cast(Mean(), bfloat16) 18.8 MB 192.8 1.78 \u00d7 bf16 pays 5.00 Gbit/s"
    assert row in made.text.replace("\u00a0", " ")
    assert "Mean() 37.7 MB 343.6 1.00 \u00d7 exact even no rate" in made.text.replace("\u00a0", " ")
    chart = made.source[made.source.index('<figure class="single">') :].partition("</figure>")[0]
    assert chart.count("crossing") == 2  # of the two that pay, each on its own line
    assert chart.count('class="mean"') == 4
    assert "compute alone, 41.0 ms" in made.text.replace("\u00a0", " ")
    assert "pays if it gains more than 10%, twice the error of a forecast" in made.text
    assert "More ranks, extrapolated: step, its band, speed-up arm 8 ranks 64 ranks" in made.text


def test_a_circle_lies_on_the_line_of_its_strategy(page):
    """At the crossing, half way between two rates on a logarithmic axis."""
    plan = samples.plan_document(ratios={"ddp": 1, "Cast(Mean(), bfloat16)": 2})
    rates = plan["sweep"]["rates_bits"]
    plan["results"][1]["pays_below_bits"] = (rates[4] * rates[5]) ** 0.5
    source = page(plan).source
    across, down = map(float, re.search(r'circle cx="([\d.]+)" cy="([\d.]+)" r="3.4"', source).groups())
    lines = re.findall(r'<path d="M([^"]+)" class="mean"', source)
    vertices = [tuple(map(float, re.findall(r"[\d.]+", pair))) for pair in lines[1].split("L")]
    (x1, y1), (x2, y2) = vertices[4:6]
    assert across == pytest.approx((x1 + x2) / 2, abs=0.1)
    assert down == pytest.approx((y1 + y2) / 2, abs=0.1)


def test_a_plan_that_is_off_says_so_and_draws_ddp_alone(page):
    plan = samples.plan_document(ratios={"ddp": 1}, more=()) | {"off": True}
    made = page(plan)
    assert_clean(made)
    assert "Off: the link is not the bottleneck, so nothing here can pay. Use plain DDP." in made.text
    assert "More ranks" not in made.text
    assert "crossing" not in made.source.partition("</style>")[2]


def test_a_plan_whose_sweep_has_holes_is_refused(tmp_path, capsys):
    plan = samples.plan_document()
    plan["sweep"]["seconds"]["ddp"].pop()
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert main(["report", str(tmp_path / "plan.json"), "--out", str(tmp_path / "page.html")]) == 2
    assert "ddp has 12 times for 13 rates" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_arms_that_failed_are_in_tables_and_not_in_charts(page):
    bench = samples.bench_document(links={"100mbit": 1e8}, ratios={"ddp": 1, "Mean()": 1})
    bench["results"].append(samples.failed_result("Slow()", "hung", "no step in 60 s"))
    bench["results"].append(samples.failed_result("Bad()", "crashed", samples.TRACEBACK))
    bench["results"].append(samples.failed_result("Late()", "not run", "the budget was spent"))
    train = samples.train_document([samples.train_result("ddp", 1), samples.crashed_training("Bad()")])
    made = page(bench, train)
    assert_clean(made)
    assert "Slow() hung" in made.text
    assert "no step in 60 s" in made.text
    assert made.source.count("<summary>gradlane.errors.PeerFailed: rank 1 raised ValueError") == 2
    assert "Late() not run" in made.text
    charts = "".join(re.findall("<svg.*?</svg>", made.source, re.DOTALL))
    assert "Mean()" in charts
    assert not re.search(r"Bad\(\)|Slow\(\)|Late\(\)", charts)


def test_names_and_notes_are_escaped(page):
    name = samples.ODD_NAME
    bench = samples.bench_document(links={"<i>link</i>": 1e8}, ratios={"ddp": 1, name: 2})
    bench["results"][0]["note"] = "<script>alert(1)</script>"
    bench["settings"]["<u>"] = "</style>"
    bench["results"].append(samples.failed_result(name, "crashed", "<pre>\n<b>", link="<i>link</i>"))
    made = page(bench, samples.train_document([samples.train_result(name, 2)]))
    assert_clean(made)
    assert name in made.text
    assert not re.search("<b>|<i>|<u>|</style>.*</style>", made.source, re.DOTALL)


def test_learning_rates_that_were_tuned_have_a_table(page):
    dense, wild = samples.train_result("ddp", 1), samples.crashed_training("Wild()")
    dense |= {"lr": 0.2, "remark": "best rate is the highest tried: widen the grid"}
    dense["tuning"] = [{"lr": 0.1, "loss": 3.25, "status": "ok"}, {"lr": 0.2, "loss": 3.125, "status": "ok"}]
    wild |= {"lr": None, "remark": "", "tuning": [{"lr": 0.1, "loss": None, "status": "crashed"}]}
    made = page(samples.train_document([dense, wild]))
    assert_clean(made)
    table = made.text[made.text.index("Final loss at each learning rate, bits/byte") :]
    assert "arm 0.1 0.2 best rate A ddp 3.250 3.125 0.2 best rate is the highest tried" in table
    assert "Wild() crashed \u2013 \u2013" in table
    assert "on a seed that is not among those above" in made.text
    plain = page(samples.train_document())
    assert "learning rate" not in plain.text
    assert "best rate" not in plain.text


@pytest.mark.parametrize(
    "results",
    [
        [samples.train_result("ddp", 1, seeds=(0,))],
        [samples.train_result("ddp", 1, steps=1), samples.train_result("Noop()", None, steps=1)],
        [
            samples.train_result("ddp", 1),
            samples.train_result("Noop()", None),
            samples.train_result("Q()", 400),
        ],
        [samples.train_result("ddp", 1), samples.train_result("Wild()", 1, diverged=True)],
        [samples.train_result("Wild()", 1, seeds=(0,), diverged=True)],
        [samples.crashed_training("ddp")],
        [samples.train_result(f"Arm({at})", at + 1) for at in range(30)],
    ],
    ids=["one seed", "one step", "zero bytes", "diverged", "only diverged", "all crashed", "many arms"],
)
@pytest.mark.parametrize("target", [3.25, None])
def test_training_at_the_edges(page, results, target):
    made = page(samples.train_document(results, target))
    assert_clean(made)
    for result in results:
        assert result["arm"] in made.text


def test_bench_at_the_edges(page):
    document = samples.bench_document(links={"x": 1e8}, ratios={"Mean()": None, "ddp": None}, ranks=(1, 4))
    for result in document["results"]:
        result |= {"speedup": 0, "steps": 1, "exposed_s": None, "status": "partial"}
    document["results"][0]["timeline"][0] |= {"requests": [], "backward_s": 0, "end_s": 0}
    document["results"][0]["phases"] = dict.fromkeys(document["results"][0]["phases"], 0)
    document["made"], document["ended"] = {}, "interrupted"
    made = page(document)
    assert_clean(made)
    assert "x, 1 rank" in made.text
    assert "x, 4 ranks" in made.text
    assert "interrupted: later steps are missing" in made.text


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "Expected `object`, got `array`"),
        ({"kind": "profile", "format": 1}, "Invalid enum value 'profile' - at `$.kind`"),
        ({"kind": "bench", "format": 2}, "has format 2, gradlane"),
        ({"kind": "bench"}, "missing required field `format`"),
        ({"kind": "train", "format": 1, "results": []}, "holds no results; run `gradlane train`"),
        ({"kind": "bench", "format": 1, "results": {}}, "Expected `array`, got `object` - at `$.results`"),
        ({"kind": "bench", "format": 1, "results": [7]}, "Expected `object`, got `int` - at `$.results[0]`"),
        (
            {"kind": "bench", "format": 1, "results": [{"link": "x", "ranks": 2}]},
            "missing required field `arm` - at `$.results[0]`",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content, message, tmp_path, capsys):
    path = tmp_path / "input.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    out = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(out)]) == 2
    printed = capsys.readouterr().err
    assert str(path) in printed
    assert message in printed
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"median_s": "fast"}, "Expected `float | null`, got `str` - at `$.results[2].median_s`"),
        ({"cpu_s": True}, "Expected `float | null`, got `bool` - at `$.results[2].cpu_s`"),
        (
            {"timeline": [{"rank": 0, "step": None}]},
            "Expected `int`, got `null` - at `$.results[2].timeline[0].step`",
        ),
    ],
)
def test_a_wrong_figure_is_named_with_its_path(change, message, tmp_path, capsys):
    document = samples.bench_document()
    document["results"][2] |= change
    path = tmp_path / "input.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    assert f"{path}: {message}" in capsys.readouterr().err


def test_a_run_whose_columns_have_other_lengths_is_named(tmp_path, capsys):
    document = samples.train_document()
    document["results"][1]["runs"][2]["loss"].pop()
    path = tmp_path / "input.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["report", str(path), "--out", str(tmp_path / "page.html")]) == 2
    assert "16 steps, 15 loss, 16 bytes, 16 seconds" in (found := capsys.readouterr().err)
    assert "at `$.results[1].runs[2]`" in found


def test_places_that_cannot_be_written(tmp_path, capsys):
    path = tmp_path / "input.json"
    path.write_text(json.dumps(samples.bench_document()), encoding="utf-8")
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert f"there is no file {tmp_path / 'none.json'}" in capsys.readouterr().err
    assert main(["report", str(path), "--out", str(tmp_path / "no" / "page.html")]) == 2
    assert f"the folder {tmp_path / 'no'} of" in capsys.readouterr().err
    assert main(["report", str(path), "--out", str(path)]) == 2
    assert "is an input and would be overwritten" in capsys.readouterr().err
    assert json.loads(path.read_text(encoding="utf-8"))["kind"] == "bench"


def test_figures_that_are_not_finite_are_dashes(page):
    document = samples.bench_document(links={"x": 1e8})
    document["results"][2] |= {"median_s": float("nan"), "speedup": float("inf"), "ledger_bytes": 10**400}
    document["settings"]["lr"] = float("nan")
    assert_clean(page(document))
