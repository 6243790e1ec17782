"""Counting the tokens behind a gradient, so that uneven ranks and micro-batches make an exact mean."""

from __future__ import annotations

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import InvalidValue, WrongType


class Counted(NamedTuple):
    """The gradient of a step is the sum over ``tokens`` tokens, divided by ``unit``."""

    tokens: float
    unit: float


class TokenCount:
    """The tokens (or samples) behind this rank's gradient, over all micro-batches of a step.

    Give it to ``WeightedMean`` as the weight, and call ``mean_of`` for every micro-batch::

        tokens = gl.TokenCount()
        gl.attach(model, gl.WeightedMean(tokens))
        ...
        loss = tokens.mean_of(loss_sum, count)  # loss_sum: of all tokens, cross_entropy(reduction="sum")
        loss.backward()

    The answer is then the gradient of the sum of all tokens' losses divided by the number of all tokens, over
    all ranks and all micro-batches since the last synchronised backward, however uneven they are. A rank
    without tokens takes part with a loss of 0. One count belongs to one attachment.
    """

    for_one_model: ClassVar[bool] = True
    lasts: ClassVar[bool] = True
    """It counts the current step, and keeps nothing of a model's past."""

    def __init__(self) -> None:
        self._count = 0.0
        self._unit = 0.0  # the first count of the step: gradients stay as large as those of a mean

    @property
    def count(self) -> float:
        """Tokens since the last step."""
        return self._count

    def mean_of(self, loss_sum: Tensor, count: float | Tensor) -> Tensor:
        """The loss to call ``backward`` on: ``loss_sum`` divided by the step's first count.

        In a step of one micro-batch that is its mean. Without gradients (``torch.no_grad``) it is the
        mean too, and nothing is counted.
        """
        tokens = _checked(count)
        if not tokens:
            return loss_sum * 0.0  # without tokens there is no gradient
        if not torch.is_grad_enabled():
            return loss_sum / tokens
        self._unit = self._unit or tokens
        self._count += tokens
        return loss_sum / self._unit

    def take(self) -> Counted:
        """The count, which then restarts at 0. ``WeightedMean`` calls it once per step."""
        counted = Counted(self._count, self._unit or 1.0)
        self.reset()
        return counted

    def reset(self) -> None:
        """Restart at 0, for gradients that were computed and thrown away."""
        self._count = self._unit = 0.0


def _checked(count: object) -> float:
    try:
        tokens = float(count)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise WrongType(f"count is a {type(count).__name__}; give the number of tokens") from None
    if not (math.isfinite(tokens) and tokens >= 0):
        raise InvalidValue(f"count={tokens:g} is not possible; it must be finite and at least 0")
    return tokens
