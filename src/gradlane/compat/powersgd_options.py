"""Limits of the options of ``PowerSGDState``; torch takes most of these values, and fails later."""

import math
from collections.abc import Mapping
from typing import Any

from ..core.numbers import is_number, is_whole
from ..errors import InvalidValue


def check_options(options: Mapping[str, Any]) -> None:
    for name, least in (
        ("matrix_approximation_rank", 1),
        ("start_powerSGD_iter", 0),
        ("random_seed", 0),
        ("compression_stats_logging_frequency", None),
    ):
        value = options[name]
        if not is_whole(value) or (least is not None and value < least):
            limit = "" if least is None else f" from {least} up"
            raise InvalidValue(f"{name}={value!r}; use a whole number{limit}")
    for name in ("min_compression_rate", "orthogonalization_epsilon"):
        value = options[name]
        if not is_number(value) or not 0 <= value < math.inf:
            raise InvalidValue(f"{name}={value!r}; use a number from 0 up")
    start = options["start_powerSGD_iter"]
    if start <= 1 and (options["use_error_feedback"] or options["warm_start"]):
        raise InvalidValue(
            f"start_powerSGD_iter={start} with use_error_feedback or warm_start; use 2 or more, as in torch, "
            "or gradlane.attach(ddp, ErrorFeedback(PowerSGD(rank))), which compresses from the first step on"
        )
