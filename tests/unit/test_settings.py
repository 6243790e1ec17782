"""Options are listed in one file, explained by ``attach``, and refused by name."""

import inspect

import pytest

import gradlane as gl
from gradlane.settings import ScaledOptions, Settings


def test_attach_explains_every_option():
    for name in ScaledOptions.__annotations__:
        assert f"        {name}: " in inspect.getsource(gl.attach)


def test_every_option_is_checked_and_has_a_default():
    assert list(vars(Settings())) == [
        "observers", "timeout", "ranks_per_node", "nonfinite", "verify_every", "scaler",
    ]  # fmt: skip
    assert len(ScaledOptions.__annotations__) == len(vars(Settings()))
    assert Settings() == Settings(nonfinite="skip")
    assert Settings() != Settings(timeout=3)


def test_an_option_that_is_not_there_is_named():
    with pytest.raises(gl.WrongType, match="there is no option 'obsever'; use observer, timeout"):
        Settings(obsever=None)
