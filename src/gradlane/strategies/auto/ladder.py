"""The strategies among which a machine may choose, by what they lose of a step's gradient."""

from __future__ import annotations

OFF = "Mean()"
"""The plain mean: what DDP does without a strategy."""

LADDER = {
    OFF: "exact",
    "Cast(Mean(), bfloat16)": "bf16",
    "Sharded(Int8())": "int8",
    "ErrorFeedback(Sharded(Int4()))": "int4",
    "ErrorFeedback(PowerSGD(4))": "lossy",
    "ErrorFeedback(AcpSGD(4))": "lossy",
    "ErrorFeedback(Gathered(TopK(0.01)))": "lossy",
}
"""From nothing to nearly all, which error feedback sends later. The most exact comes first."""

ACROSS_NODES = {
    "Hierarchical(Mean())": "exact",
    "Hierarchical(Sharded(Int8()))": "int8",
    "Hierarchical(ErrorFeedback(Sharded(Int4())))": "int4",
}
"""For nodes of several ranks behind one link: reduce inside the node first."""

LOSSES = tuple(dict.fromkeys(LADDER.values()))


def ladder(per_node: int = 1) -> tuple[str, ...]:
    """The strategies to compare, for nodes of so many ranks."""
    return (*LADDER, *(ACROSS_NODES if per_node > 1 else ()))


def loss_class(text: str) -> str:
    return {**LADDER, **ACROSS_NODES}.get(text, "own")


def up_to(at_most: str) -> list[str]:
    """The strategies that lose this much at most, the most exact first. ``Hierarchical(ErrorFeedback(...))``
    is not among them: its residual is in parts of nodes, and no other strategy could send it."""
    last = LOSSES.index(at_most)
    ladder = {**LADDER, **{text: loss for text, loss in ACROSS_NODES.items() if "Feedback" not in text}}
    return sorted(
        (text for text, loss in ladder.items() if LOSSES.index(loss) <= last),
        key=lambda text: LOSSES.index(ladder[text]),
    )
