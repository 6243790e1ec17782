"""How much a budget leaves behind, by what it expects beyond the rank it has seen.

The byte model is trained with PowerSGD(4) and feedback, SGD, one rank with the mean gradient of four. In some
steps the true spectra are computed; ranks are shared out by the first four singular values and a
guess at the rest, and scored by the true ones: python benchmarks/spectrum_tail.py
"""

import torch

import gradlane as gl
from gradlane.strategies.lowrank.knapsack import Item, ranks_within
from gradlane.train.tasks import TASKS
from gradlane.train.train_rank import share_of_rate

SEEN, RANKS, RATE = 4, 32, 2
LOOKS = (60, 90, 120)
TAILS = {
    "1 / k": lambda seen, k: seen[-1] * SEEN / k,
    "flat": lambda seen, k: seen[-1],
    "geometric": lambda seen, k: seen[-1] * (seen[-1] / seen[0]) ** ((k - SEEN) / (SEEN - 1)),
}


def left_behind(matrices):
    """The share of all energy beyond the ranks, for each way to choose them."""
    energies = [(torch.linalg.svdvals(m.double()) ** 2).tolist() for m in matrices]
    costs = [sum(m.shape) for m in matrices]
    mosts = [
        max(r for r in range(1, RANKS + 1) if r * c * RATE < m.numel())
        for m, c in zip(matrices, costs, strict=True)
    ]
    room = SEEN * sum(costs)

    def shared_out(gains):
        items = [
            Item(cost, gains(energy, most)) for cost, energy, most in zip(costs, energies, mosts, strict=True)
        ]
        return ranks_within(items, room)

    chosen = {"equal": [SEEN] * len(matrices), "all known": shared_out(lambda e, most: e[:most])}
    for name, tail in TAILS.items():
        chosen[name] = shared_out(
            lambda e, most, tail=tail: e[:SEEN] + [tail(e[:SEEN], k) for k in range(SEEN + 1, most + 1)]
        )
    total = sum(map(sum, energies))
    return {
        name: 1 - sum(sum(e[:r]) for e, r in zip(energies, ranks, strict=True)) / total
        for name, ranks in chosen.items()
    }


def main():
    torch.set_num_threads(1)
    task = TASKS["bytes"]()
    model = task.start(0)
    named = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ranks = gl.Simulation(gl.After(20, gl.ErrorFeedback(gl.PowerSGD(SEEN))), world=1)
    for step in range(max(LOOKS) + 1):
        optimizer.param_groups[0]["lr"] = 0.1 * share_of_rate(step, 600)
        batches = [task.batch(8, 0, rank, step) for rank in range(4)]
        model.zero_grad()
        model(*(torch.cat(parts) for parts in zip(*batches, strict=True))).backward()
        gradients = {name: p.grad.clone() for name, p in named.items()}
        if step in LOOKS:
            residual = ranks.strategies[0].then.memory.state_dict()
            found = left_behind([g + residual[name] for name, g in gradients.items() if g.dim() > 1])
            print(step, ", ".join(f"{name} {share:.1%}" for name, share in found.items()))
        for name, answer in ranks.step([gradients])[0].items():
            named[name].grad = answer
        optimizer.step()


if __name__ == "__main__":
    main()
