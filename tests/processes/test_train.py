"""``gradlane train`` on real processes, few steps of small tasks."""

import hashlib
import io
from dataclasses import replace

import pytest
from rich.console import Console

from gradlane.bench import hosts
from gradlane.bench.link import parse_link
from gradlane.bench.record import write_json
from gradlane.cli.train_view import ProgressLines, doing
from gradlane.report.number_format import plain
from gradlane.report.read import load
from gradlane.report.write import write_page
from gradlane.train import bytemodel, digits, seed_training
from gradlane.train.tasks import TASKS
from gradlane.train.train_arms import train_arms
from gradlane.train.train_plan import TUNING_SEED, TrainPlan
from gradlane.train.train_rank import TrainRank

from ..support.links import needs_links

pytestmark = pytest.mark.networks

CAST = "Cast(Mean(), bfloat16)"


def losses(document):
    return {result["arm"]: [run["loss"] for run in result["runs"]] for result in document["results"]}


@pytest.fixture(scope="module")
def trained():
    plan = TrainPlan(arms=("Mean()", "torch.bf16", CAST), steps=4, seeds=2, batch=2, every=2)
    return plan, train_arms(plan)


def test_mean_is_dense_training_bit_for_bit_in_every_loss(trained):
    _, document = trained
    found = losses(document)
    assert [len(curve) for curve in found["ddp"]] == [3, 3]
    assert found["Mean()"] == found["ddp"] != found[CAST]
    assert found["ddp"][0] != found["ddp"][1]
    mean = document["results"][1]
    assert (mean["gap"], mean["gap_interval"]) == (0, 0)


def test_the_same_run_twice_gives_the_same_losses(trained):
    plan, document = trained
    again = train_arms(replace(plan, arms=(CAST,)))
    assert losses(again) == {arm: losses(document)[arm] for arm in ("ddp", CAST)}


def test_a_crashing_arm_is_reported_and_the_others_go_on(trained):
    _, document = trained
    status = {result["arm"]: result["status"] for result in document["results"]}
    assert status == {"ddp": "ok", "Mean()": "ok", "torch.bf16": "crashed", CAST: "ok"}
    crashed = document["results"][2]
    assert crashed["detail"].startswith("seed 0, at its start, rank ")
    assert [run["seed"] for run in crashed["runs"]] == [0]  # it is not tried again
    assert document["ended"] == "complete"


def test_bytes_are_those_of_one_rank_from_the_first_step_on(trained):
    _, document = trained
    dense, _, _, cast = document["results"]
    size = 4 * document["settings"]["parameters"]
    assert dense["runs"][0]["bytes"] == [0, 2 * size, 4 * size]
    assert dense["bytes_per_step"] == size == 2 * cast["bytes_per_step"]
    for result in (dense, cast):
        assert all(
            run["seconds"] == sorted(run["seconds"]) and run["seconds"][0] == 0 for run in result["runs"]
        )
        assert result["seconds_per_step"] > 0
    assert dense["phases"] is None
    assert set(cast["phases"]) == {"encode_s", "queued_s", "collective_s", "decode_s"}
    assert 0 < cast["phases"]["collective_s"] < cast["seconds_per_step"]


def test_local_steps_are_an_arm_that_ends_with_a_round():
    """A warm-up of dense steps is counted; the loss is that of the weights which all ranks agreed on."""
    arms = ("LocalSteps(Mean(), every=4, warmup=1)", "LocalSteps(Mean(), every=1)")
    document = train_arms(TrainPlan(arms=arms, steps=4, batch=2, every=1))
    dense, rare, often = document["results"]
    assert {result["status"] for result in document["results"]} == {"ok"}
    size = 4 * document["settings"]["parameters"]
    sent = rare["runs"][0]["bytes"]
    assert sent[1:4] == [size, size, size]
    assert size < sent[4] - size < 1.01 * size  # the last round, and its roll call
    loss = rare["runs"][0]["loss"]
    assert loss[1] == loss[2] == loss[3] == dense["runs"][0]["loss"][1]  # nothing is agreed on in between
    assert loss[4] != loss[3]
    # SGD with momentum on every rank, averaged in every step, is DDP but for rounding
    assert often["gap"] == pytest.approx(0, abs=1e-3)


def test_the_page_takes_the_document(trained, tmp_path):
    _, document = trained
    write_json(tmp_path / "train.json", document)
    assert [result.arm for result in load(tmp_path / "train.json").results] == list(losses(document))
    write_page([tmp_path / "train.json"], tmp_path / "page.html")
    assert "torch.bf16" in (tmp_path / "page.html").read_text()


class Recording(TrainRank):
    """Writes down its first weights and every batch it draws."""

    folder = None

    def __init__(self, rank, arm, task, model, plan, seed, rate):
        path = self.folder / f"{arm}-{seed}-{rank}"
        path.write_text(digest(model.parameters()) + "\n")

        def draw(size, generator):
            batch = task.draw(size, generator)
            with path.open("a") as file:
                file.write(digest(batch) + "\n")
            return batch

        super().__init__(rank, arm, replace(task, draw=draw), model, plan, seed, rate)


def digest(tensors):
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.detach().numpy().tobytes())
    return made.hexdigest()


def test_arms_share_weights_and_data_ranks_and_seeds_do_not(monkeypatch, tmp_path):
    monkeypatch.setattr(seed_training, "TrainRank", Recording)
    monkeypatch.setattr(Recording, "folder", tmp_path)
    train_arms(TrainPlan(task="digits", arms=(CAST,), steps=3, seeds=2))
    written = {
        (arm, at, rank): (tmp_path / f"{arm}-{at}-{rank}").read_text().splitlines()
        for arm in ("ddp", CAST)
        for at in (0, 1)
        for rank in (0, 1)
    }
    for at in (0, 1):
        for rank in (0, 1):
            assert written["ddp", at, rank] == written[CAST, at, rank]
        assert written["ddp", at, 0][0] == written["ddp", at, 1][0]  # weights
    assert written["ddp", 0, 0][0] != written["ddp", 1, 0][0]
    batches = [line for (arm, _, _), lines in written.items() if arm == "ddp" for line in lines[1:]]
    assert len(set(batches)) == len(batches) == 2 * 2 * 3


RATES = (0.02, 0.1, 0.5)


@pytest.fixture(scope="module")
def tuned():
    seen = []
    plan = TrainPlan(task="digits", arms=("Mean()", CAST), steps=6, seeds=2, every=3, lr=RATES[::-1])
    return plan, train_arms(plan, seen.append), seen


def test_each_arm_gets_the_best_rate_of_a_seed_that_is_not_reported(tuned):
    _, document, _ = tuned
    for result in document["results"]:
        assert [trial["lr"] for trial in result["tuning"]] == list(RATES)
        best = min(result["tuning"], key=lambda trial: trial["loss"])
        assert result["lr"] == best["lr"]
        assert [run["seed"] for run in result["runs"]] == [0, 1]
        assert best["loss"] not in [run["loss"][-1] for run in result["runs"]]
    dense, mean, _ = document["results"]
    assert dense["tuning"] == mean["tuning"]
    assert document["settings"]["lr"] == list(RATES)
    assert document["settings"]["tuning_seed"] == TUNING_SEED


def test_the_reported_seeds_are_those_of_a_run_at_the_best_rate(tuned):
    """So the gaps and the target are against dense at its own best rate."""
    plan, document, _ = tuned
    dense = document["results"][0]
    alone = train_arms(replace(plan, arms=("Mean()",), lr=(dense["lr"],)))
    assert losses(alone)["ddp"] == losses(document)["ddp"]
    assert alone["target"] == document["target"]
    assert alone["settings"]["lr"] == dense["lr"]
    assert "tuning_seed" not in alone["settings"]
    assert alone["results"][0]["tuning"] == []


def test_progress_goes_through_all_rates_and_then_all_seeds(tuned):
    plan, document, seen = tuned
    dense = [progress for progress in seen if progress.arm == "ddp"]
    best = document["results"][0]["lr"]
    order = list(dict.fromkeys((progress.seed, progress.rate) for progress in dense))
    assert order == [*((TUNING_SEED, rate) for rate in RATES), (0, best), (1, best)]
    output = io.StringIO()
    with ProgressLines(plan, Console(file=output, width=64)) as lines:
        for progress in seen:
            lines(progress)
    assert doing(plan, dense[0]) == f"tuning at 0.02  {dense[0].loss:.3f} nats"
    assert output.getvalue().count("30/30") == 3  # of (3 rates + 2 seeds) x 6 steps
    assert f"seed 2 of 2 at {best:g}" in output.getvalue()


def test_the_page_shows_the_grid(tuned, tmp_path):
    _, document, _ = tuned
    write_json(tmp_path / "tuned.json", document)
    write_page([tmp_path / "tuned.json"], tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "Final loss at each learning rate" in page
    for result in document["results"]:
        for trial in result["tuning"]:
            assert f">{plain(trial['loss'], 4)}</td>" in page


def test_held_out_text_is_never_trained_on():
    text = bytemodel.library_source()
    trained, held_out = bytemodel.parted(text)
    assert len(trained) + len(held_out) == len(text)
    known = trained.numpy().tobytes()
    task = TASKS["bytes"](64)
    assert len(task.held_out[0]) > 0.8 * bytemodel.WINDOWS
    for inputs, targets in zip(*task.held_out, strict=True):
        assert bytes(inputs.tolist()) + bytes(targets[-1:].tolist()) not in known
    for step in range(20):
        for inputs, targets in zip(*task.batch(8, 0, 0, step), strict=True):
            assert bytes(inputs.tolist()) + bytes(targets[-1:].tolist()) in known


def test_digits_are_learned():
    document = train_arms(TrainPlan(task="digits", arms=("Mean()",), steps=60, every=20))
    dense, mean = losses(document).values()
    assert dense == mean
    assert dense[0][-1] < 0.3 * dense[0][0]
    assert document["unit"] == "nats"
    assert 40 < document["results"][0]["to_target_steps"] < 60


@pytest.mark.parametrize(("task", "first"), [("bytes", 256 * 32), ("digits", 64 * 32)])
def test_a_wider_model_sends_what_it_has(task, first):
    """Its first layer is that wide; in a mean of two ranks each sends as much as there is."""
    narrow, wide = (train_arms(TrainPlan(task=task, steps=1, batch=1, width=width)) for width in (32, 64))
    counts = [document["settings"]["parameters"] for document in (narrow, wide)]
    assert counts[1] - counts[0] > first
    assert [document["results"][0]["bytes_per_step"] for document in (narrow, wide)] == [
        4 * n for n in counts
    ]


def test_held_out_digits_are_never_trained_on():
    (images, _), (held_out, labels) = digits.digits()
    assert len(images) + len(held_out) == 1797
    assert len(labels.unique()) == 10
    known = {tuple(image) for image in images.tolist()}
    assert not [image for image in held_out.tolist() if tuple(image) in known]


@needs_links
def test_a_link_changes_the_seconds_and_nothing_else():
    plan = TrainPlan(task="digits", arms=(CAST,), steps=4, every=2)
    link = parse_link("10mbit")
    free, shaped = train_arms(plan), train_arms(replace(plan, link=link))
    assert losses(free) == losses(shaped)
    assert shaped["link"] == {"name": "10mbit", "rate_bits": 1e7, "emulated": True, "note": ""}
    dense, cast = shaped["results"]
    sent = 4 * shaped["settings"]["parameters"]
    # A full token bucket lets the first bytes of a step through at once.
    assert dense["seconds_per_step"] > 0.8 * link.seconds(sent - 2 * link.burst_bytes)
    assert dense["seconds_per_step"] > cast["seconds_per_step"]


def test_a_link_that_cannot_be_emulated_is_reported(monkeypatch):
    monkeypatch.setattr(hosts, "why_not", lambda: "no tc; install iproute2")
    notes = []
    plan = TrainPlan(task="digits", steps=1, link=parse_link("100mbit"))
    document = train_arms(plan, on_note=notes.append)
    note = "100mbit is not emulated: no tc; install iproute2; the ranks use loopback, unshaped"
    assert notes == [note]
    assert document["link"] == {"name": "loopback", "rate_bits": None, "emulated": False, "note": note}
    assert document["results"][0]["status"] == "ok"
