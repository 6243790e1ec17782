"""Ranks in nodes: what arrives, what is kept, what crosses, and what becomes of it with other nodes."""

import copy

import pytest
import torch

import gradlane as gl
from gradlane.core.layout import Layout, Slot
from gradlane.core.parts import Parts, parts_of
from gradlane.core.world_change import Expected

from ..support.catalogue import STRATEGIES

SHAPES = {"a.weight": (24, 32), "a.bias": (40,), "odd": (7, 3), "row": (1, 5, 9), "one": (), "none": (0, 4)}
NODES = [(4, 2), (6, 2), (6, 3), (8, 4)]
"""Ranks, and ranks per node."""


def gradients(world, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(100 * world + step)
    return [
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(world)
    ]


def simulation(strategy, world, node_size, **options):
    ranks = gl.Simulation(strategy, world=world, node_size=node_size, **options)
    slots = {name: Expected(torch.Size(shape), torch.float32) for name, shape in SHAPES.items()}
    for own, scopes in zip(ranks.strategies, ranks.scopes, strict=True):
        own.enter(scopes, slots)
    return ranks


def residual(ranks, node_size):
    """The residual of all nodes together, in the unit of a sum over the ranks."""
    layout = Layout(Slot(name, torch.Size(shape)) for name, shape in SHAPES.items())
    total = torch.zeros(sum(slot.numel for slot in layout), dtype=torch.double)
    for first in range(0, ranks.world, node_size):
        states = [own.cross.memory.state_dict() for own in ranks.strategies[first : first + node_size]]
        parts = parts_of(layout, node_size)
        flats = [
            torch.cat(
                [state.get(slot.name, torch.zeros(slot.shape)).reshape(-1) for slot in parts.layout(place)]
            )
            for place, state in enumerate(states)
        ]
        total += node_size * parts.join([flat.double() for flat in flats], torch.empty_like(total))
    return {slot.name: view.clone() for slot, view in layout.views(total)}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_parts_join_to_what_was_cut_and_the_remainder_is_zeros(count):
    layout = Layout(Slot(name, torch.Size(shape)) for name, shape in SHAPES.items())
    flat = torch.arange(1.0, 1 + sum(slot.numel for slot in layout))
    parts = Parts(layout, count)
    cut = parts.cut(flat, torch.full((count * parts.numel,), torch.nan))
    assert cut.sum() == flat.sum()
    assert torch.equal(parts.join(cut.view(count, -1).unbind(), torch.empty_like(flat)), flat)
    for slot in parts.layout(count - 1):
        assert slot.parameter in SHAPES


@pytest.mark.parametrize(("world", "node_size"), NODES)
@pytest.mark.parametrize("cross", ["int4 feedback", "top-k", "1-bit", "powersgd", "raw bf16 feedback"])
def test_what_arrived_and_what_is_kept_is_what_was_given(cross, world, node_size):
    ranks = simulation(gl.Hierarchical(STRATEGIES[cross]()), world, node_size, bucket_bytes=1024)
    missing = {name: torch.zeros(shape, dtype=torch.double) for name, shape in SHAPES.items()}
    for step in range(30):
        given = gradients(world, step)
        mean = ranks.step(given)[0]
        for name in SHAPES:
            missing[name] += sum(own[name].double() for own in given) - world * mean[name].double()
    for name, kept in residual(ranks, node_size).items():
        torch.testing.assert_close(missing[name], kept, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("world", "node_size"), NODES)
def test_the_mean_is_the_mean_and_a_node_sends_what_a_rank_would_send(world, node_size):
    shapes = {"w": (96, 48), "b": (96,)}
    nodes, size = world // node_size, 4 * (96 * 48 + 96)
    cost = gl.dry_run("Hierarchical(Mean())", shapes, world, node_size=node_size)
    across = sum(event.wire_bytes for event in cost.events if event.over == "cross")
    inside = sum(event.wire_bytes for event in cost.events if event.over == "node")
    assert across == pytest.approx(2 * (nodes - 1) / nodes * size / node_size, rel=0.02)
    assert inside == pytest.approx(2 * (node_size - 1) / node_size * size, rel=0.02)
    ranks = gl.Simulation("Hierarchical(Mean())", world=world, node_size=node_size)
    given = gradients(world, 0, shapes)
    for name, mean in ranks.step(given)[0].items():
        torch.testing.assert_close(mean, sum(own[name] for own in given) / world, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("node_size", [2, 4])
def test_a_rank_keeps_its_part_of_the_residual_only(node_size):
    ranks = simulation("Hierarchical(ErrorFeedback(Sharded(Int4())))", 8, node_size)
    ranks.step(gradients(8, 0))
    layout = Layout(Slot(name, torch.Size(shape)) for name, shape in SHAPES.items())
    for own in ranks.strategies:
        kept = sum(tensor.numel() for tensor in own.cross.memory.state_dict().values())
        assert kept == parts_of(layout, node_size).numel


def test_one_rank_per_node_and_a_single_node_fall_back():
    given = gradients(4, 0)
    flat = gl.Simulation("ErrorFeedback(Sharded(Int4()))", world=4).step(given)[0]
    alone = gl.Simulation("Hierarchical(ErrorFeedback(Sharded(Int4())))", world=4, node_size=1).step(given)[0]
    single = gl.Simulation("Hierarchical(ErrorFeedback(Sharded(Int4())))", world=4, node_size=4).step(given)[
        0
    ]
    mean = gl.Simulation("Mean()", world=4).step(given)[0]
    for name in SHAPES:
        assert torch.equal(flat[name], alone[name])
        assert torch.equal(mean[name], single[name])


def test_rules_decide_by_the_whole_gradient_of_a_node():
    """Distances are summed over the ranks of a node: one wrong node is left out of every part."""
    given = gradients(10, 0)
    for own in given[8:]:
        own["a.weight"] += 1e3  # its part is on one rank of two for most rows
    ranks = gl.Simulation("Hierarchical(Combined(Krum(1)))", world=10, node_size=2)
    answer = ranks.step(given)[0]
    nodes = [
        {name: (one[name] + two[name]) / 2 for name in SHAPES}
        for one, two in zip(given[::2], given[1::2], strict=True)
    ]
    flat = torch.cat([answer[name].reshape(-1) for name in SHAPES])
    rows = [torch.cat([node[name].reshape(-1) for name in SHAPES]) for node in nodes]
    assert min((flat - row).abs().max() for row in rows[:4]) < 1e-5


def moved(before, after):
    saved = [copy.deepcopy(own.state_dict()) for own in before.strategies]
    for rank, own in enumerate(after.strategies):
        own.load_state_dict(own.carried(saved, rank, after.world))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 2), (8, 2)),
        ((8, 2), (4, 2)),
        ((8, 4), (8, 2)),
        ((8, 2), (8, 4)),
        ((6, 3), (4, 2)),
        ((8, 4), (6, 3)),
    ],
)
@pytest.mark.parametrize("cross", ["int4 feedback", "powersgd"])
def test_other_nodes_keep_the_sum_of_the_residuals(cross, old, new):
    before, after = (simulation(gl.Hierarchical(STRATEGIES[cross]()), *nodes) for nodes in (old, new))
    for step in range(3):
        before.step(gradients(old[0], step))
    moved(before, after)
    # A node counts as 1/n of the mean, and a rank as 1/N of it.
    one, two = residual(before, old[1]), residual(after, new[1])
    for name in SHAPES:
        torch.testing.assert_close(one[name] / old[1], two[name] / new[1], rtol=1e-5, atol=1e-6)
    after.step(gradients(new[0], 3))


def test_a_single_node_would_never_send_the_residual():
    before, after = (
        simulation("Hierarchical(ErrorFeedback(Gathered(TopK(0.1))))", *n) for n in ((4, 2), (2, 2))
    )
    before.step(gradients(4, 0))
    with pytest.raises(gl.InvalidValue, match="on one node it would never be sent"):
        moved(before, after)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ErrorFeedback(Hierarchical(Sharded(Int4())))", "Put it inside: Hierarchical\\(ErrorFeedback"),
        ("EF21(Hierarchical(Sharded(Int4())))", "Put it inside: Hierarchical\\(EF21"),
        ("Hierarchical(Hierarchical(Mean()))", "there are two levels"),
        ("Hierarchical(WeightedMean(1.0))", "put it outside"),
        ("Hierarchical(Noop())", "different gradients"),
        ("Hierarchical(NodeMean())", "different gradients"),
        ("Hierarchical(Mean(), inner=PowerSGD(4))", "cannot reduce one part per rank"),
        ("Hierarchical(Mean(), inner=ErrorFeedback(Sharded(Int4())))", "cannot reduce one part per rank"),
        ("Hierarchical(Int4())", "is not a strategy"),
        ("Hierarchical(Private(Mean(), clip=1.0, noise_multiplier=1.0, sample_rate=0.1))", "rivate"),
    ],
)
def test_wrong_nestings_are_refused(text, reason):
    with pytest.raises((gl.InvalidValue, gl.WrongType), match=reason):
        gl.parse(text)


def test_a_strategy_inside_must_not_ask_for_a_node():
    @gl.strategy_from
    async def greedy(bucket):
        return await gl.all_reduce(bucket.flat, over="node")

    with pytest.raises(gl.InvalidValue, match="it can ask over='world' only"):
        gl.Simulation(gl.Hierarchical(greedy), world=4, node_size=2).step(gradients(4, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_reduce_scatter_is_half_of_an_all_reduce(dtype):
    @gl.strategy_from
    async def in_two_halves(bucket):
        part = await gl.reduce_scatter(bucket.flat)
        return torch.cat([part for (part,) in await gl.all_gather((part,))])

    given = [{"w": torch.randn(12).to(dtype)} for _ in range(3)]
    halves = gl.Simulation(in_two_halves, world=3)
    mean = halves.step(given)[0]["w"]
    exact = sum(own["w"].double() for own in given) / 3
    torch.testing.assert_close(
        mean.double(), exact, rtol=torch.finfo(dtype).eps * 4, atol=torch.finfo(dtype).eps * 4
    )
    assert [event.wire_bytes for event in halves.events] == [2 * 4 * dtype.itemsize] * 2


def test_reduce_scatter_refuses_unequal_parts():
    @gl.strategy_from
    async def unequal(bucket):
        return await gl.reduce_scatter(bucket.flat)

    with pytest.raises(gl.InvalidValue, match="equal parts for 3 ranks, got 7 elements"):
        gl.Simulation(unequal, world=3).step([{"w": torch.zeros(7)}] * 3)


@pytest.mark.parametrize("codec", ["Int4(rotate=True)", "Int8(rounding='stochastic')", "RandomK(0.9)"])
def test_a_codec_inside_the_node_is_decoded_with_the_seed_it_was_encoded_with(codec):
    gradients = [{"w": torch.randn(64, 8, generator=torch.Generator().manual_seed(r))} for r in range(6)]
    mean = torch.stack([each["w"] for each in gradients]).mean(0)
    ranks = gl.Simulation(f"Hierarchical(Mean(), inner=Sharded({codec}))", world=6, node_size=3)
    for answer in ranks.step(gradients):
        assert (answer["w"] - mean).norm() < 0.5 * mean.norm()
