"""torch's hooks under their own names, for ``ddp.register_comm_hook(state, hook)``.

Replace ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``, ``quantization_hooks`` or
``powerSGD_hook`` by this module; names, argument order and defaults are the same. It translates to
strategies and lanes, it implements nothing.

A process group of None means the default group, as in torch, because a bare hook cannot know the
model's own: for DDP on a subgroup pass that group, or use ``gradlane.attach``.
"""

from .default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, noop_hook
from .feeds import close_all as close_all  # for ``gradlane.shutdown``
from .powersgd import batched_powerSGD_hook, powerSGD_hook
from .powersgd_state import PowerSGDState
from .quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from .wrappers import bf16_compress_wrapper, fp16_compress_wrapper

__all__ = [
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
