"""How an error leaves backward with its own type while DDP stays whole.

DDP turns an exception of a hook, or of its future, into one of its own and is unusable afterwards.
So the lane completes its futures whatever happens, and the error is raised by autograd's final
callbacks, after DDP's own has finished its book-keeping for the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ..lane.base import Lane
from ..lane.profiling import span
from ..torch_internals import call_after_backward


def settle_after_backward(
    lane: Lane,
    whole: Callable[[], bool],
    ended: Callable[[float, float], BaseException | None],
    hopeless: Callable[[BaseException], bool],
) -> None:
    """At the end of this backward: wait for the lane, then raise what ``ended`` says went wrong.

    Not before the step is ``whole``: a reentrant checkpoint ends a backward of its own in the middle,
    and an error there would leave DDP in half a step. ``ended`` is told
    when backward had computed all, and when the lane was done. Where it is ``hopeless`` that DDP comes to its
    end, the error does not wait for that.
    """

    def wait() -> None:
        if not whole():
            return
        computed = time.perf_counter()
        with span("wait for the lane"):
            lane.drain()
        failure = ended(computed, time.perf_counter())
        if failure is not None and hopeless(failure):
            raise failure
        if failure is not None:
            # This callback was queued by the hook, before DDP's own. One queued now comes after it.
            call_after_backward(partial(_raise, failure))

    call_after_backward(wait)


def _raise(failure: BaseException) -> None:
    raise failure
