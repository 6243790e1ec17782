"""``gradlane bench`` on real processes."""

import faulthandler
import getpass
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import gradlane as gl
from gradlane.bench.arm_processes import ArmFailed, ArmProcesses
from gradlane.bench.bench_arms import bench_arms
from gradlane.bench.bench_plan import BenchPlan
from gradlane.bench.link import framed_bytes, parse_link
from gradlane.bench.rounds import Rounds
from gradlane.bench.workload import workload
from gradlane.report.write import write_page

from ..support import scripts
from ..support.leftovers import gone, members, namespaces
from ..support.links import needs_links
from ..support.sessions import started

pytestmark = pytest.mark.networks

ROOT = Path(__file__).parents[2]
TINY = BenchPlan(
    arms=("Mean()", "torch.fp16", "torch.bf16"),
    links=(parse_link("none"),),
    model="tests.support.workloads:tiny",
    steps=3,
    warmup=2,
)
FIELDS = {"link", "ranks", "arm", "strategy", "status", "median_s", "min_s", "cpu_s", "exposed_s",
          "ledger_bytes", "interface_bytes", "speedup", "of_limit"}  # fmt: skip


@pytest.fixture(scope="module")
def record():
    seen = []
    found = bench_arms(replace(TINY, ranks=(2, 3)), seen.append)
    return found, seen


def test_there_is_one_object_for_each_arm_and_number_of_ranks(record):
    found, _ = record
    rows = found["results"]
    arms = ["ddp", "Noop()", "Mean()", "torch.fp16", "torch.bf16"]
    assert [(row["ranks"], row["arm"]) for row in rows] == [(ranks, arm) for ranks in (2, 3) for arm in arms]
    assert all(set(row) >= FIELDS for row in rows)
    assert [row["strategy"] for row in rows[:5]] == [None, "Noop()", "Mean()", None, None]
    json.dumps(found, allow_nan=False)


def test_the_figures_of_an_arm_fit_together(record):
    found, _ = record
    for row in found["results"]:
        if row["arm"] == "torch.bf16":
            continue
        assert (row["status"], row["detail"], row["steps"]) == ("ok", "", 3)
        assert row["min_s"] == pytest.approx(min(row["steps_s"]), abs=1e-6)
        assert 0 < row["min_s"] <= row["median_s"]
        assert 0 <= row["exposed_s"] < max(row["steps_s"])
        assert row["cpu_s"] > 0
    by_arm = {row["arm"]: row for row in found["results"][:5]}
    parameters = found["settings"]["parameters"]
    assert parameters == 32 * 32 + 32 + 4 * 32 + 4
    assert by_arm["ddp"]["ledger_bytes"] == by_arm["Mean()"]["ledger_bytes"] == 4 * parameters
    assert by_arm["torch.fp16"]["ledger_bytes"] == 2 * parameters
    assert by_arm["torch.fp16"]["ratio"] == 2
    assert by_arm["ddp"]["speedup"] == 1
    assert by_arm["Noop()"]["of_limit"] == 1
    mean = by_arm["Mean()"]
    assert mean["speedup"] == pytest.approx(by_arm["ddp"]["median_s"] / mean["median_s"])
    assert mean["limit_s"] == by_arm["Noop()"]["median_s"]  # no rate, so compute is the limit
    assert by_arm["ddp"]["phases"] is None
    for rank in mean["timeline"]:
        assert 0 < rank["backward_s"] <= rank["end_s"]
        for request in rank["requests"]:
            spent = sum(request[f"{part}_s"] for part in ("encode", "queued", "collective", "decode"))
            assert 0 <= request["start_s"] <= request["start_s"] + spent <= rank["end_s"] + 1e-3


def test_an_arm_that_crashes_is_printed_and_the_others_go_on(record):
    found, _ = record
    failed = [row for row in found["results"] if row["arm"] == "torch.bf16"]
    assert [row["status"] for row in failed] == ["crashed", "crashed"]
    assert all("BF16 all reduce communication hook required" in row["detail"] for row in failed)
    assert all(row["median_s"] is None for row in failed)


def test_progress_tells_every_turn(record):
    _found, seen = record
    steps = 2 * 4 * (3 + 2)  # two numbers of ranks, four arms that run
    assert len(seen) == steps
    assert [where.number for where in seen] == sorted({where.number for where in seen})
    assert {where.step for where in seen} == {-2, -1, 0, 1, 2}
    first = [where.arm for where in seen if where.ranks == 2][::4]
    assert len(set(first)) > 1  # not always the same arm first


def test_the_page_takes_the_record(record, tmp_path):
    found, _ = record
    (tmp_path / "bench.json").write_text(json.dumps(found))
    write_page([tmp_path / "bench.json"], tmp_path / "page.html")
    assert "torch.fp16" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
@needs_links
def test_ledger_and_interface_agree_at_100_mbit():
    arms = ("Mean()", "torch.allreduce", "torch.fp16", "Cast(Mean(), float16)", "Cast(Mean(), bfloat16)",
            "WeightedMean(2.0)")  # fmt: skip
    plan = BenchPlan(
        arms, (parse_link("100mbit"),), model="tests.support.workloads:million", steps=2, warmup=2
    )
    rows = bench_arms(plan)["results"]
    assert [row["status"] for row in rows] == ["ok"] * 8
    for row in rows:
        assert row["emulated"]
        if row["arm"] == "Noop()":
            assert row["interface_bytes"] < 1000
            continue
        assert row["interface_bytes"] == pytest.approx(framed_bytes(row["ledger_bytes"]), rel=0.03)
        assert row["median_s"] > 0.9 * row["limit_s"]  # no step is faster than its link


def test_a_time_budget_ends_it_with_what_there_is():
    found = bench_arms(replace(TINY, budget_s=1e-6))
    assert found["ended"] == "budget"
    assert {row["status"] for row in found["results"]} == {"not run", "crashed"}
    assert found["results"][0]["detail"] == "0 of 3 steps: the time budget ended"
    json.dumps(found, allow_nan=False)


class Sleeper:
    def __init__(self, rank, seconds):
        self.seconds = seconds

    def __call__(self, order):
        time.sleep(self.seconds)
        return order


class Dies(Sleeper):
    def __call__(self, order):
        faulthandler.disable()  # pytest's would write to the terminal
        os.write(2, b"the last words\n")
        os.abort()


def test_an_arm_that_hangs_is_ended_and_the_others_go_on():
    made = {"quick": (Sleeper, 0.0), "slow": (Sleeper, 60.0), "dies": (Dies, 0.0)}
    samples = []
    start = time.monotonic()
    with Rounds(list(made), lambda arm: ArmProcesses(made[arm][0], 2, made[arm][1], timeout=20)) as rounds:
        for number in range(3):
            rounds.run(
                number, number, timeout=1.0, on_sample=lambda arm, sample: samples.append((arm, sample))
            )
        assert rounds.running == ("quick",)
    assert time.monotonic() - start < 20
    assert samples == [("quick", [number] * 2) for number in range(3)]
    slow, dies = rounds.failed["slow"], rounds.failed["dies"]
    assert (slow.status, dies.status) == ("hung", "crashed")
    assert "did not finish within 1 s" in str(slow)
    assert str(dies).endswith("ended by SIGABRT; the last words")


def test_an_arm_that_cannot_start_says_why():
    with pytest.raises(ArmFailed, match=r"at its start, rank \d: TypeError: .*missing 1 required"):
        ArmProcesses(Sleeper, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranks": (0,)}, "ranks=0 cannot be compared; use 2 to 64"),
        ({"ranks": (1,)}, "ranks=1 cannot"),
        ({"steps": 0}, "steps=0 measures nothing"),
        ({"warmup": 0}, "warmup=0"),
        ({"budget_s": -1.0}, "budget_s=-1 is not above 0"),
        ({"arms": ("torch.fp17",)}, "arm 'torch.fp17' is not known; torch's hooks are torch.allreduce"),
        ({"arms": ("Maen()",)}, "did you mean Mean"),
        ({"model": "mlp"}, "model 'mlp' is not known; use mlp9m, resnet18, gpt-small, or module:function"),
        ({"model": "tests.nowhere:tiny"}, "tests.nowhere cannot be imported: ModuleNotFoundError"),
        ({"model": "tests.support.workloads:huge"}, "tests.support.workloads has no function 'huge'"),
        ({"model": "tests.support.workloads:raises"}, r"raises\(\) raised RuntimeError: no such data set"),
        ({"model": "tests.support.workloads:only_a_model"}, r"returned a Linear; return \(model, batch\)"),
        ({"model": "tests.support.workloads:wrong_batch"}, "fails on its batch: RuntimeError"),
        ({"model": "tests.support.workloads:frozen"}, "no parameter that needs a gradient"),
        ({"model": "gpt-small", "ranks": (64,)}, "need about .* GB are free; use fewer arms or ranks"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, message):
    with pytest.raises(gl.InvalidValue, match=message):
        bench_arms(replace(TINY, **change))


def test_a_model_that_returns_no_loss_is_told_so(caplog):
    workload("tests.support.workloads:tiny")
    assert "tiny returns a tensor of shape [4, 4] and no loss, so the mean square of it" in caplog.text
    caplog.clear()
    workload("tests.support.workloads:with_loss")
    assert caplog.text == ""


TINY_MODEL = ("--model", "tests.support.workloads:tiny")


def bench(*arguments, env=None):
    command = (sys.executable, "-m", "gradlane", "bench", *TINY_MODEL, *arguments)
    return started(command, preexec_fn=_heeds_ctrl_c, env=env)


def _heeds_ctrl_c():
    """A shell lets what it starts in the background ignore it, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_command_prints_a_table_and_writes_json_and_a_page(tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    arguments = ["--steps", "2", "--warmup", "1", "--arm", "Mean()", "--json", str(out)]
    done = scripts.gradlane("bench", *TINY_MODEL, *arguments, "--page", str(page))
    assert done.returncode == 0, done.stderr
    for heading in ("median", "exposed", "ledger", "interface", "of limit", "Mean()", "Noop()"):
        assert heading in done.stdout
    record = json.loads(out.read_text())
    assert record["made"]["command"].startswith(
        "gradlane bench --model tests.support.workloads:tiny --steps 2"
    )
    write_page([out], tmp_path / "again.html")
    assert page.read_text() == (tmp_path / "again.html").read_text()  # as `gradlane report` makes it


def test_ctrl_c_leaves_a_partial_table_and_nothing_else(tmp_path):
    out = tmp_path / "out.json"
    with bench("--steps", "100000", "--arm", "Mean()", "--json", str(out)) as running:
        # three arms of two ranks, and the leader of their process group
        assert gone(lambda: len(members(running.pid)) == 1 + 3 * (2 + 1), 60)
        time.sleep(1)
        used = namespaces(members(running.pid))
        os.kill(running.pid, signal.SIGINT)
        printed, errors = running.communicate(timeout=60)
        assert running.returncode == 130, errors
        assert "Interrupted: the table shows what was measured until then." in printed
        assert json.loads(out.read_text())["ended"] == "interrupted"
        assert "Traceback" not in errors
        assert gone(lambda: not members(running.pid))
        assert not used & namespaces()


@pytest.mark.slow
def test_killed_at_five_random_points_it_leaves_nothing(tmp_path):
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    points = random.Random(seed)
    for _ in range(5):
        arguments = ("--steps", "1000", "--link", "100mbit", "--link", "1gbit", "--arm", "Mean()")
        with bench(*arguments, env={**os.environ, "TMPDIR": str(tmp_path)}) as running:
            time.sleep(points.uniform(0.2, 8.0))
            used = namespaces(members(running.pid))
            running.kill()
            running.communicate()
            assert gone(lambda session=running.pid: not members(session))
            assert not used & namespaces()
    assert set(os.listdir(tmp_path)) <= {f"torchinductor_{getpass.getuser()}"}  # torch's own
    with bench("--steps", "1", "--warmup", "1", "--link", "1gbit") as last:
        _printed, errors = last.communicate(timeout=120)
    assert last.returncode == 0, errors


def test_no_disk_is_said_before_anything_starts(tmp_path):
    # A limit on file sizes is what a full disk looks like, on any machine.
    command = f"ulimit -f 0; exec {sys.executable} -m gradlane bench --json {tmp_path}/out.json"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("gradlane: ")
    assert "out.json cannot be written: File too large; name another file" in done.stderr


def test_local_steps_are_measured_by_the_period():
    """A sample is a whole period, per step; the warm-up of its text is left out."""
    local = "LocalSteps(Mean(), every=3, warmup=100, first=Sharded(Int8()), buffers='own')"
    found = bench_arms(replace(TINY, arms=(local, "Mean()"), steps=2, warmup=1))
    rows = {row["arm"]: row for row in found["results"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    dense, rare = rows["Mean()"], rows[local]
    assert rare["steps"] == 2
    roll_call = 64
    assert rare["ledger_bytes"] == pytest.approx((dense["ledger_bytes"] + roll_call) / 3, abs=1)
    assert 0 < rare["median_s"] < 3 * rows["ddp"]["median_s"] + 0.1  # of one step, not of three
    assert rare["phases"] is None
