"""Options are listed once, and refused by name."""

import inspect

import pytest

import gradlane as gl
from gradlane.settings import ScaledOptions, settings_of


def options_of(function):
    return {
        name: p.default
        for name, p in inspect.signature(function).parameters.items()
        if p.kind is p.KEYWORD_ONLY
    }


def test_attach_has_what_all_others_take():
    """The others have ``**options``; the defaults are those of ``settings_of``."""
    of_settings = inspect.signature(settings_of).parameters
    named = {name: p.default for name, p in of_settings.items() if p.kind is not p.VAR_KEYWORD}
    assert options_of(gl.attach) == named
    assert set(named) == set(ScaledOptions.__annotations__)


def test_an_option_that_is_not_there_is_named():
    with pytest.raises(gl.WrongType, match="there is no option 'obsever'; use observer, timeout"):
        settings_of(obsever=None)
