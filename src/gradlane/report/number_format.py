"""Numbers as text, for pages and tables; None is a dash."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone

DASH = "\u2013"
TIMES = "\u00d7"
MINUS = "\u2212"


def plain(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits, without an exponent in the usual range."""
    if value is None:
        return DASH
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if not -6 <= size < 15:
        return f"{value:.{digits - 1}e}".replace("-", MINUS)
    return f"{value:.{max(0, digits - 1 - size)}f}".replace("-", MINUS)


def scaled(value: float | None, units: tuple[str, ...], digits: int = 3) -> str:
    """In the largest unit that keeps the number at 1 or more; a unit is a thousand of the one before."""
    if value is None:
        return DASH
    at = 0
    while at + 1 < len(units) and abs(float(f"{value:.{digits - 1}e}")) >= 1000:
        value, at = value / 1000, at + 1
    return f"{plain(value, digits)}\u00a0{units[at]}"


def byte_size(value: float | None, digits: int = 3) -> str:
    if value is not None and abs(value) < 1000:
        return f"{value:.0f}\u00a0B"
    return scaled(value, ("B", "kB", "MB", "GB", "TB"), digits)


def duration(seconds: float | None, digits: int = 3) -> str:
    """With the unit that fits it: for a single figure. In a column use ``seconds_column``."""
    if seconds is None:
        return DASH
    if abs(seconds) < 1:
        return scaled(seconds * 1e6, ("\u00b5s", "ms", "s"), digits)
    return f"{plain(seconds, digits)}\u00a0s"


def bit_rate(bits: float, digits: int = 1) -> str:
    return scaled(bits, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"), digits)


def times(value: float | None) -> str:
    """A factor, with two decimals below 10."""
    if value is None:
        return DASH
    return f"{value:.2f}\u00a0{TIMES}" if abs(value) < 10 else f"{plain(value)}\u00a0{TIMES}"


def share(value: float | None) -> str:
    return DASH if value is None else f"{100 * value:.0f}\u00a0%"


def signed(value: float | None, around: float | None = None) -> str:
    """A difference with its sign, and the half width of its interval if there is one."""
    if value is None:
        return DASH
    text = f"{value:+.3f}".replace("-", MINUS)
    return text if around is None else f"{text} \u00b1 {around:.3f}"


def seconds_column(values: Iterable[float | None]) -> tuple[str, list[str]]:
    """One unit and one number of decimals for a column, so that its rows can be compared."""
    values = list(values)
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    unit, factor = ("s", 1.0) if largest >= 1 else ("ms", 1e3)
    decimals = 1 if largest * factor >= 100 else 2 if largest * factor >= 10 else 3
    return unit, [DASH if value is None else f"{value * factor:.{decimals}f}" for value in values]


def moment(text: str) -> str:
    """An ISO time in UTC as ``2026-11-15 23:10 UTC``; any other text unchanged."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return text or DASH
    if at.tzinfo is None:
        return at.strftime("%Y-%m-%d %H:%M")
    return at.astimezone(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def setting(value: object) -> str:
    """A value of a JSON document as text: lists with commas, yes and no, a dash for null."""
    if value is None or value == "" or value == []:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, list):
        return ", ".join(setting(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {setting(item)}" for key, item in value.items())
    return str(value)
