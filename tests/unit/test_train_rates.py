"""Learning rates of ``gradlane train``: what ``--lr`` takes, and which rate of a grid an arm gets."""

import json
import math

import pytest

from gradlane.bench.arm_processes import ArmFailed
from gradlane.cli.train_view import remarks, table
from gradlane.errors import InvalidValue
from gradlane.report.number_format import DASH
from gradlane.train.learning_rates import best_run, parse_rates, tuning_figures
from gradlane.train.loss_figures import final_step, result
from gradlane.train.seed_run import SeedRun
from gradlane.train.train_plan import MOST_SEEDS, TUNING_SEED, TrainPlan


def tried(rate, loss, whole=True):
    run = SeedRun(TUNING_SEED, rate)
    run.add_evaluation(0, 8.0)
    run.add_evaluation(10, loss)
    if whole:
        run.mark_complete()
    return run


def failed(rate, status):
    run = SeedRun(TUNING_SEED, rate)
    run.mark_failed(ArmFailed(status, "in step 3, rank 1: ValueError: no"))
    return run


def reported(loss, seed=0, rate=0.1):
    run = SeedRun(seed, rate)
    run.add_evaluation(0, 8.0)
    run.add_evaluation(10, loss)
    run.mark_complete()
    return run


def test_rates_are_read_from_text():
    assert parse_rates("0.1") == (0.1,)
    assert parse_rates(" 3e-3, 0.01,1e-2 ") == (0.003, 0.01, 0.01)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lr='' has an empty place; write numbers above 0 with commas between, as 0.05,0.1,0.2"),
        ("0.1,,0.2", "lr='0.1,,0.2' has an empty place"),
        ("0.1,", "lr='0.1,' has an empty place"),
        ("fast", "lr='fast' is not a number; write numbers above 0 with commas between, as 0.05,0.1,0.2"),
        ("0.1;0.2", "lr='0.1;0.2' is not a number"),
    ],
)
def test_text_that_holds_no_rates_is_refused(text, message):
    with pytest.raises(InvalidValue) as raised:
        parse_rates(text)
    assert message in str(raised.value)


@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("others", [(), (0.1, 0.2)])
def test_a_rate_that_cannot_train_is_refused(rate, others):
    with pytest.raises(InvalidValue) as raised:
        TrainPlan(lr=(*others, rate))
    assert str(raised.value) == f"lr={rate} cannot train; use a number above 0, say 0.1"


def test_a_rate_that_is_there_twice_is_refused():
    with pytest.raises(InvalidValue) as raised:
        TrainPlan(lr=(0.1, 0.2, 1e-1))
    assert str(raised.value) == "lr=0.1,0.2,0.1 has 0.1 twice; name each rate once"


def test_one_rate_is_not_tuned():
    assert (TrainPlan().rates, TrainPlan().tuned_rates) == ((0.1,), ())
    assert TrainPlan(optimizer="adam").rates == (0.003,)
    assert (TrainPlan(lr=(0.5,)).rates, TrainPlan(lr=(0.5,)).tuned_rates) == ((0.5,), ())
    assert TrainPlan(lr=(0.2, 0.05, 0.1)).tuned_rates == (0.05, 0.1, 0.2)


def test_no_reported_seed_is_the_tuning_seed():
    assert TUNING_SEED not in range(MOST_SEEDS)


def test_the_lowest_final_loss_wins():
    runs = [tried(0.05, 3.5), tried(0.1, 3.2), tried(0.2, 3.4)]
    assert best_run(runs) is runs[1]
    found = tuning_figures(runs, [reported(3.0, rate=0.1)])
    assert (found["lr"], found["remark"]) == (0.1, "")
    assert [(trial["lr"], trial["loss"]) for trial in found["tuning"]] == [
        (0.05, 3.5),
        (0.1, 3.2),
        (0.2, 3.4),
    ]


def test_the_lowest_of_two_equal_rates_wins():
    runs = [tried(0.05, 3.5), tried(0.1, 3.2), tried(0.2, 3.2)]
    assert best_run(runs).rate == 0.1


@pytest.mark.parametrize(
    "loser",
    [
        tried(0.05, math.nan),
        tried(0.05, 1.0, whole=False),
        failed(0.05, "crashed"),
        SeedRun(TUNING_SEED, 0.05),
    ],
    ids=["diverged", "cut off", "crashed", "not begun"],
)
def test_a_run_that_diverged_failed_or_ended_early_loses(loser):
    runs = [loser, tried(0.1, 7.9), tried(0.2, 8.0)]
    assert best_run(runs).rate == 0.1
    found = tuning_figures(runs, [])
    assert (found["tuning"][0]["status"], found["tuning"][0]["loss"]) == (loser.status, None)
    json.dumps(found, allow_nan=False)


def test_a_training_loss_that_was_not_finite_loses_too():
    wild = tried(0.1, 3.0, whole=False)
    wild.status, wild.detail = "diverged", "the training loss is not finite in step 3"
    assert best_run([wild, tried(0.2, 7.0)]).rate == 0.2


@pytest.mark.parametrize(
    ("losses", "remark"),
    [
        ((3.0, 2.9, 2.8), "best rate is the highest tried: widen the grid"),
        ((2.7, 2.9, 2.8), "best rate is the lowest tried: widen the grid"),
        ((2.9, 2.8, 2.9), ""),
        ((2.9, 2.8, math.nan), ""),
        ((2.8, 2.9, math.nan), "best rate is the lowest tried: widen the grid"),
    ],
)
def test_a_best_rate_at_the_edge_of_the_grid_gets_a_remark(losses, remark):
    runs = [tried(rate, loss) for rate, loss in zip((0.05, 0.1, 0.2), losses, strict=True)]
    assert tuning_figures(runs, [reported(3.0, rate=best_run(runs).rate)])["remark"] == remark


def test_an_arm_that_hung_with_one_rate_has_none():
    runs = [tried(0.05, 3.0), failed(0.1, "hung")]
    assert best_run(runs) is None
    entry = result("Bad()", {"ddp": [reported(3.0)], "Bad()": []}, 1, 10, None, runs)
    assert (entry["status"], entry["lr"]) == ("hung", None)
    assert entry["detail"] == "learning rate 0.1, in step 3, rank 1: ValueError: no"


def test_an_arm_without_a_rate_is_reported_with_what_stopped_it():
    runs = {"ddp": [reported(3.0)], "Wild()": []}
    entry = result("Wild()", runs, 1, final_step(runs), 3.5, [tried(0.1, math.nan), tried(0.2, math.nan)])
    assert (entry["status"], entry["final_loss"], entry["lr"]) == ("diverged", None, None)
    assert entry["detail"] == "learning rate 0.1, the held-out loss is not finite after 10 steps"
    assert entry["runs"] == []


def test_an_arm_whose_tuning_was_cut_off_was_not_run():
    runs = {"ddp": []}
    entry = result("ddp", runs, 1, final_step(runs), None, [tried(0.1, 3.0), tried(0.2, 3.0, whole=False)])
    assert (entry["status"], entry["detail"]) == ("not run", "the run ended while learning rates were tuned")
    assert (entry["lr"], entry["runs"]) == (None, [])


def test_an_arm_with_a_rate_that_was_cut_off_before_its_seeds_was_not_run():
    tuning = [failed(0.1, "crashed"), tried(0.2, 3.0)]
    assert result("ddp", {"ddp": []}, 1, None, None, tuning)["status"] == "not run"
    assert result("ddp", {"ddp": []}, 1, None, None, tuning[:1])["status"] == "crashed"


def test_without_tuning_the_entry_has_the_rate_of_its_runs():
    entry = result("ddp", {"ddp": [reported(3.0, rate=0.3)]}, 1, 10, None)
    assert (entry["lr"], entry["tuning"], entry["remark"]) == (0.3, [], "")


def document(tuning, lr=(0.05, 0.1)):
    runs = {"ddp": [reported(3.0)]}
    settings = {"task": "digits", "ranks": 2, "steps": 10, "seeds": 1, "lr": list(lr), "budget_s": 900.0}
    link = {"name": "none", "rate_bits": None}
    entry = result("ddp", runs, 1, 10, None, tuning)
    made = {"settings": settings, "link": link, "unit": "nats", "target": None, "ended": "complete"}
    return {**made, "results": [entry]}


def test_the_table_has_the_rate_and_below_it_the_remark():
    tuned = document([tried(0.05, 3.1), tried(0.1, 3.0)])
    assert "best\nrate" in [column.header for column in table(tuned).columns]
    assert list(table(tuned).columns[2].cells) == ["0.1"]
    assert remarks(tuned) == ["ddp: best rate is the highest tried: widen the grid (0.1 of 0.05, 0.1)."]
    alone = document([], lr=(0.1,))
    assert "best\nrate" not in [column.header for column in table(alone).columns]
    assert remarks(alone) == []


def test_an_arm_without_a_rate_has_a_dash():
    wild = document([])
    wild["results"].append(result("Wild()", {"ddp": [], "Wild()": []}, 1, 10, None, [tried(0.1, math.nan)]))
    assert list(table(wild).columns[2].cells)[1] == DASH


def test_a_budget_that_ends_the_tuning_says_so():
    cut = document([])
    cut["results"] = [result("ddp", {"ddp": []}, 1, None, None, [tried(0.05, 3.0, whole=False)])]
    cut["ended"] = "budget"
    assert remarks(cut)[-1] == (
        "The time budget of 900 s ended the tuning of learning rates, so no seed was trained; "
        "set a larger --budget, or fewer rates."
    )
