"""What ranks under a budget obey: never more than it allows, alike on all ranks, and the best there are."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gradlane as gl
from gradlane.kernels.products import row_squares
from gradlane.strategies.lowrank import knapsack
from gradlane.strategies.lowrank.knapsack import Item, ranks_within

from ..reference.knapsack import best_energy, energy
from ..reference.lowrank import dot

law = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
items_of = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 1000), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
).map(lambda pairs: [Item(cost, [float(g) for g in gains]) for cost, gains in pairs])


@law
@given(items=items_of, more=st.integers(0, 200))
def test_the_ranks_are_the_best_of_all(items, more):
    room = sum(item.cost for item in items) + more
    ranks = ranks_within(items, room)
    assert sum(item.cost * rank for item, rank in zip(items, ranks, strict=True)) <= room
    assert energy(items, ranks) == best_energy(items, room)


@law
@given(items=items_of, more=st.integers(0, 200), cells=st.integers(1, 9))
def test_with_wide_cells_they_fit_and_nothing_that_fits_is_left(items, more, cells):
    room = sum(item.cost for item in items) + more
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "CELLS", cells)
        ranks = ranks_within(items, room)
    left = room - sum(item.cost * rank for item, rank in zip(items, ranks, strict=True))
    assert left >= 0
    for item, rank in zip(items, ranks, strict=True):
        assert 1 <= rank <= len(item.gains)
        assert rank == len(item.gains) or item.cost > left or item.gains[rank] == 0


def test_wide_cells_lose_little():
    generator = torch.Generator().manual_seed(0)
    costs = torch.randint(30, 900, (40,), generator=generator).tolist()
    scales = torch.randn(40, generator=generator).exp().tolist()
    items = [Item(c, [s / k**1.5 for k in range(1, 33)]) for c, s in zip(costs, scales, strict=True)]
    room = 6 * sum(costs)
    fine = energy(items, ranks_within(items, room))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(knapsack, "CELLS", room)
        assert math.gcd(*costs) == 1
        exact = energy(items, ranks_within(items, room))
    assert exact * 0.9999 < fine <= exact


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_energies_have_the_bits_of_a_fixed_order(size):
    rows = noise(3, size, seed=size)
    assert row_squares(rows).tolist() == [dot(row, row) for row in rows.double().tolist()]


def gradients(shapes, step, world=2):
    """Spectra that differ from tensor to tensor."""
    given_ = []
    for rank in range(world):
        own = {}
        for place, (name, shape) in enumerate(shapes.items()):
            own[name] = noise(*shape, seed=101 * step + 17 * rank + place) * 3.0 ** (place % 4)
        given_.append(own)
    return given_


def sent_by_step(ranks):
    sent = {}
    for event in ranks.events:
        sent[event.step] = sent.get(event.step, 0) + event.payload_elements
    return list(sent.values())


shapes_of = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.one_of(
        st.tuples(st.integers(0, 12)),
        st.tuples(st.integers(1, 24), st.integers(1, 24)),
        st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4)),
    ),
    min_size=1,
    max_size=6,
)


@law
@given(
    shapes=shapes_of,
    budget=st.floats(0.02, 0.98),
    rate=st.sampled_from([0, 1, 2]),
    iterations=st.integers(1, 2),
    view=st.sampled_from(["tensor", "bucket"]),
)
def test_a_step_never_sends_more_than_the_budget(shapes, budget, rate, iterations, view):
    inner = gl.PowerSGD(budget=budget, every=2, min_compression_rate=rate, iterations=iterations, view=view)
    ranks = gl.Simulation(gl.ErrorFeedback(inner), world=2)
    numel = sum(math.prod(shape) for shape in shapes.values())
    try:
        ranks.step(gradients(shapes, 0))
    except gl.InvalidValue as error:
        refused = str(error)
    else:
        refused = ""
        for step in range(1, 6):
            ranks.step(gradients(shapes, step))
    assert f"of {numel:,} elements" in refused or len(sent_by_step(ranks)) == 6 or not numel
    assert all(sent <= budget * numel for sent in sent_by_step(ranks))


@law
@given(shapes=shapes_of, budget=st.floats(0.3, 0.98), size=st.integers(40, 2000))
def test_in_several_buckets_neither_from_the_second_step_on(shapes, budget, size):
    ranks = gl.Simulation(
        gl.PowerSGD(budget=budget, every=3, min_compression_rate=0), world=2, bucket_bytes=size
    )
    numel = sum(math.prod(shape) for shape in shapes.values())
    refused = False
    try:
        ranks.step(gradients(shapes, 0))
    except gl.InvalidValue:
        refused = True
    for step in range(1, 1 if refused else 7):
        ranks.step(gradients(shapes, step))
    assert all(sent <= budget * numel for sent in sent_by_step(ranks)[1:])


SHAPES = {"steep": (48, 48), "flat": (48, 48), "bias": (48,), "wide": (16, 96)}


def drawn(step, world=2):
    """A steep spectrum of much energy, a flat one of little, and directions that stay."""
    u, v = (torch.linalg.qr(noise(48, 48, seed=seed)).Q for seed in (1, 2))
    steep = u * 30 * 0.8 ** torch.arange(48.0) @ v
    return [
        {
            "steep": steep + 0.01 * noise(48, 48, seed=31 * step + rank),
            "flat": noise(48, 48, seed=7) * 0.05,
            "bias": noise(48, seed=step + rank),
            "wide": noise(16, 96, seed=3 * step + rank) * 0.01,
        }
        for rank in range(world)
    ]


@pytest.mark.parametrize("bucket_bytes", [None, 9500])
def test_ranks_go_where_the_energy_is_and_are_alike_everywhere(bucket_bytes):
    ranks = gl.Simulation(gl.PowerSGD(budget=0.25, every=10), world=3, bucket_bytes=bucket_bytes)
    seen = []
    for step in range(31):
        ranks.step(drawn(step, 3))
        first, *others = (own.ranks() for own in ranks.strategies)
        assert all(other == first for other in others)
        seen.append(first)
    assert seen[0] == seen[9]
    assert seen[-1]["steep"] > 2 * seen[-1]["flat"]
    assert seen[-1]["steep"] > seen[0]["steep"]
    assert ranks.figures["ranks"] == 3 * sum(sum(step.values()) for step in seen)


def test_a_steep_spectrum_that_is_carried_already_leaves_its_ranks_to_a_flat_one():
    low = noise(48, 2) @ noise(2, 48, seed=1)
    flat = noise(48, 48, seed=2)
    ranks = gl.Simulation(gl.PowerSGD(budget=0.25, every=10), world=1)
    for _ in range(41):
        ranks.step([{"low": low, "flat": flat}])
    found = ranks.strategies[0].ranks()
    assert found["low"] <= 3
    assert found["flat"] >= 9


def test_shared_out_ranks_leave_less_behind_than_equal_ones():
    def left(strategy):
        ranks = gl.Simulation(strategy, world=1)
        for step in range(40):
            mine = drawn(step, 1)
            answer = ranks.step(mine)[0]
        return sum(float((mine[0][n] - answer[n]).square().sum()) for n in mine[0]), sent_by_step(ranks)[-1]

    equal, equal_sent = left(gl.PowerSGD(4))
    budget = equal_sent / sum(math.prod(shape) for shape in SHAPES.values())
    shared, shared_sent = left(gl.PowerSGD(budget=budget, every=10))
    assert shared_sent <= equal_sent
    assert shared < 0.5 * equal


def test_a_resumed_run_decides_as_the_one_that_went_on():
    def begun():
        return gl.Simulation(gl.After(2, gl.ErrorFeedback(gl.PowerSGD(budget=0.3, every=5))), world=2)

    whole, first, second = begun(), begun(), begun()
    expected = [whole.step(drawn(step)) for step in range(20)][-1]
    for step in range(9):
        first.step(drawn(step))
    second.steps = 9
    for old, new in zip(first.strategies, second.strategies, strict=True):
        new.load_state_dict(old.state_dict())
        assert new.then.inner.ranks() == old.then.inner.ranks()
    answers = [second.step(drawn(step)) for step in range(9, 20)][-1]
    assert all(torch.equal(answers[0][name], expected[0][name]) for name in SHAPES)
    assert whole.strategies[0].then.inner.ranks() == second.strategies[1].then.inner.ranks()


def test_a_bad_step_does_not_count():
    ranks = gl.Simulation(gl.PowerSGD(budget=0.3, every=4), world=2)
    for step in range(12):
        mine = drawn(step)
        before = [own.plan.state_dict().get("energy", {}) for own in ranks.strategies]
        if step in (2, 3, 11):
            mine[1]["steep"][0, 0] = math.nan
        ranks.step(mine)
    for own, then in zip(ranks.strategies, before, strict=True):
        now = own.plan.state_dict()["energy"]
        assert torch.equal(now["steep"], then["steep"])
        assert not torch.equal(now["wide"], then["wide"])
    assert ranks.strategies[0].ranks()["steep"] > ranks.strategies[0].ranks()["flat"]


def test_the_dry_run_prices_the_start_and_takes_no_part():
    strategy = gl.PowerSGD(budget=0.25)
    trace = gl.dry_run(strategy, SHAPES, world=4)
    assert 0.2 * 6192 < trace.payload_elements <= 0.25 * 6192
    assert strategy.ranks() == {}


def test_the_limit_by_name_and_a_budget_of_what_is_routed():
    ranks = gl.Simulation(gl.PowerSGD({"steep": 3, "flat": 32}, budget=0.6, every=3), world=2)
    for step in range(8):
        ranks.step(drawn(step))
    found = ranks.strategies[0].ranks()
    assert set(found) == {"steep", "flat"}  # the rest is dense
    assert found["steep"] <= 3
    routed = gl.PowerSGD(budget=0.2, every=3)
    ranks = gl.Simulation(gl.Route({"bias": gl.Mean()}, routed), world=2)
    for step in range(8):
        ranks.step(drawn(step))
    assert max(sent_by_step(ranks)) <= 48 + 0.2 * (6192 - 48)


def test_a_budget_that_cannot_be_kept_is_told_in_figures():
    shapes = {"w": (20, 20), "b": (100,)}
    with pytest.raises(
        gl.InvalidValue,
        match=r"budget=0\.1 allows 50 of 500 elements a step, but 100 are dense and rank 1 of 1 matrices "
        r"is 40; use budget=0\.28 or more",
    ):
        gl.dry_run(gl.PowerSGD(budget=0.1), shapes, world=2)
    assert gl.dry_run(gl.PowerSGD(budget=0.28), shapes, world=2).payload_elements == 140
    with pytest.raises(gl.InvalidValue, match=r"allows 8 of 9 elements.*; leave the budget out, or give"):
        gl.dry_run(gl.PowerSGD(budget=0.9), {"b": (9,)}, world=2)  # no budget below 1 would do


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0}, "budget=0; use a share of the gradient's elements between 0 and 1"),
        ({"budget": 1.5}, "budget=1.5"),
        ({"budget": math.nan}, "budget=nan"),
        ({"budget": 0.1, "every": 0}, "every=0; use a whole number from 1 up"),
    ],
)
def test_options_are_refused_at_once(options, message):
    with pytest.raises(gl.InvalidValue, match=message):
        gl.PowerSGD(**options)


def test_the_text_form_has_the_options_and_no_state():
    strategy = gl.parse("PowerSGD(budget=0.01)")
    assert gl.describe(strategy, short=True) == "PowerSGD(rank=32, budget=0.01)"
    assert strategy == gl.PowerSGD(budget=0.01)
    with pytest.raises(gl.InvalidValue, match="state of ranks has"):
        strategy.load_state_dict({"plan": {"ranks": {}}})
