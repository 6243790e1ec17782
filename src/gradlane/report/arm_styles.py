"""One letter and one colour for each arm, the same on the whole page."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HUES = 6  # colours of the style sheet, chosen to differ for colour-blind readers too
NEUTRAL = {"ddp": "arm-base", "Noop()": "arm-idle"}  # the baseline and compute alone are grey


@dataclass(frozen=True)
class ArmStyle:
    """``style`` is a class of the style sheet. The letter distinguishes arms without colour."""

    name: str
    letter: str
    style: str


def assign(names: Iterable[str]) -> dict[str, ArmStyle]:
    """Styles in the order of first appearance. After ``HUES`` arms the colours repeat, with dashed lines."""
    arms: dict[str, ArmStyle] = {}
    hue = 0
    for name in dict.fromkeys(names):
        style = NEUTRAL.get(name)
        if style is None:
            style = f"arm-{hue % HUES}" + (" arm-again" if hue >= HUES else "")
            hue += 1
        arms[name] = ArmStyle(name, _letter(len(arms)), style)
    return arms


def _letter(at: int) -> str:
    rounds, letter = divmod(at, 26)
    return chr(ord("A") + letter) + (str(rounds + 1) if rounds else "")
