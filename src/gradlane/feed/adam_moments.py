"""A second moment of torch's Adam that does not change any more, without another optimizer.

Adam divides by sqrt(v / (1 - beta2^t)), and multiplies v by beta2 in each step. With moments that are divided
by their bias corrections once, a ``step`` so large that 1 - beta2^t is 1, and a beta2 next to 1, the same
code computes theta -= lr m / (sqrt(v) + eps), and v keeps its bits.

That a group is frozen is written in the group itself, under ``MARK``: so it is in ``optimizer.state_dict()``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from ..errors import InvalidValue, WrongType

MARK = "frozen_moments"
BETA2 = 1 - 2**-50  # beta2 * v is v in fp32, and (1 - beta2) m^2 is lost beside v up to m = 8192 sqrt(v)
STEP = 1e18  # BETA2 ** STEP is 0
SECOND = ("exp_avg_sq", "max_exp_avg_sq")  # the latter is amsgrad's

Group = dict[str, Any]


def check_adam(optimizer: object) -> None:
    """Refuse what is not Adam, and modes of Adam in which the moments cannot be frozen."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Adam | AdamW):
        hint = "make it one of these, or send its gradients: ErrorFeedback(Sharded(Int4())), say"
        if isinstance(getattr(optimizer, "optimizer", None), Adam | AdamW):
            hint = f"pass the one inside of this {name}: optimizer.optimizer"
        raise WrongType(f"freeze_moments works with torch.optim.Adam and AdamW, got {name}; {hint}")
    for mode in ("capturable", "differentiable"):
        if any(group.get(mode) for group in optimizer.param_groups):
            raise InvalidValue(
                f"{name}({mode}=True) computes its bias corrections in fp32, where a frozen beta2 is 1 and "
                f"they would be 0; make the optimizer with {mode}=False"
            )


def check_decay(optimizer: Optimizer) -> None:
    """Refuse a decay that is added to the gradient, where the gradient is a momentum."""
    for number, group in enumerate(optimizer.param_groups):
        if group["weight_decay"] and not (
            isinstance(optimizer, AdamW) or group.get("decoupled_weight_decay")
        ):
            raise InvalidValue(
                f"group {number} of {type(optimizer).__name__} has weight_decay={group['weight_decay']}, "
                "which it adds to the gradient: momentum and second moment would not contain it any more; "
                "use AdamW, whose decay is apart from both, or weight_decay=0"
            )


def is_frozen(optimizer: Optimizer) -> bool:
    return any(MARK in group for group in optimizer.param_groups)


def is_moved(optimizer: Optimizer) -> bool:
    """Whether the momentum is computed elsewhere."""
    return any(group.get(MARK, {}).get("moved", False) for group in optimizer.param_groups)


def betas_of(group: Group) -> tuple[float, float]:
    """The betas that the user has chosen, also of a frozen group."""
    beta1, beta2 = group[MARK]["betas"] if MARK in group else group["betas"]
    return float(beta1), float(beta2)


@torch.no_grad()
def freeze(optimizer: Optimizer, *, move: bool) -> dict[Tensor, int]:
    """Freeze the second moments; with ``move`` the optimizer keeps no momentum of its own either.

    An element whose second moment is 0 has never had a gradient. What arrives for it is noise, and would be
    divided by eps: it gets an infinite second moment instead, and stays where it is. Returns the number of
    such elements for each parameter that has some.
    """
    for group in optimizer.param_groups:
        if MARK not in group:
            steps = [_freeze(optimizer, group, p) if p.requires_grad else 0.0 for p in group["params"]]
            group[MARK] = {"betas": list(betas_of(group)), "steps": steps, "moved": False}
        group[MARK]["moved"] |= move
        group["betas"] = (0.0 if group[MARK]["moved"] else betas_of(group)[0], BETA2)
    counts = {p: int(state["exp_avg_sq"].isinf().sum()) for _, p, state in moments(optimizer)}
    return {p: count for p, count in counts.items() if count}


def _freeze(optimizer: Optimizer, group: Group, p: Tensor) -> float:
    """Freeze one parameter; how many steps it has made."""
    state = optimizer.state[p]
    if not state:  # it would be made later, with the beta2 of a frozen group, and lr would be its step
        _make_state(state, group, p)
    steps = float(state["step"])
    beta1, beta2 = betas_of(group)
    if steps:
        state["exp_avg"].div_(1 - beta1**steps)
    for v in _second(state):
        if steps:
            v.div_(1 - beta2**steps)
        v.masked_fill_(v == 0, math.inf)
    state["step"].fill_(STEP)
    return steps


@torch.no_grad()
def thaw(optimizer: Optimizer, momentum_of: Callable[[Tensor], Tensor | None]) -> None:
    """Undo ``freeze``, with the momentum as it is now: Adam goes on as if no step had been between."""
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"] = betas_of(group)
        for p, steps in zip(group["params"], group.pop(MARK)["steps"], strict=True):
            if not p.requires_grad:
                continue
            state = optimizer.state[p]
            momentum = momentum_of(p)
            if momentum is not None:
                _real(state["exp_avg"]).copy_(-momentum if group["maximize"] else momentum)
            # Where no gradient has ever been, a compressed momentum is noise, and v is 0 again: lr m / eps.
            _real(state["exp_avg"]).masked_fill_(_real(state["exp_avg_sq"]).isinf(), 0.0)
            state["exp_avg"].mul_(1 - beta1**steps)
            for v in _second(state):
                v.masked_fill_(v.isinf(), 0.0).mul_(1 - beta2**steps)
            state["step"].fill_(steps)


def momentum(group: Group, state: dict[str, Any]) -> Tensor:
    """The momentum of a parameter in the sign of its gradient, complex numbers as pairs."""
    m = _real(state["exp_avg"])
    return -m if group["maximize"] else m


def moments(optimizer: Optimizer) -> Iterator[tuple[Group, Tensor, dict[str, Any]]]:
    """Every parameter that has moments: its group, itself and its state."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if state := optimizer.state.get(p):
                yield group, p, state


def frozen_states(optimizer: Optimizer) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Every parameter with frozen moments, and its state."""
    for group, p, state in moments(optimizer):
        if MARK in group:
            yield p, state


def unusable(optimizer: Optimizer) -> Iterator[tuple[Tensor, str]]:
    """The parameters whose second moment cannot be frozen, and why."""
    for group, p, state in moments(optimizer):
        correction = 1 - betas_of(group)[1] ** float(state["step"])
        for v in _second(state) if MARK not in group and p.numel() else ():
            largest = float(v.max())
            if not math.isfinite(largest):
                yield p, "is not finite; go back to a checkpoint"
            elif correction and largest / correction > torch.finfo(v.dtype).max:
                yield (
                    p,
                    f"is larger than {v.dtype} can hold without its bias correction; use float32 or bfloat16",
                )


def _second(state: dict[str, Any]) -> list[Tensor]:
    return [_real(state[key]) for key in SECOND if key in state]


def _make_state(state: dict[str, Any], group: Group, p: Tensor) -> None:
    """As Adam does before a parameter's first step."""
    wide = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
    state["step"] = (
        torch.zeros((), dtype=torch.float32, device=p.device)
        if group["fused"]
        else torch.tensor(0.0, dtype=wide)
    )
    for key in ("exp_avg", *SECOND[: 1 + group["amsgrad"]]):
        state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
