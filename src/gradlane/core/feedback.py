"""What error feedback asks of the strategy inside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Feedback:
    """Error feedback is p = gradient + residual; send C(p); residual_out = p - C(p).

    A strategy that ``fuses_feedback`` gets both residuals, and computes all of this in the pass that
    computes C. Any other strategy receives p as its gradient: it is asked only for ``Reduced.sent``, which is
    C(p), and the wrapper does the subtraction.
    """

    residual: Tensor | None = None
    """This rank's residual, flat like the gradient. Only a strategy that ``fuses_feedback`` gets it."""
    residual_out: Tensor | None = None
    """Output buffer for the new residual; its old contents are ignored. It may be ``residual`` itself."""
    want_sent: bool = False
    """The wrapper calls ``Reduced.sent``: keep a copy of what you sent if the wire overwrites it."""
