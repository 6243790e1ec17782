"""Spans for torch.profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

from ..torch_internals import profiler_runs

_nothing = nullcontext()


def span(what: str) -> AbstractContextManager[object]:
    """``gradlane: what`` in a torch.profiler trace; one check of a flag if no profiler runs.

    torch profiles the thread that started it and backward's. Spans of the lane's own thread show with
    ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
    """
    if not profiler_runs():
        return _nothing
    return profiler.record_function(f"gradlane: {what}")
