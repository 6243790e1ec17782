"""torch's PowerSGD names with states that are quick to compress: shared by the tests of them."""

import torch
from torch.nn.parallel import DistributedDataParallel

from gradlane import compat

from .training import build, data, flat, replicas_equal

SMALL = {"bucket_cap_mb": 0.004}  # about one layer a bucket
HOOKS = {
    "powerSGD": compat.powerSGD_hook,
    "batched": compat.batched_powerSGD_hook,
    "fp16(powerSGD)": compat.fp16_compress_wrapper(compat.powerSGD_hook),
    "bf16(batched)": compat.bf16_compress_wrapper(compat.batched_powerSGD_hook),
}


def soon(**options):
    return compat.PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **options})


def hooked(state, hook, module=None, **ddp_options):
    ddp = DistributedDataParallel(build() if module is None else module, **(ddp_options or SMALL))
    ddp.register_comm_hook(state, hook)
    return ddp


def stepping(ddp, rank, steps, lr=0.05, make=data):
    """Train; whether the replicas were bit-equal after every step."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    equal = True
    for step in steps:
        optimizer.zero_grad()
        ddp(make(rank, step)).backward()
        optimizer.step()
        equal &= replicas_equal(ddp.parameters())
    return equal


def gradient(ddp):
    return flat([p.grad for p in ddp.parameters() if p.requires_grad])


def finite(state):
    kept = [*state.error_dict.values(), *state.q_memory_dict.values()]
    return bool(kept) and all(bool(tensor.isfinite().all()) for tensor in kept)
