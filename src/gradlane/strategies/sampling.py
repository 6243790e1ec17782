"""A few elements of a large tensor, from which a figure for the metrics is estimated."""

from __future__ import annotations

from torch import Tensor

SAMPLE = 8_192  # elements, at least
RUN = 16  # of them side by side


def sample_of(flat: Tensor, step: int = 0) -> Tensor:
    """Evenly spaced runs of elements, or all of them where there are few.

    All elements would cost a pass over memory, and single ones a cache line each. Every step takes other
    runs, so in time all elements are seen.
    """
    numel = flat.numel()
    if numel <= SAMPLE:
        return flat
    apart = numel // (SAMPLE // RUN)
    rows = numel // apart
    first = step % 2 * (numel - rows * apart)  # or the last elements would never be seen
    start = min(step // 2 % -(-apart // RUN) * RUN, apart - RUN)
    return flat[first : first + rows * apart].view(rows, apart)[:, start : start + RUN]
