"""Grids of parameters of which the quick suite runs a part."""

import itertools

import pytest


def grid(*axes, quick):
    """Every combination of the axes; those that are not in ``quick`` belong to `make test-all`.

    ``quick`` has each value of each axis at least once.
    """
    for number, axis in enumerate(axes):
        missing = [value for value in axis if value not in [case[number] for case in quick]]
        assert not missing, f"the quick suite lacks {missing}"
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in itertools.product(*axes)
    ]


def dealt(values, others):
    """The quick suite has each value with one of the others in turn; all pairs belong to `make test-all`."""
    values, others = list(values), list(others)
    return grid(values, others, quick=list(zip(values, itertools.cycle(others), strict=False)))


def every(number, values):
    """Every so many-th value is in the quick suite; the others belong to `make test-all`."""
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow if at % number else ()
        )
        for at, value in enumerate(values)
    ]
