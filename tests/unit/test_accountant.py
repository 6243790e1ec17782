"""The accountant against others: opacus, the closed form, and a plain sum of integer orders."""

import math

import pytest
import torch

import gradlane as gl
from gradlane.strategies.accountant import Spent, epsilon_of, epsilon_of_all, renyi
from gradlane.strategies.ledgers import follow, reset_state

OPACUS = {
    (1.0, 1.0, 1, 1e-5): 4.728507067217623,
    (1.0, 1.0, 100, 1e-5): 96.11630842505602,
    (20.0, 1.0, 10, 1e-5): 0.6158015412081491,
    (0.8, 0.01, 1000, 1e-5): 3.695428832544017,
    (1.1, 256 / 60_000, 14_040, 1e-5): 2.594363354953112,
    (2.0, 0.5, 50, 1e-3): 7.867361416814011,
    (6.0, 0.2, 400, 1e-6): 3.3953266952343615,
    (3.0, 0.9, 20, 1e-5): 6.772846275115025,
    (10.0, 0.001, 100_000, 1e-8): 0.16339943933584708,
    (0.5, 0.1, 10, 1e-5): 14.418327009829337,
    (0.3, 0.25, 5, 1e-5): 42.83361591866329,
}
"""(noise, sampling, steps, delta) -> epsilon. By opacus 1.6.0, ``compute_rdp`` and ``get_privacy_spent`` of
``opacus.accountants.analysis.rdp``, at the orders 1.1, 1.2, ... 10.9, 11, ... 63, 80, 128, 256, 512, 1024."""


@pytest.mark.parametrize("case", OPACUS, ids=str)
def test_as_opacus_has_it_and_never_below(case):
    assert OPACUS[case] <= epsilon_of(*case) <= OPACUS[case] * 1.00001


def test_the_published_figure():
    assert 7.3291 <= epsilon_of(1.5, 0.04, 2250, 1e-5) <= 7.3291 * 1.001


@pytest.mark.parametrize("order", [2, 3, 8, 16])
@pytest.mark.parametrize(("noise", "sampling"), [(1.5, 0.04), (0.7, 0.3), (4.0, 0.9)])
def test_integer_orders_are_a_binomial_sum(noise, sampling, order):
    """Mironov, Talwar and Zhang (2019), section 3.3."""
    total = math.fsum(
        math.comb(order, k)
        * (1 - sampling) ** (order - k)
        * sampling**k
        * math.exp(k * (k - 1) / (2 * noise**2))
        for k in range(order + 1)
    )
    assert renyi(noise, sampling, order) == pytest.approx(math.log(total) / (order - 1), rel=1e-9)


def test_more_noise_fewer_steps_and_less_sampling_cost_less():
    base = epsilon_of(1.0, 0.1, 100, 1e-5)
    assert epsilon_of(1.2, 0.1, 100, 1e-5) < base
    assert epsilon_of(1.0, 0.05, 100, 1e-5) < base
    assert epsilon_of(1.0, 0.1, 50, 1e-5) < base
    assert epsilon_of(1.0, 0.1, 100, 1e-3) < base
    assert base < epsilon_of(1.0, 1.0, 100, 1e-5)


def test_the_ends():
    assert epsilon_of(1.0, 1.0, 0, 1e-5) == 0
    assert epsilon_of(0.0, 1.0, 1, 1e-5) == math.inf
    assert epsilon_of(0.05, 0.5, 1, 1e-5) == epsilon_of(0.05, 1.0, 1, 1e-5)  # not credited
    for delta in (0, 1, -1e-5, math.nan):
        with pytest.raises(gl.InvalidValue, match=r"delta=.*such as 1e-5"):
            epsilon_of(1.0, 1.0, 1, delta)
    for steps in (-1, 2.5):
        with pytest.raises(gl.InvalidValue, match=f"steps={steps}; use a whole number"):
            epsilon_of(1.0, 1.0, steps, 1e-5)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({}, "this one nothing"),
        ({"noise_multiplier": 1.0, "sample_rate": 0.5}, "this one noise_multiplier, sample_rate"),
        (
            {"noise_multiplier": 2.0, "sample_rate": 0.5, "steps": 3},
            "kept with noise_multiplier=2.0, this Private has noise_multiplier=1.0",
        ),
        ({"noise_multiplier": 1.0, "sample_rate": 1.0, "steps": 3}, "kept with sample_rate=1.0"),
        ({"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": -3}, "counts -3 steps"),
        ({"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": 3.0}, "counts 3.0 steps"),
        ({"noise_multiplier": 1.0, "sample_rate": 0.5, "steps": True}, "counts True steps"),
        ({"noise_multiplier": math.nan, "sample_rate": 0.5, "steps": 3}, "kept with noise_multiplier=nan"),
    ],
)
def test_a_ledger_of_another_mechanism_is_refused(state, message):
    spent = Spent(1.0, 0.5)
    spent.steps = 7
    with pytest.raises(gl.InvalidValue, match=message):
        spent.load_state_dict(state)
    assert spent.steps == 7


def private(noise=1.0, *, steps=0):
    found = gl.Private(gl.Mean(), clip=1.0, noise_multiplier=noise)
    found.spent.steps = steps
    return found


def test_a_strategy_that_begins_anew_has_spent_what_it_has_spent():
    mean = gl.Cast(private(), torch.bfloat16)
    fresh = mean.state_dict()
    mean.inner.spent.steps = 50
    reset_state(mean, fresh)
    assert mean.inner.spent.steps == 50
    assert mean.inner.epsilon(1e-5) == epsilon_of(1.0, 1.0, 50, 1e-5)


def test_ledgers_that_follow_each_other_count_each_step_once():
    first, second, third = private(1.0, steps=10), private(2.0, steps=5), private(1.0, steps=3)
    for old, new in ((first, second), (second, first), (first, third), (third, first), (first, first)):
        follow(old, new)
    for last in (first, second, third):
        assert last.spent.runs() == {(1.0, 1.0): 13, (2.0, 1.0): 5}
        assert last.epsilon(1e-5) == epsilon_of_all({(1.0, 1.0): 13, (2.0, 1.0): 5}, 1e-5)
    first.spent.steps += 1
    assert second.spent.runs()[1.0, 1.0] == 14
    again = private(2.0)
    again.load_state_dict(second.state_dict())
    assert again.spent.runs() == second.spent.runs()
    again.spent.steps += 1
    assert again.spent.runs() == {(1.0, 1.0): 14, (2.0, 1.0): 6}
    assert second.spent.runs() == {(1.0, 1.0): 14, (2.0, 1.0): 5}


def test_several_mechanisms_cost_what_one_of_all_their_steps_would():
    for split in (0, 40, 99):
        assert epsilon_of_all({(1.0, 1.0): 100, (3.0, 1.0): 0}, 1e-5) == epsilon_of(1.0, 1.0, 100, 1e-5)
        # Gaussians without sampling add up as 1 / noise^2
        mixed = epsilon_of_all({(1.0, 1.0): split, (0.5, 1.0): 100 - split}, 1e-5)
        assert mixed == pytest.approx(epsilon_of(1.0, 1.0, split + 4 * (100 - split), 1e-5), rel=1e-9)
    assert epsilon_of_all({(1.0, 1.0): 100, (0.0, 1.0): 1}, 1e-5) == math.inf
    assert epsilon_of_all({(0.0, 1.0): 0}, 1e-5) == 0.0


def test_a_swap_to_what_is_not_private_is_told(caplog):
    follow(private(), gl.Mean())
    assert not caplog.records
    follow(private(steps=1), gl.Mean())
    assert "not private" in caplog.text


@pytest.mark.parametrize(
    "earlier", [{"1.0": 3}, {"a b": 3}, {"1.0 2.0": 3}, {"-1.0 1.0": 3}, {"nan 1.0": 3}, {"1.0 1.0": -3}, 7]
)
def test_what_cannot_have_been_spent_earlier_is_refused(earlier):
    ledger = private(steps=7)
    with pytest.raises(gl.InvalidValue, match="the ledger"):
        ledger.load_state_dict(
            {"spent": {"noise_multiplier": 1.0, "sample_rate": 1.0, "steps": 3, "earlier": earlier}}
        )
    assert ledger.spent.runs() == {(1.0, 1.0): 7}
