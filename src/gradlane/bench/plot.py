"""Bars of a bench record, as SVG or PNG. Needs matplotlib: the extra ``plot``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InvalidValue

SUFFIXES = (".svg", ".png")


def check_plot(path: Path | None) -> None:
    """Refuse what cannot be drawn before anything starts."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidValue(f"--plot {path}: use a name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise InvalidValue("--plot needs matplotlib: pip install 'gradlane[plot]'") from None


def draw(record: dict[str, Any], path: Path) -> None:
    """The median step of every arm, a panel for each link and number of ranks."""
    from matplotlib.figure import Figure

    panels: dict[str, list[dict[str, Any]]] = {}
    for row in record["results"]:
        panels.setdefault(f"{row['link']}, {row['ranks']} ranks", []).append(row)
    arms = max(len(rows) for rows in panels.values())
    figure = Figure(figsize=(8, 0.8 + len(panels) * (0.7 + 0.32 * arms)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, rows) in zip(axes, panels.items(), strict=True):
        medians = [row["median_s"] or 0.0 for row in rows]
        bars = axis.barh([row["arm"] for row in rows], medians, color="#4477aa")
        axis.bar_label(bars, [_label(row) for row in rows], padding=4, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("median seconds of a step (speed-up over DDP without a hook)", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(0, 1.25 * max(medians, default=0.0) or 1.0)
    made = record["made"]
    model = record["settings"]["model"]
    figure.suptitle(
        f"{model}, torch {made['torch']}, gradlane {made['gradlane']}, {made['at'][:10]}", fontsize=9
    )
    figure.savefig(path, dpi=150)


def _label(row: dict[str, Any]) -> str:
    if row["median_s"] is None:
        return str(row["status"])
    speedup = "" if row["speedup"] is None else f" ({row['speedup']:.2f}x)"
    return f"{row['median_s']:.3f} s{speedup}"
