"""torch's parts of post-local SGD and ours, and a training with either."""

import warnings

import torch
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as torchs_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from gradlane import compat

from .training import build, data, flat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch compiles scripts on import, and warns of that itself
    from torch.distributed.optim import PostLocalSGDOptimizer

SMALL = {"bucket_cap_mb": 0.004}


class Theirs:
    """The names of ``gradlane.compat``, from where torch has them."""

    PostLocalSGDState = torchs_hook.PostLocalSGDState
    post_localSGD_hook = staticmethod(torchs_hook.post_localSGD_hook)
    PeriodicModelAverager = PeriodicModelAverager
    HierarchicalModelAverager = HierarchicalModelAverager
    PostLocalSGDOptimizer = PostLocalSGDOptimizer


class Run:
    """A model in post-local SGD; ``library`` is ``compat`` or ``Theirs``."""

    def __init__(self, library, averager, *, start, subgroup=None, allreduce=True, lr=0.05, wrap=None):
        self.ddp = DistributedDataParallel(build(), **SMALL)
        self.state = library.PostLocalSGDState(None, subgroup, start, allreduce)
        hook = library.post_localSGD_hook
        self.ddp.register_comm_hook(self.state, hook if wrap is None else wrap(hook))
        local = torch.optim.SGD(self.ddp.parameters(), lr=lr, momentum=0.9)
        self.optimizer = library.PostLocalSGDOptimizer(local, averager)

    def steps(self, rank, steps):
        """Train; the weights after each step."""
        seen = []
        for step in steps:
            self.optimizer.zero_grad()
            self.ddp(data(rank, step)).backward()
            self.optimizer.step()
            seen.append(flat(self.ddp.parameters()))
        return seen

    def gradients(self, rank, step):
        """Those of one backward; no step is taken."""
        self.ddp.zero_grad()
        self.ddp(data(rank, step)).backward()
        return flat([p.grad for p in self.ddp.parameters() if p.requires_grad])

    def state_dict(self):
        return {
            "model": self.ddp.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "hook": self.state.state_dict(),
        }

    def load_state_dict(self, saved):
        self.ddp.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.state.load_state_dict(saved["hook"])


def periodic(**options):
    return compat.PeriodicModelAverager(**{"period": 2, "warmup_steps": 2, **options})


def gathered(own):
    """The tensors of all ranks."""
    everyone = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, own)
    return everyone


def all_equal(own):
    return all(torch.equal(own, other) for other in gathered(own))
