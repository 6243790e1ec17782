"""``gradlane plan`` from figures alone: what it prints and writes, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from gradlane.bench.link import parse_link
from gradlane.bench.plan_figures import PlanFigures
from gradlane.bench.plan_given import Job, given_figures, parse_seconds, slots_for
from gradlane.bench.plan_record import plan_record
from gradlane.cli import main
from gradlane.errors import InvalidValue
from gradlane.plan.beat import even_beat
from gradlane.plan.crossings import FASTEST, pays_below
from gradlane.plan.forecast import DDP, forecasts, judge
from gradlane.plan.pipeline import Forecast
from gradlane.plan.scale import at_rate, curves_of_link
from gradlane.plan.work import BucketWork, Phase, dense_work

GIVEN = ("plan", "--parameters", "3M", "--compute", "20ms")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_from_figures_it_prints_a_table_and_writes_json_and_page(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arms = ("Mean()", "Cast(Mean(), bfloat16)", "Sharded(Int8())")
    options = [part for arm in arms for part in ("--strategy", arm)]
    options += [
        "--ranks",
        "4",
        "--link",
        "1gbit",
        "--more-ranks",
        "16",
        "--json",
        str(file),
        "--page",
        str(page),
    ]
    assert main([*GIVEN, *options]) == 0
    shown = capsys.readouterr().out
    assert "3M, 3,000,000 parameters, 4 ranks: 956 Mbit/s" in shown
    assert "compute alone 20 ms, from figures" in shown
    assert "More ranks, extrapolated" in shown
    assert max(map(len, shown.splitlines())) <= 100
    assert max(len(line) for line in shown.splitlines()[2:]) <= 80
    record = json.loads(file.read_text())
    by_arm = {row["arm"]: row for row in record["results"]}
    assert list(by_arm) == ["ddp", *arms]
    assert by_arm["ddp"]["node_bytes"] == by_arm["Mean()"]["node_bytes"] == 2 * 3 * 12_000_000 // 4
    assert by_arm["Cast(Mean(), bfloat16)"]["verdict"] == by_arm["Sharded(Int8())"]["verdict"] == "pays"
    assert by_arm["Sharded(Int8())"]["node_bytes"] < by_arm["ddp"]["node_bytes"] / 3.9
    # 18 MB at 1 Gbit/s take 150 ms, nearly all of it behind 20 ms of compute.
    assert 0.15 < by_arm["ddp"]["seconds"] < 0.175
    assert by_arm["Mean()"]["pays_below_bits"] is None
    assert by_arm["Sharded(Int8())"]["pays_below_bits"] > 1e9
    assert [row["ranks"] for row in record["more_ranks"]] == [16] * 4
    for row in record["more_ranks"]:
        assert row["low_s"] < row["seconds"] < row["high_s"]
    again = PlanFigures.from_dict(record["figures"])
    assert json.loads(json.dumps(again.as_dict())) == record["figures"]
    assert "Sharded(Int8())" in page.read_text()
    assert main(["report", str(file), "--out", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == page.read_text()


def test_a_fast_link_is_off_before_any_strategy_is_timed(capsys):
    assert main(["plan", "--parameters", "100k", "--compute", "2s", "--link", "10gbit"]) == 0
    shown = capsys.readouterr().out
    assert "Off: the link is not the bottleneck, so nothing here can pay. Use plain DDP." in shown
    assert "Sharded" not in shown


def test_nodes_bring_strategies_across_them(tmp_path, capsys):
    file = tmp_path / "plan.json"
    options = ("--ranks", "64", "--per-node", "8", "--link", "1gbit", "--json", str(file))
    options += ("--strategy", "Sharded(Int8())", "--strategy", "Hierarchical(Sharded(Int8()))")
    assert main([*GIVEN, *options]) == 0
    assert "64 ranks, 8 on each node" in capsys.readouterr().out
    dense, flat, across = json.loads(file.read_text())["results"]
    # A flat exchange leaves the node from eight ranks: an int8 code has no ratio above that.
    assert flat["verdict"] == "loses"
    assert flat["why"].startswith("link")
    assert flat["node_bytes"] > dense["node_bytes"]
    assert across["verdict"] == "pays"
    assert across["node_bytes"] < dense["node_bytes"] / 3


def test_a_thousand_ranks(tmp_path):
    file = tmp_path / "plan.json"
    options = ("--ranks", "1024", "--link", "10gbit", "--json", str(file))
    options += ("--strategy", "ErrorFeedback(Sharded(Int4()))", "--strategy", "Gathered(Int8())")
    assert main([*GIVEN, *options]) == 0
    dense, int4, gathered = json.loads(file.read_text())["results"]
    assert dense["node_bytes"] == 2 * 1023 * 12_000_000 // 1024
    assert dense["latency_s"] > 2 * 1023 * 50e-6  # of one bucket
    assert int4["node_bytes"] < dense["node_bytes"] / 7
    assert gathered["node_bytes"] > 100 * dense["node_bytes"]
    assert gathered["verdict"] == "loses"


def test_in_a_job_rank_0_alone_speaks(capsys, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    options = ("--strategy", "Mean()", "--link", "1gbit")
    assert main([*GIVEN, *options]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert main([*GIVEN, *options]) == 0
    assert "3,000,000 parameters" in capsys.readouterr().out


LINK = ("--link", "1gbit")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--parameters", "125M"), "--parameters 125M has no step to measure; add --compute 180ms, or"),
        (("--delay", "1ms"), "--delay 1ms is for plans from figures, and this one measures the delay; add"),
        (("--ranks", "65"), "ranks=65 cannot be measured here; use 2 to 64, or plan from figures"),
        (("--ranks", "1"), "ranks=1 cannot be measured here; use 2 to 64"),
        (("--ranks", "4", "--per-node", "3"), "4 ranks are not several nodes of 3; use 1 or more a node"),
        (("--ranks", "4", "--per-node", "4"), "4 ranks are not several nodes of 4"),
        (("--per-node", "0"), "2 ranks are not several nodes of 0"),
        (("--strategy", "Maen()"), "did you mean Mean?"),
        (("--model", "vgg"), "model 'vgg' is not known; use mlp9m"),
        (("--link", "fast"), "link 'fast' is not known"),
        (("--bucket-mb", "0"), "--bucket-mb 0 holds nothing; use a number above 0, say 25"),
        (("--json", "missing/plan.json"), "missing/plan.json cannot be written: No such file"),
        (("--page", "missing/plan.html"), "missing/plan.html cannot be written: No such file"),
        (GIVEN[1:], "an unshaped link has no rate to plan with; add --link 10gbit"),
        ((*GIVEN[1:], *LINK, "--compute", "180"), "'180' is not a time; write a number with its unit"),
        ((*GIVEN[1:], *LINK, "--compute", "0ms"), "compute=0 s is not above 0; give the time of one step"),
        ((*GIVEN[1:], *LINK, "--delay", "fast"), "'fast' is not a time"),
        ((*GIVEN[1:], *LINK, "--parameters", "many"), "'many' parameters are not possible; write a number"),
        ((*GIVEN[1:], *LINK, "--model", "mlp9m"), "--parameters 3M and --model mlp9m are two models"),
        ((*GIVEN[1:], *LINK, "--ranks", "1"), "ranks=1 cannot be planned; use 2 to 65,536"),
        ((*GIVEN[1:], *LINK, "--ranks", "100000"), "ranks=100000 cannot be planned; use 2 to 65,536"),
        ((*GIVEN[1:], *LINK, "--ranks", "6", "--per-node", "4"), "6 ranks are not nodes of 4; use a number"),
        ((*GIVEN[1:], "--link", "2000gbit"), "link '2000gbit' is outside of 100kbit to 1000gbit"),
        (
            (*GIVEN[1:], *LINK, "--strategy", "Mean()", "--ranks", "4", "--more-ranks", "4"),
            "--more-ranks 4 cannot be added; use a number above 4, up to 65,536",
        ),
        (
            (*GIVEN[1:], *LINK, "--strategy", "LocalSteps(Mean(), every=8)"),
            "LocalSteps sends nothing in most steps, so it has no typical one; plan the strategy inside it",
        ),
    ],
)  # fmt: skip
def test_bad_input_is_a_message_and_exit_code_2(options, message, capsys):
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "options", "message"),
    [
        ({"WORLD_SIZE": "2"}, ("--ranks", "4"), "--ranks 4 are not those of this job, which has 2"),
        ({"WORLD_SIZE": "1"}, (), "a job of 1 rank exchanges nothing; start 2 or more"),
    ],
)  # fmt: skip
def test_bad_input_in_a_job(environ, options, message, capsys, monkeypatch):
    for name, value in {"RANK": "0", "MASTER_ADDR": "::1", "MASTER_PORT": "1", **environ}.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", *options]) == 2
    assert message in capsys.readouterr().err


def test_times_are_read_with_their_unit():
    read = [parse_seconds(text) for text in ("180ms", "1.2s", "50us", " .5S ")]
    assert read == pytest.approx([0.18, 1.2, 5e-5, 0.5])
    for text in ("180", "ms", "1 m", "-1s", "1e3s"):
        with pytest.raises(InvalidValue, match="is not a time"):
            parse_seconds(text)


def test_a_model_of_a_size_has_that_size():
    for count in (1, 1024**2, 3 * 1024**2 + 7):
        assert sum(slot.numel for slot in slots_for(count)) == count


def test_the_sweep_holds_the_link_and_all_crossings():
    job = Job(slots_for(2_000_000), 0.02, 4, 1, parse_link("1gbit"), 5e-5)
    record = plan_record(given_figures(job, ["Sharded(Int8())"]), {"model": "2M"})
    rates, rate = record["sweep"]["rates_bits"], record["rate_bits"]
    crossed = record["results"][1]["pays_below_bits"]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(rate / 100)
    assert rates[-1] >= max(10 * rate, crossed)
    for seconds in record["sweep"]["seconds"].values():
        assert seconds == sorted(seconds, reverse=True)  # a faster link never makes a step longer


def test_where_forecasts_are_off_less_is_said_to_pay():
    """The error is that of DDP's own forecast, as it was measured."""
    job = Job(slots_for(2_000_000), 0.02, 2, 1, parse_link("1gbit"), 5e-5)
    given = given_figures(job, ["Cast(Mean(), bfloat16)"])
    sure, unsure = (
        plan_record(replace(given, error=error, ddp_s=0.1), {"model": "2M"}, more_ranks=[4])
        for error in (0.05, 0.6)
    )
    assert (sure["error"], unsure["error"]) == (0.05, 0.6)
    (_, narrow), (_, unjudged) = sure["results"], unsure["results"]
    assert narrow["seconds"] == unjudged["seconds"]  # an error changes verdicts, not forecasts
    assert (narrow["verdict"], unjudged["verdict"]) == ("pays", "even")
    assert narrow["pays_below_bits"] > 1e9
    assert unjudged["pays_below_bits"] is None
    assert unsure["more_ranks"][1]["high_s"] > 1.3 * sure["more_ranks"][1]["high_s"]


def test_a_faster_link_does_not_keep_what_a_slow_one_lost():
    """An all-reduce that reaches nine tenths of a link does so on a faster one too: else it would seem that
    compression pays at any rate."""
    sizes = [10**6, 10**7, 10**7]
    curves = curves_of_link(4e7, 1e-5, 2)
    ring = curves.by_primitive["all_reduce"]
    slow = type(ring)(tuple((size, seconds + size / 36e7) for size, seconds in ring.points), ring.issue_s)
    curves = type(curves)(2, {**curves.by_primitive, "all_reduce": slow})
    beat = even_beat(0.05, sizes)
    work = [BucketWork((Phase("all_gather", "world", size // 4, 0.002),), 0.002, size) for size in sizes]

    def at(rate):
        found = forecasts(beat, {"coded": work}, at_rate(curves, rate), 4.0)
        return found["coded"], found[DDP]

    assert judge(*at(4e7)).verdict == "pays"
    assert pays_below(at, 0.05) < FASTEST / 10
    assert at(FASTEST)[1].seconds < 0.06
    assert at_rate(curves, 4e9).curve("all_reduce").bytes_per_s > 2.5e9  # and not 0.33e9


def test_what_pays_everywhere_or_nowhere_has_no_crossing():
    quick, slow = Forecast(1.0, 0.5, 0.0, 0.0, 0.0), Forecast(2.0, 0.5, 0.0, 0.0, 0.0)
    assert pays_below(lambda rate: (quick, slow), 0.05) == FASTEST
    assert pays_below(lambda rate: (slow, quick), 0.05) is None
    assert dense_work([8])[0].dense_bytes == 8
