"""torch's hooks under their own names, for ``ddp.register_comm_hook(state, hook)``; its model averagers too.

Replace ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks``, ``quantization_hooks``,
``powerSGD_hook`` or ``post_localSGD_hook``, ``torch.distributed.algorithms.model_averaging`` and
``torch.distributed.optim.PostLocalSGDOptimizer`` by this module; names, argument order and defaults are
the same. It translates to strategies and lanes, it implements nothing.

A process group of None means the default group, as in torch, because a bare hook cannot know the
model's own: for DDP on a subgroup pass that group, or use ``gradlane.attach``.
"""

from .averagers import HierarchicalModelAverager, PeriodicModelAverager
from .default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, noop_hook
from .feeds import close_all as close_all  # for ``gradlane.shutdown``
from .post_local_optimizer import PostLocalSGDOptimizer
from .post_local_sgd import post_localSGD_hook
from .post_local_state import PostLocalSGDState
from .powersgd import batched_powerSGD_hook, powerSGD_hook
from .powersgd_state import PowerSGDState
from .quantization_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from .wrappers import bf16_compress_wrapper, fp16_compress_wrapper

__all__ = [
    "HierarchicalModelAverager",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PostLocalSGDState",
    "PowerSGDState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]
