"""``gradlane train`` when an arm diverges, crashes or hangs, and when its own time is up."""

import json
import os
import signal
import time
from dataclasses import replace

import pytest

from gradlane.bench.record import write_json
from gradlane.cli import main, train_view
from gradlane.report.write import write_page
from gradlane.train import seed_training
from gradlane.train.train_arms import train_arms
from gradlane.train.train_plan import TrainPlan
from gradlane.train.train_rank import Train, TrainRank


def test_divergence_is_null_and_reported(tmp_path):
    document = train_arms(TrainPlan(task="digits", steps=8, every=2, lr=(1e30,)))
    dense = document["results"][0]
    assert dense["status"] == "diverged"
    assert "not finite in step" in dense["detail"]
    assert dense["runs"][0]["loss"][-1] is None
    assert document["target"] is None
    write_json(tmp_path / "wild.json", document)  # which refuses NaN
    write_page([tmp_path / "wild.json"], tmp_path / "wild.html")


def failing(accident):
    """A worker that has an accident in step 1, if its arm is Mean()."""

    class Failing(TrainRank):
        def __init__(self, rank, arm, *parts):
            super().__init__(rank, arm, *parts)
            self.doomed = arm == "Mean()"

        def __call__(self, order):
            if self.doomed and order == Train(1):
                accident()
            return super().__call__(order)

    return Failing


@pytest.mark.parametrize(
    ("accident", "status", "detail"),
    [
        (lambda: time.sleep(60), "hung", "did not finish within 3 s"),
        (lambda: 1 / 0, "crashed", "ZeroDivisionError: division by zero"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "crashed", "ended by SIGKILL"),
    ],
    ids=["sleeps", "raises", "dies"],
)
def test_an_arm_that_fails_in_a_step_is_reported_and_the_others_go_on(monkeypatch, accident, status, detail):
    monkeypatch.setattr(seed_training, "TrainRank", failing(accident))
    if status == "hung":
        monkeypatch.setattr(seed_training, "TIMEOUT", 3.0)  # of every step, on a busy machine too
    dense, failed = train_arms(TrainPlan(task="digits", arms=("Mean()",), steps=4))["results"]
    assert (dense["status"], dense["runs"][0]["steps"][-1]) == ("ok", 4)
    assert failed["status"] == status
    assert failed["detail"].startswith("seed 0, in step 1, rank ")
    assert detail in failed["detail"]


def test_nothing_is_left_to_do_when_dense_fails_too(monkeypatch, tmp_path):
    def refuse(rank, arm, *parts):
        raise RuntimeError("no")

    monkeypatch.setattr(seed_training, "TrainRank", refuse)
    document = train_arms(TrainPlan(task="digits", steps=100_000, seeds=3))
    assert [result["status"] for result in document["results"]] == ["crashed"]
    write_json(tmp_path / "none.json", document)
    write_page([tmp_path / "none.json"], tmp_path / "none.html")


def test_the_budget_ends_a_run_with_what_there_is():
    document = train_arms(TrainPlan(task="digits", steps=100_000, seeds=2, budget=2.0))
    dense = document["results"][0]
    assert (document["ended"], dense["status"]) == ("budget", "partial")
    assert dense["runs"][0]["steps"][-1] > 0
    assert dense["final_loss"] == dense["runs"][0]["loss"][-1]


def test_a_rate_that_diverges_loses_and_an_arm_without_a_rate_is_not_run(monkeypatch, tmp_path):
    plan = TrainPlan(task="digits", steps=8, every=4, lr=(0.1, 1e30))
    dense = train_arms(plan)["results"][0]
    assert (dense["status"], dense["lr"]) == ("ok", 0.1)
    assert [trial["status"] for trial in dense["tuning"]] == ["ok", "diverged"]
    document = train_arms(replace(plan, lr=(1e29, 1e30)))
    lost = document["results"][0]
    assert (lost["status"], lost["lr"], lost["runs"]) == ("diverged", None, [])
    assert lost["detail"].startswith("learning rate 1e+29, the training loss is not finite in step")
    write_json(tmp_path / "lost.json", document)
    write_page([tmp_path / "lost.json"], tmp_path / "lost.html")


def test_an_arm_that_hangs_is_not_tried_with_other_rates(monkeypatch):
    monkeypatch.setattr(seed_training, "TrainRank", failing(lambda: time.sleep(60)))
    monkeypatch.setattr(seed_training, "TIMEOUT", 3.0)
    plan = TrainPlan(task="digits", arms=("Mean()",), steps=4, lr=(0.1, 0.2))
    dense, hung = train_arms(plan)["results"]
    assert (dense["status"], hung["status"]) == ("ok", "hung")
    assert [trial["lr"] for trial in hung["tuning"]] == [0.1]
    assert hung["runs"] == []


def test_the_budget_covers_the_tuning(tmp_path):
    plan = TrainPlan(task="digits", steps=100_000, lr=(0.1, 0.2), budget=2.0)
    begun = time.monotonic()
    document = train_arms(plan)
    assert time.monotonic() - begun < 30
    dense = document["results"][0]
    assert (document["ended"], dense["status"]) == ("budget", "not run")
    assert dense["detail"] == "the run ended while learning rates were tuned"
    assert [trial["status"] for trial in dense["tuning"]] == ["partial"]
    assert (document["target"], dense["final_loss"], dense["lr"]) == (None, None, None)
    write_json(tmp_path / "cut.json", document)
    write_page([tmp_path / "cut.json"], tmp_path / "cut.html")


def test_an_interrupted_run_writes_what_there_is(monkeypatch, tmp_path, capsys):
    def interrupt(lines, progress):
        if progress.step == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_view.ProgressLines, "__call__", interrupt)
    out = tmp_path / "out.json"
    assert main(("train", "--task", "digits", "--every", "2", "--json", str(out))) == 130
    document = json.loads(out.read_text())
    assert document["ended"] == "interrupted"
    assert document["results"][0]["runs"][0]["steps"] == [0, 2]
    printed = capsys.readouterr().out
    assert "partial" in printed
    assert "Interrupted: the table shows what was measured until then." in printed
