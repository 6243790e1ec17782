"""What may be inside what, and what a field may be: rules that hold for every strategy."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch

import gradlane as gl
from gradlane.core.strategy import is_stateful, parts
from gradlane.strategies.nesting import check_nesting, check_wrapped
from gradlane.strategies.text import exported_parts

from ..support.catalogue import EVERY


@dataclasses.dataclass
class Halved(gl.Strategy):
    """A wrapper as a user would write it: its rules are in the class."""

    inner: gl.Strategy

    def __post_init__(self):
        check_wrapped(self, self.inner, "Halved(Mean())")

    def refuses_inside(self, part):
        return "Halved inside Halved; use one with a quarter" if isinstance(part, Halved) else None

    def refuses_around(self, wrapper):
        return "Cast around Halved; put it inside" if isinstance(wrapper, gl.Cast) else None

    async def reduce(self, bucket):
        reduced = await self.inner.reduce(bucket)
        return gl.Reduced(reduced.mean.mul_(0.5))


def test_a_wrapper_of_ones_own_states_its_rules_in_one_place():
    Halved(gl.Cast(gl.Mean(), torch.bfloat16))
    with pytest.raises(gl.InvalidValue, match="Halved inside Halved; use one"):
        Halved(gl.After(3, then=Halved(gl.Mean())))
    with pytest.raises(gl.InvalidValue, match="Cast around Halved; put it inside"):
        gl.Cast(gl.Route({"a": Halved(gl.Mean())}), torch.bfloat16)
    with pytest.raises(gl.WrongType, match=r"Halved wraps a strategy, got Int8; write Halved\(Mean\(\)\)"):
        Halved(gl.Int8())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: gl.ErrorFeedback(gl.ErrorFeedback(gl.Sharded(gl.Int4()))),
            "left for ErrorFeedback; use one",
        ),
        (lambda: gl.ErrorFeedback(gl.After(3, gl.EF21(gl.Sharded(gl.Int4())))), "the inner one keeps"),
        (lambda: gl.EF21(gl.ErrorFeedback(gl.Sharded(gl.Int4()))), "nothing is left for EF21; use one"),
        (lambda: gl.ErrorFeedback(gl.DGC()), "DGC keeps a residual of its own; leave ErrorFeedback out"),
        (
            lambda: gl.Combined(gl.Median(), gl.TopK(0.01)),
            "Combined of Median and TopK: .* is 0",
        ),
        (lambda: gl.Gathered(gl.RandomK(0.01), gl.TrimmedMean(1)), "Gathered of TrimmedMean and RandomK"),
        (lambda: gl.Sharded(gl.ChunkTopK(), gl.NearMedian(2)), "Sharded of NearMedian and ChunkTopK"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with pytest.raises(gl.InvalidValue, match=message):
        make()


@pytest.mark.parametrize("name", EVERY)
def test_what_is_made_once_is_not_refused_later(name):
    for part in parts(EVERY[name]()):
        check_nesting(part)


@pytest.mark.parametrize("name", EVERY)
def test_a_field_is_an_option_or_has_a_state_dict(name):
    """State is never None and not an argument of the constructor; caches have a leading underscore."""
    for part in parts(EVERY[name]()):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.init:
                options = value.values() if isinstance(value, Mapping) else [value]
                assert not any(isinstance(option, gl.Memory) for option in options), field.name
            else:
                assert is_stateful(value) or field.name.startswith("_"), field.name


@pytest.mark.parametrize("name", EVERY)
def test_a_replaced_option_begins_with_a_state_of_its_own(name):
    strategy = EVERY[name]()
    again = dataclasses.replace(strategy)
    assert again == strategy
    for field in dataclasses.fields(strategy):
        if not field.init and is_stateful(state := getattr(strategy, field.name)):
            assert getattr(again, field.name) is not state


def test_text_knows_what_the_package_exports():
    exported = [getattr(gl, name) for name in gl.__all__]
    concrete = [
        part
        for part in exported
        if isinstance(part, type)
        and issubclass(part, gl.Strategy | gl.Codec | gl.Rule)
        and part not in (gl.Strategy, gl.Codec, gl.Rule, gl.GramRule, gl.RowRule)
    ]
    assert set(concrete) | {gl.mean, gl.Watch} == set(exported_parts().values())
    assert len(concrete) > 30
