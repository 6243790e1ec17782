"""Every rule, in one list, with its slow reference: each law test runs over all of it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import gradlane as gl

from ..reference import aggregate as slow


@dataclass(frozen=True)
class Known:
    rule: gl.Rule
    world: int
    wrong: int
    """How many wrong ranks it is told to stand."""
    reference: Callable[[torch.Tensor], torch.Tensor]


RULES = {
    "median": Known(gl.Median(), 5, 2, slow.median),
    "median of an even number": Known(gl.Median(), 8, 3, slow.median),
    "trimmed mean": Known(gl.TrimmedMean(2), 7, 2, lambda rows: slow.trimmed_mean(rows, 2)),
    "trimmed by nothing": Known(gl.TrimmedMean(0), 4, 0, lambda rows: rows.mean(0)),
    "near median": Known(gl.NearMedian(3), 6, 2, lambda rows: slow.near_median(rows, 3)),
    "krum": Known(gl.Krum(1), 5, 1, lambda rows: slow.krum(rows, 1)),
    "multi-krum": Known(gl.MultiKrum(1), 4, 1, lambda rows: slow.multi_krum(rows, 1)),
    "multi-krum of two": Known(gl.MultiKrum(2, m=2), 7, 2, lambda rows: slow.multi_krum(rows, 2, 2)),
    "bulyan": Known(gl.Bulyan(1), 8, 1, lambda rows: slow.bulyan(rows, 1)),
    "geometric median": Known(gl.GeometricMedian(1000), 7, 3, slow.geometric_median),
    "centered clipping": Known(gl.CenteredClipping(), 7, 2, slow.centered_clipping),
    "clipping to a length": Known(
        gl.CenteredClipping(3.0, 5), 6, 1, lambda rows: slow.centered_clipping(rows, 3.0, 5)
    ),
    "adasum": Known(gl.AdaSum(), 5, 0, slow.adasum),
    "mixed, then trimmed": Known(
        gl.NNM(2, then=gl.TrimmedMean(2)), 6, 2, lambda rows: slow.trimmed_mean(slow.mixed(rows, 2), 2)
    ),
    "mixed, then median": Known(
        gl.NNM(3, then=gl.Median()), 8, 3, lambda rows: slow.median(slow.mixed(rows, 3))
    ),
    "mixed, then krum": Known(
        gl.NNM(3, then=gl.Krum(3)), 9, 3, lambda rows: slow.krum(slow.mixed(rows, 3), 3)
    ),
    "mixed, then bulyan": Known(
        gl.NNM(1, then=gl.Bulyan(1)), 8, 1, lambda rows: slow.bulyan(slow.mixed(rows, 1), 1)
    ),
}
ROBUST = [name for name, known in RULES.items() if known.wrong]
BY_ELEMENT = [name for name, known in RULES.items() if isinstance(known.rule, gl.RowRule)]
CERTAIN = [name for name in RULES if name != "mixed, then bulyan"]
"""Those with one answer. Mixing makes pairs of rows that are equally close, up to rounding, to a rule that
chooses; where few are left to choose from that is the usual case."""
ORDERLY = [name for name in CERTAIN if name != "adasum"]
"""Those to which the order of ranks is all the same."""
