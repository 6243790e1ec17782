"""Rounds of local training, one parameter at a time: no buckets, no lane, all ranks in one loop."""

import copy

import torch


class Worker:
    """A rank: its own model and optimizer."""

    def __init__(self, model, make_optimizer):
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model.parameters())
        self.weights = dict(self.model.named_parameters())


def mean(deltas):
    return sum(delta.double() for delta in deltas).div(len(deltas)).float()


@torch.no_grad()
def _exchange(workers, anchor, names, outer):
    """The new anchor of some parameters."""
    return {
        name: anchor[name] - outer(name, mean([anchor[name] - w.weights[name] for w in workers]))
        for name in names
    }


def streamed(model, make_optimizer, world, loss, *, steps, every, fragments, delay, blend, outer):
    """Streaming DiLoCo (Douillard et al., 2025): fragment p is sent every ``every`` steps at its own offset,
    and arrives ``delay`` steps later. With one fragment and no delay this is DiLoCo, with the plain mean as
    outer step local SGD. ``fragments`` is a list of lists of names. Returns the anchor."""
    workers = [Worker(model, make_optimizer) for _ in range(world)]
    anchor = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    period, arriving = every // len(fragments), {}
    for step in range(1, steps + 1):
        for rank, worker in enumerate(workers):
            worker.optimizer.zero_grad()
            loss(worker.model, rank, step - 1).backward()
            worker.optimizer.step()
        if step % period == 0:
            names = fragments[step // period % len(fragments)]
            arriving[step + delay] = _exchange(workers, anchor, names, outer)
            anchor |= arriving[step + delay]
        for name, agreed in arriving.pop(step, {}).items():
            for worker in workers:
                with torch.no_grad():
                    own = worker.weights[name]
                    own.copy_(blend * own + (1 - blend) * agreed)
    return anchor
