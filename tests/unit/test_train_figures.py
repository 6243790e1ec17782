"""What the figures of a training run promise, on runs made up by hand."""

import json
import math
from dataclasses import replace

import pytest

import gradlane as gl
from gradlane import Timing
from gradlane.bench.arm_processes import ArmFailed
from gradlane.bench.step_timeline import phase_seconds
from gradlane.train.loss_figures import (
    T_975,
    cost_to,
    default_target,
    figures,
    final_step,
    paired_gap,
    phases_of_runs,
    result,
)
from gradlane.train.seed_run import SeedRun
from gradlane.train.train_rank import Trained, share_of_rate


def run_of(losses, seed=0, every=10, whole=True):
    """A run that sends 100 bytes and takes half a second a step, evaluated at every tenth."""
    run = SeedRun(seed, rate=0.1)
    for at, loss in enumerate(losses):
        if at:
            for step in range((at - 1) * every, at * every):
                run.add_step(step, [trained(step), trained(step, late=0.25)])
        run.add_evaluation(at * every, loss)
    if whole:
        run.mark_complete()
    return run


def trained(step, late=0.0, loss=1.0):
    return Trained(start=step + late, end=step + 0.25 + late, loss=loss, sent_bytes=100 * (step + 1))


def test_phases_are_means_over_steps_ranks_and_seeds():
    """Two ranks, of which one waits: 30 and 50 ms a step in one seed, 40 and 60 in the other."""
    runs = []
    for seed, more in ((0, 0.0), (1, 0.01)):
        run = SeedRun(seed, rate=0.1)
        for step in range(4):
            waits = [
                {"encode": 0.002, "collective": 0.03 + more},
                {"encode": 0.004, "collective": 0.05 + more},
            ]
            run.add_step(step, [replace(trained(step), phases=phases) for phases in waits])
        runs.append(run)
    assert phases_of_runs(runs) == pytest.approx({"encode_s": 0.003, "collective_s": 0.045})
    assert phases_of_runs([run_of([8.0, 4.0])]) is None  # of DDP there are none


def test_a_request_of_ddp_itself_has_no_phases():
    """`Auto` leaves steps to DDP: their events are not timed."""
    timing = Timing(began=0.0, encode=0.1, queued=0.2, collective=0.3, decode=0.4)
    (event,) = gl.dry_run(gl.Mean(), {"weight": (4,)}, world=2).events
    assert event.timing is None
    found = phase_seconds([event, replace(event, timing=timing)])
    assert found == {"encode": 0.1, "queued": 0.2, "collective": 0.3, "decode": 0.4}


def seeds_of(*finals):
    return [run_of([8.0, final], seed) for seed, final in enumerate(finals)]


def test_a_step_lasts_from_the_first_start_to_the_last_end():
    run = run_of([8.0, 4.0])
    assert run.seconds == pytest.approx([0, 5])
    assert run.bytes == [0, 1000]


def test_the_gap_of_an_arm_to_itself_is_nothing():
    runs = seeds_of(3.0, 3.1, 3.3)
    assert paired_gap(runs, runs, 10) == (0, 0)
    assert paired_gap(runs[:1], runs[:1], 10) == (0, None)


def test_the_interval_is_that_of_the_paired_differences():
    dense, arm = seeds_of(3.0, 4.0, 5.0), seeds_of(3.1, 4.2, 5.3)
    gap, interval = paired_gap(arm, dense, 10)
    # Differences 0.1, 0.2, 0.3: mean 0.2, deviation 0.1, t of 2 degrees 4.303; between seeds they vary by 1.
    assert gap == pytest.approx(0.2)
    assert interval == pytest.approx(4.303 * 0.1 / math.sqrt(3))


def test_pairs_are_made_by_seed_not_by_place():
    dense, arm = seeds_of(3.0, 4.0), seeds_of(3.0, 4.0)[::-1]
    assert paired_gap(arm, dense, 10) == (0, 0)


def test_the_quantiles_are_those_of_students_distribution():
    stats = pytest.importorskip("scipy.stats")
    assert pytest.approx(stats.t.ppf(0.975, range(1, 30)), abs=6e-4) == T_975


def test_the_cost_to_a_target_is_interpolated_between_two_evaluations():
    run = run_of([8.0, 4.0, 2.0])
    steps, sent, seconds = cost_to(run, 3.5)
    assert (steps, sent, seconds) == pytest.approx((12.5, 1250, 6.25))
    assert cost_to(run, 4.0) == pytest.approx((10, 1000, 5))
    assert cost_to(run, 9.0) == (0, 0, 0)
    assert cost_to(run, 1.0) is None


def test_a_gap_in_the_losses_is_not_bridged():
    assert cost_to(run_of([8.0, math.nan, 2.0]), 3.0).steps == 20


def test_the_way_is_missing_if_one_seed_never_gets_there():
    runs = seeds_of(3.0, 4.0)
    found = figures(runs, runs, 10, target=3.5)
    assert (found["to_target_s"], found["to_target_bytes"], found["to_target_steps"]) == (None, None, None)
    assert figures(runs, runs, 10, target=4.5)["to_target_steps"] < 10


def test_dense_reaches_the_default_target_shortly_before_its_end():
    dense = [run_of([8.0, 3.0, 2.0])]
    target = default_target(dense, 20)
    assert target == pytest.approx(2.0 + 0.02 * 6)
    assert 18 < cost_to(dense[0], target).steps < 20
    apart = seeds_of(2.0, 3.0)
    assert all(cost_to(run, default_target(apart, 10)) for run in apart)
    assert default_target([run_of([2.0, 3.0])], 10) is None  # it did not learn
    assert default_target([run_of([2.0, math.inf])], 10) is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_null_and_reported(loss):
    runs = {"ddp": seeds_of(3.0, 3.1), "Wild()": [run_of([8.0, loss]), run_of([8.0, 3.0], seed=1)]}
    entry = result("Wild()", runs, 2, final_step(runs), target=3.5)
    assert entry["status"] == "diverged"
    assert entry["detail"] == "seed 0, the held-out loss is not finite after 10 steps"
    assert entry["runs"][0]["loss"] == [8.0, None]
    assert (entry["final_loss"], entry["gap"], entry["gap_interval"]) == (None, None, None)
    assert entry["bytes_per_step"] == 100  # it is still shown
    json.dumps(entry, allow_nan=False)


def test_divergence_is_reported_with_the_first_step_that_shows_it():
    run = SeedRun(0, rate=0.1)
    run.add_evaluation(0, 8.0)
    run.add_step(0, [trained(0), trained(0, loss=math.nan)])
    run.add_step(1, [trained(1, loss=math.nan), trained(1)])
    run.add_evaluation(2, math.nan)
    run.mark_complete()
    assert (run.status, run.detail) == ("diverged", "the training loss is not finite in step 0")


def test_a_run_that_ended_early_is_not_averaged_with_complete_ones():
    whole, cut = run_of([8.0, 4.0, 2.0]), run_of([8.0, 5.0], seed=1, whole=False)
    runs = {"ddp": [whole, cut]}
    assert final_step(runs) == 20
    entry = result("ddp", runs, 3, 20, target=None)
    assert (entry["status"], entry["final_loss"]) == ("partial", 2.0)
    assert entry["detail"] == "1 of 3 seeds are complete; seed 1 was last evaluated after 10 steps"
    assert len(entry["runs"]) == 2


def test_arms_are_compared_where_all_of_them_were_evaluated():
    ahead, behind = run_of([8.0, 4.0, 2.0], whole=False), run_of([8.0, 4.5], whole=False)
    runs = {"ddp": [ahead], "Mean()": [behind]}
    assert final_step(runs) == 10
    assert result("Mean()", runs, 1, 10, None)["gap"] == pytest.approx(0.5)


def test_a_failed_arm_has_no_figures_and_does_not_stop_the_others():
    failed = run_of([8.0], whole=False)
    failed.mark_failed(ArmFailed("crashed", "in step 3, rank 1: ValueError: no"))
    runs = {"ddp": [run_of([8.0, 4.0])], "Bad()": [failed]}
    assert final_step(runs) == 10
    entry = result("Bad()", runs, 1, 10, 5.0)
    assert (entry["status"], entry["detail"]) == ("crashed", "seed 0, in step 3, rank 1: ValueError: no")
    assert entry["final_loss"] is None


def test_without_any_evaluation_there_is_still_an_entry():
    runs = {"ddp": [SeedRun(0, rate=0.1)]}
    assert final_step(runs) is None
    entry = result("ddp", runs, 1, None, None)
    assert (entry["status"], entry["runs"], entry["final_loss"]) == ("not run", [], None)


@pytest.mark.parametrize("steps", [1, 2, 5, 20, 200])
def test_the_rate_warms_up_then_falls_to_nothing(steps):
    shares = [share_of_rate(step, steps) for step in range(steps)]
    top = shares.index(max(shares))
    assert max(shares) == 1
    assert shares[: top + 1] == sorted(shares[: top + 1])
    assert shares[top:] == sorted(shares[top:], reverse=True)
    assert min(shares) > 0  # no step is for nothing
    assert steps < 20 or shares[-1] < 0.01
