"""A debt of another width than the gradient's: added to it, and left again, without a wide copy of it.

Error feedback may keep what is owed in bfloat16, where a full copy of the gradients does not fit. It is
widened and rounded in small runs. Compiled kernels do the work for fp32 gradients on the CPU, plain torch
elsewhere; on meta tensors nothing is done.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidValue
from .finite import all_finite
from .native import native_for
from .plain_products import at_line
from .products import check_factors

RUN = 131_072  # elements that plain torch works on at once


def add_debt(flat: Tensor, owed: Tensor) -> None:
    """``flat += owed``, in the width of ``flat``."""
    if flat.shape != owed.shape or not flat.is_contiguous() or not owed.is_contiguous():
        raise InvalidValue(
            f"a debt of {tuple(owed.shape)} cannot be added to a gradient of {tuple(flat.shape)}; both must "
            "be contiguous and of one shape"
        )
    if flat.is_meta:
        return
    kernels = native_for(flat)
    if kernels and (flat.dtype, owed.dtype) == (torch.float32, torch.bfloat16):
        kernels.add_debt(flat, owed)
        return
    for start in range(0, flat.numel(), RUN):
        flat.view(-1)[start : start + RUN] += owed.view(-1)[start : start + RUN]


def leave_debt(m: Tensor, p: Tensor, q: Tensor, owed: Tensor, left: Tensor) -> None:
    """``left = m - p^T q``, rounded once to its width; ``left`` may be ``owed`` itself.

    What was owed stays where that is not finite, or too large for the width.
    """
    check_factors(m, p, q)
    for name, debt in (("owed", owed), ("left", left)):
        if debt.shape != m.shape or debt.dtype != owed.dtype or not debt.is_contiguous():
            raise InvalidValue(
                f"{name} is {debt.dtype} {tuple(debt.shape)}, its matrix {tuple(m.shape)}; owed and left "
                "must be contiguous, of that shape and of one dtype"
            )
    if m.is_meta:
        return
    kernels = native_for(m)
    if kernels and (m.dtype, owed.dtype) == (torch.float32, torch.bfloat16):
        kernels.leave_debt(m, p, q, owed, left)
        return
    step, q = max(1, RUN // max(1, m.shape[1])), at_line(q)
    for start in range(0, len(m), step):
        rows = slice(start, start + step)
        narrow = torch.addmm(m[rows], at_line(p[:, rows]).t(), q, alpha=-1).to(owed.dtype)
        if not all_finite(narrow):
            narrow = torch.where(narrow.isfinite(), narrow, owed[rows])
        left[rows] = narrow
