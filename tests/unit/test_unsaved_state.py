"""State where nobody saves it is found; what is no state is left alone."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

import gradlane as gl
from gradlane.core.unsaved_state import unsaved_state


@dataclass
class Own(gl.Strategy):
    inner: gl.Strategy = field(default_factory=gl.Mean)
    memory: gl.Memory = field(default_factory=gl.Memory)
    option: object = None

    async def reduce(self, bucket):
        return await self.inner.reduce(bucket)


def with_attribute(name, value):
    strategy = Own()
    setattr(strategy, name, value)
    return strategy


FEEDBACK = gl.parse("ErrorFeedback(Gathered(TopK()))")


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (Own(option=torch.ones(2, 3)), "Own.option holds a tensor of float32[2, 3]"),
        (Own(option=np.ones(2)), "Own.option holds an array of float64[2]"),
        (Own(option={"a": [(1, torch.ones(1))]}), "Own.option holds a tensor"),
        (with_attribute("late", torch.ones(1)), "Own.late holds a tensor"),
        (with_attribute("_memory", gl.Memory()), "Own._memory is a Memory that nobody saves"),
        (with_attribute("_by_name", {"a": gl.Memory()}), "Own._by_name is a Memory that nobody saves"),
        (Own(option=[gl.Memory()]), "Own.option is a Memory that nobody saves"),
        (with_attribute("_inner", FEEDBACK), "Own._inner is a ErrorFeedback that nobody saves"),
        (gl.Route({"a": gl.After(1, Own(option=torch.ones(1)))}), "Own.option holds a tensor"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_kept_in_the_wrong_place(strategy, told):
    assert [text for text in unsaved_state(strategy) if told in text]


@pytest.mark.parametrize(
    "strategy",
    [
        Own(inner=gl.parse("ErrorFeedback(Gathered(TopK()))")),
        Own(option={"a": gl.Memory()}),
        Own(option=("text", 3, torch.float16, [1.0])),
        with_attribute("_constant", torch.ones(3)),
        with_attribute("_plain", gl.Mean()),
        gl.parse("Combined(Median())"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_in_its_place(strategy):
    assert list(unsaved_state(strategy)) == []


def test_another_name_of_a_saved_state_is_none():
    strategy = Own()
    strategy._same = strategy.memory
    assert list(unsaved_state(strategy)) == []
