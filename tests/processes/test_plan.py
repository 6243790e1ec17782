"""``gradlane plan`` as a user runs it: in a job, and alone on emulated links."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradlane.bench.arm_processes import ArmFailed
from gradlane.bench.link import parse_link
from gradlane.bench.plan_local import measure_locally
from gradlane.bench.plan_rank import Task, measure_plan
from gradlane.bench.workload import Workload, workload
from gradlane.cli import main
from gradlane.errors import GradlaneError
from gradlane.local import run_ranks
from gradlane.plan.forecast import DDP, ddp_forecast, forecasts

from ..support import scripts
from ..support.links import needs_links

pytestmark = pytest.mark.networks

ROOT = Path(__file__).parents[2]
MILLION = "tests.support.workloads:million"
ARMS = ("--strategy", "Mean()", "--strategy", "Sharded(Int8())")


def forked(*options):
    """As torchrun, without its seconds."""
    return scripts.gradlane("plan", *options, ranks=3)


def by_torchrun(*options):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    return subprocess.run(
        [sys.executable, *launcher, "-m", "gradlane", "plan", *options],
        cwd=ROOT, capture_output=True, text=True, timeout=150, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("launch", [forked, by_torchrun])
def test_in_a_job_rank_0_speaks_for_all(launch, tmp_path):
    file = tmp_path / "plan.json"
    done = launch("--model", MILLION, *ARMS, "--link", "100mbit", "--json", str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1,050,624 parameters, 3 ranks: 95.6 Mbit/s") == 1
    record = json.loads(file.read_text())
    dense, mean, int8 = record["results"]
    sent = 2 * 2 * 1_050_624 * 4 / 3
    assert dense["node_bytes"] == mean["node_bytes"] == pytest.approx(sent, abs=4)
    # The measured loopback, moved to 100 Mbit/s: nothing is faster than the bytes by the rate.
    assert dense["seconds"] > 8 * sent / 100e6
    assert int8["speedup"] > 2
    assert int8["verdict"] == "pays"


@needs_links
def test_alone_it_measures_the_emulated_link(tmp_path, capsys):
    file, page = tmp_path / "plan.json", tmp_path / "plan.html"
    options = ("--model", MILLION, *ARMS, "--link", "100mbit", "--json", str(file), "--page", str(page))
    assert main(["plan", *options]) == 0
    assert "1,050,624 parameters, 2 ranks" in capsys.readouterr().out
    record = json.loads(file.read_text())
    dense, _, int8 = record["results"]
    assert record["rate_bits"] < 110e6  # no busy machine makes the link faster
    assert dense["seconds"] > 0.9 * dense["node_bytes"] * 8 / 100e6
    assert record["error"] == max(0.05, abs(dense["seconds"] / record["ddp_s"] - 1))
    assert int8["node_bytes"] < 0.27 * dense["node_bytes"]
    assert [row["ranks"] for row in record["more_ranks"]] == [8] * 3 + [64] * 3
    assert "Plan: tests.support.workloads:million" in page.read_text()


@needs_links
@pytest.mark.slow
def test_its_figures_are_those_of_the_emulated_link(tmp_path):
    """It needs a machine that does nothing else."""
    file = tmp_path / "plan.json"
    assert main(["plan", "--model", MILLION, *ARMS, "--link", "100mbit", "--json", str(file)]) == 0
    record = json.loads(file.read_text())
    dense, mean, int8 = record["results"]
    assert 70e6 < record["rate_bits"] < 110e6
    on_the_link = dense["node_bytes"] * 8 / record["rate_bits"] + record["compute_s"]
    assert 0.9 < dense["seconds"] / on_the_link < 1.3
    assert mean["seconds"] == pytest.approx(dense["seconds"], rel=0.2)
    assert record["ddp_s"] == pytest.approx(dense["seconds"], rel=0.25)  # measured, as predicted
    assert int8["speedup"] > 2


@needs_links
@pytest.mark.slow
def test_ranks_of_a_node_have_curves_of_their_own():
    strategies = ("Sharded(Int8())", "Hierarchical(Sharded(Int8()))")
    found, note = measure_locally(Task(workload(MILLION), strategies, per_node=2), 4, parse_link("100mbit"))
    assert note == ""
    assert (found.curves.world, found.curves.per_node) == (4, 2)
    between, inside = (curves["all_to_all"] for curves in (found.curves.by_primitive, found.curves.inside))
    assert 50e6 < between.bytes_per_s * 8 < 110e6  # of a node, though each rank has two thirds of it
    assert inside.bytes_per_s > 3 * between.bytes_per_s
    seconds = forecasts(found.beat, found.works, found.curves, found.cores)
    flat, across = (seconds[text].seconds for text in strategies)
    assert across < flat < seconds[DDP].seconds


def test_a_link_that_cannot_be_emulated_is_planned_from_loopback(monkeypatch):
    monkeypatch.setattr("gradlane.bench.hosts.why_not", lambda: "it needs root")
    link = parse_link("100mbit")
    found, note = measure_locally(Task(workload(MILLION), ("Mean()",)), 2, link)
    assert note == (
        "100mbit is not emulated: it needs root; the ranks use loopback, unshaped; "
        "what loopback does is moved to 100mbit"
    )
    assert found.curves.bytes_per_s == pytest.approx(link.payload_bytes_per_s, rel=0.05)
    dense = ddp_forecast(found.beat, found.bucket_bytes, found.curves, found.cores)
    # At two ranks an all-reduce sends each byte once; the moved curve reaches the link's rate within 5 %.
    assert dense.seconds > 0.95 * link.seconds(sum(found.bucket_bytes))


class Heavy(torch.nn.Module):
    """Much compute for few parameters."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, given):
        for _ in range(40):
            given = self.layer(given).tanh()
        return given


def heavy():
    return Workload("heavy", Heavy(), (torch.randn(512, 256),))


def planned(rank, task):
    return measure_plan(torch.distributed.group.WORLD, task).as_dict()


def test_all_ranks_have_the_same_figures():
    one, other = run_ranks(planned, 2, Task(workload(MILLION), ("Mean()",)), deadline=120)
    assert one == other


@pytest.mark.slow
def test_where_the_link_is_no_bottleneck_off_is_off():
    one = run_ranks(planned, 2, Task(heavy()), deadline=120)[0]
    assert one["works"] == {}  # the link is not the bottleneck: no strategy was timed
    found, _ = measure_locally(Task(heavy(), ("Mean()",), always=True), 2, parse_link("none"))
    assert list(found.works) == ["Mean()"]
    dense = ddp_forecast(found.beat, found.bucket_bytes, found.curves, found.cores)
    assert dense.compute < dense.seconds < 1.2 * dense.compute


def different(rank):
    task = Task(workload(MILLION), ("Mean()",) if rank else ("Sharded(Int8())",))
    try:
        measure_plan(torch.distributed.group.WORLD, task)
    except GradlaneError as error:
        return str(error)


def test_ranks_that_plan_different_things_all_say_so():
    for message in run_ranks(different, 2):
        assert "strategies" in message
        assert "Sharded(Int8())" in message


def on_the_meta_device(rank):
    model = torch.nn.Linear(4, 4, device="meta")
    try:
        measure_plan(torch.distributed.group.WORLD, Task(Workload("meta", model, ())))
    except GradlaneError as error:
        return str(error)


def test_a_model_that_is_not_on_the_cpu_is_refused_with_the_way_out():
    for message in run_ranks(on_the_meta_device, 2):
        assert "the model is on meta, and steps are measured on the CPU only; plan from figures" in message


class Dies(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, given):
        raise RuntimeError("no such layer")


def test_a_model_that_fails_in_a_rank_ends_the_plan_with_its_reason():
    with pytest.raises(ArmFailed, match=r"while it measured, rank \d: RuntimeError: no such layer"):
        measure_locally(Task(Workload("dies", Dies(), (1,)), ("Mean()",)), 2, parse_link("none"))
