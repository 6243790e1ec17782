"""``gradlane bench --nodes``: several ranks per emulated host, and arms on HSDP."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradlane as gl
from gradlane.bench import hosts as hosts_module
from gradlane.bench.bench_arms import bench_arms
from gradlane.bench.bench_plan import BenchPlan
from gradlane.bench.emulation import sent_bytes
from gradlane.bench.hosts import hosts_for
from gradlane.bench.hsdp import HsdpArm, blocks_of
from gradlane.bench.link import framed_bytes, parse_link
from gradlane.bench.nodes import Nodes
from gradlane.bench.shaped import Shaped, gpt_small_shapes, resnet18_shapes
from gradlane.local import run_ranks

from ..support import scripts
from ..support.leftovers import gone, members, namespaces
from ..support.links import needs_links
from ..support.sessions import started

pytestmark = pytest.mark.networks

ROOT = Path(__file__).parents[2]
TWO_BY_TWO = Nodes(2, 2)
INT4 = "ErrorFeedback(Sharded(Int4()))"
FLAT, HIERARCHICAL, ON_HSDP = INT4, f"Hierarchical({INT4})", f"hsdp: {INT4}"
TINY = BenchPlan(
    arms=(HIERARCHICAL, "hsdp", ON_HSDP),
    links=(parse_link("none"),),
    model="tests.support.workloads:tiny",
    steps=2,
    warmup=1,
    nodes=TWO_BY_TWO,
)


def crossing(rank):
    """Seconds and bytes at the interface: of an all-reduce inside the node, then of two across at once."""
    within = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][rank // 2]
    across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][rank % 2]
    tensor = torch.ones(500_000)
    found = [os.readlink("/proc/self/ns/net")]
    for group in (within, across):
        dist.all_reduce(tensor, group=group)
        dist.barrier()
        before, start = sent_bytes(), time.perf_counter()
        dist.barrier()
        dist.all_reduce(tensor, group=group)
        seconds = time.perf_counter() - start
        dist.barrier()
        found.append((seconds, sent_bytes() - before))
        dist.barrier()  # or another rank of the node would send again before this one has counted
    return found


@needs_links
def test_the_ranks_of_a_node_share_its_link_and_nothing_else_goes_over_it():
    link = parse_link("100mbit")
    with hosts_for(4, link, per_host=2) as hosts:
        found = run_ranks(crossing, 4, prepare=hosts.prepare, deadline=60)
    spaces = [space for space, _, _ in found]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]
    sent = 2e6  # of each rank
    for _, (_, inside), (seconds, outside) in found:
        assert inside < 0.05 * sent
        assert 2 * sent <= outside <= 1.05 * framed_bytes(2 * sent)
        assert seconds >= 0.9 * link.seconds(2 * sent)  # both ranks of a node send at once


@pytest.fixture(scope="module")
def shaped():
    plan = BenchPlan(
        arms=(FLAT, HIERARCHICAL, "hsdp", ON_HSDP, "torch.fp16"), links=(parse_link("100mbit"),),
        model="tests.support.workloads:million", steps=2, warmup=2, nodes=TWO_BY_TWO,
    )  # fmt: skip
    return bench_arms(plan)


@needs_links
def test_what_a_node_sends_across_is_what_its_interface_counts(shaped):
    rows = shaped["results"]
    assert [(row["arm"], row["status"], row["detail"]) for row in rows if row["status"] != "ok"] == []
    for row in rows:
        assert (row["ranks"], row["nodes"], row["per_node"], row["interface_of"]) == (4, 2, 2, "node")
        if row["arm"] == "Noop()":
            assert row["uplink_bytes"] == 0
            assert row["interface_bytes"] < 1000
            continue
        assert row["interface_bytes"] == pytest.approx(framed_bytes(row["uplink_bytes"]), rel=0.06)
        assert row["framed_bytes"] == round(framed_bytes(row["uplink_bytes"]))
        assert row["median_s"] > 0.9 * row["limit_s"]  # no step is faster than its link


@needs_links
def test_bytes_across_are_those_of_the_formulas(shaped):
    """The table in docs/nodes.md, with n = g = 2."""
    across = {row["arm"]: row["uplink_bytes"] for row in shaped["results"]}
    gradient = 4 * shaped["settings"]["parameters"]
    assert across["ddp"] == 2 * 3 * gradient // 4
    assert across["torch.fp16"] == across["ddp"] // 2
    assert across["hsdp"] == gradient  # two ranks, half of the gradient each
    assert across[FLAT] == pytest.approx(2 * across[HIERARCHICAL], rel=0.02)
    assert across[ON_HSDP] == pytest.approx(across[HIERARCHICAL], rel=0.02)
    assert 7 < across["hsdp"] / across[ON_HSDP] < 8


@needs_links
def test_arms_on_hsdp_are_compared_with_ddp_and_with_torchs_own(shaped):
    rows = {row["arm"]: row for row in shaped["results"]}
    for arm, row in rows.items():
        assert row["speedup"] == pytest.approx(rows["ddp"]["median_s"] / row["median_s"])
        if arm.startswith("hsdp"):
            assert row["speedup_hsdp"] == pytest.approx(rows["hsdp"]["median_s"] / row["median_s"])
            assert row["exposed_s"] is None
        else:
            assert row["speedup_hsdp"] is None
            assert row["exposed_s"] >= 0
    assert rows["hsdp"]["strategy"] is None
    assert rows[ON_HSDP]["strategy"] == rows[FLAT]["strategy"]
    assert rows[ON_HSDP]["phases"] is not None


@pytest.mark.slow
def test_without_emulation_the_ranks_still_know_their_nodes(monkeypatch):
    monkeypatch.setattr(hosts_module, "why_not", lambda: "no root in this test")
    local = "LocalSteps(Mean(), every=2, buffers='own')"
    plan = replace(TINY, arms=(*TINY.arms, local), links=(parse_link("100mbit"),), model="mlp9m")
    rows = {row["arm"]: row for row in bench_arms(plan)["results"]}
    assert {row["status"] for row in rows.values()} == {"ok"}
    ddp, inside = rows["ddp"], rows[HIERARCHICAL]
    assert (ddp["emulated"], ddp["interface_of"], ddp["nodes"]) == (False, "rank", 2)
    assert "no root in this test" in ddp["note"]
    assert inside["uplink_bytes"] < ddp["uplink_bytes"] / 7
    assert inside["ledger_bytes"] > inside["uplink_bytes"]  # dense inside of the node
    assert rows[local]["uplink_bytes"] == pytest.approx(ddp["uplink_bytes"] / 2, rel=0.01)
    for arm in ("ddp", "hsdp", ON_HSDP):  # a rank's bytes, inside of the node too
        assert rows[arm]["interface_bytes"] == pytest.approx(rows[arm]["ledger_bytes"], rel=0.06)


def test_hsdp_alone_has_no_other_arm_to_be_compared_with():
    rows = {row["arm"]: row for row in bench_arms(replace(TINY, arms=(ON_HSDP,)))["results"]}
    assert rows[ON_HSDP]["status"] == "ok"
    assert rows[ON_HSDP]["speedup_hsdp"] is None
    assert rows[ON_HSDP]["speedup"] > 0


SHAPES = {"stem.weight": (6, 5), "layers.0.a.weight": (7, 5), "layers.0.a.bias": (7,),
          "layers.1.a.weight": (3, 5), "head.bias": (9,)}  # fmt: skip


def gradients(rank, strategy):
    torch.manual_seed(3)
    model, inputs = Shaped(SHAPES), torch.randn(4, 5)
    model(inputs).backward()
    alone = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    arm = HsdpArm(model, strategy, TWO_BY_TWO)
    arm.take_events()  # attach compares the weights
    before = arm.sent_bytes, arm.uplink_bytes
    model(inputs).backward()
    together = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
    assert together.keys() == alone.keys() == SHAPES.keys()
    for name in alone:
        torch.testing.assert_close(together[name], alone[name])
    sent, uplink = arm.sent_bytes - before[0], arm.uplink_bytes - before[1]
    return sent, uplink, [event.over for event in arm.take_events()]


@pytest.mark.parametrize("arm", ["hsdp", "hsdp: Mean()"])
def test_the_gradients_on_hsdp_are_those_of_the_model(arm):
    """All ranks have the same batch. Padded parts are 3 x 5; 4 x 5, 4; 2 x 5; 5 numbers."""
    across = 4 * (15 + 20 + 4 + 10 + 5)  # a rank's parts, to the one other replica
    for sent, uplink, scopes in run_ranks(gradients, 4, arm, deadline=60):
        assert uplink == 2 * across
        assert sent > 2 * across
        assert set(scopes) == ({"cross"} if "Mean" in arm else set())


def test_blocks_are_the_children_and_the_elements_of_lists():
    lists = nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"inner": nn.Linear(2, 2)})])
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), lists, nn.Sequential(nn.Linear(2, 2)))
    assert list(blocks_of(model)) == [model[0], lists[0], lists[1]["inner"], model[3]]


@pytest.mark.parametrize(
    ("shapes", "parameters", "blocks"),
    [
        (resnet18_shapes, 11_173_962, ["stem", "stage1.0", "stage1.1", "stage2.0", "stage2.1", "stage3.0",
                                       "stage3.1", "stage4.0", "stage4.1", "head"]),
        (gpt_small_shapes, 124_439_808, ["tokens", "places", *(f"layers.{i}" for i in range(12)), "norm"]),
    ],
)  # fmt: skip
def test_presets_are_made_of_blocks_that_hold_all_their_parameters(shapes, parameters, blocks):
    with torch.device("meta"):
        model = Shaped(dict(shapes()))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == dict(shapes())
    assert list(blocks_of(model)) == [model.get_submodule(name) for name in blocks]
    assert sum(p.numel() for block in blocks_of(model) for p in block.parameters()) == parameters


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": None, "arms": ("hsdp",)}, r"arm 'hsdp' shards .* add --nodes 2 --per-node 2"),
        ({"nodes": None, "arms": (HIERARCHICAL,)}, r"is for nodes of several ranks.* add --nodes 2"),
        ({"arms": (f"hsdp: {HIERARCHICAL}",)}, r"write what is inside of Hierarchical\(...\)"),
        ({"arms": ("hsdp: LocalSteps(Mean(), every=2)",)}, "local steps need the whole model on each rank"),
        ({"arms": ("hsdp: Maen()",)}, "did you mean Mean"),
        ({"arms": ("hsdp: torch.fp16",)}, "arm 'hsdp: torch.fp16'"),
    ],
)
def test_arms_that_do_not_fit_the_nodes_are_refused(change, message):
    with pytest.raises(gl.InvalidValue, match=message):
        replace(TINY, **change)


@pytest.mark.parametrize(
    ("count", "per_node", "message"),
    [
        (1, 4, "nodes=1 has no link between nodes; use 2 or more, or --ranks"),
        (2, 0, "per_node=0 has no ranks; use 1 or more"),
        (9, 8, "9 nodes of 8 are 72 ranks, too many for one machine; use 64 at most"),
    ],
)
def test_nodes_that_cannot_be_made_are_refused(count, per_node, message):
    with pytest.raises(gl.InvalidValue, match=message):
        Nodes(count, per_node)


NODES = ("bench", "--model", "tests.support.workloads:tiny", "--nodes", "2", "--per-node", "2")


def bench(*arguments):
    return started((sys.executable, "-m", "gradlane", *NODES, *arguments))


def test_the_command_shows_what_nodes_send(tmp_path):
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    files = ("--json", str(out), "--page", str(page))
    options = ("--steps", "2", "--warmup", "1", "--arm", "hsdp", "--arm", "hsdp: Mean()", *files)
    done = scripts.gradlane(*NODES, *options, COLUMNS="80")
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert "2 nodes of 2 ranks" in printed
    for text in ("across", "x hsdp", "hsdp: Mean()", "Noop()", "a node send to other nodes"):
        assert text in printed
    table = printed.partition("median:")[0]
    assert max(map(len, map(str.rstrip, table.splitlines()))) <= 80
    rows = json.loads(out.read_text())["results"]
    assert [row["arm"] for row in rows] == ["ddp", "Noop()", "hsdp", "hsdp: Mean()"]
    for text in ("2 nodes of 2 ranks", "a node across", "over hsdp"):
        assert text in page.read_text()


@needs_links
def test_killed_it_leaves_neither_ranks_nor_nodes():
    with bench("--steps", "100000", "--link", "1gbit", "--arm", "hsdp") as running:
        # three arms of four ranks and the leader of their process group
        assert gone(lambda: len(members(running.pid)) == 1 + 3 * (4 + 1), 60)
        assert gone(lambda: len(namespaces(members(running.pid))) == 2, 60)
        used = namespaces(members(running.pid))
        running.kill()
        running.communicate(timeout=60)
        assert gone(lambda: not members(running.pid))
        assert not used & namespaces()
