"""Training with some ranks that attack, in the simulator: which rules stand it.

    python -m tests.support.attacks benchmarks/results/DATE-attacks.jsonl

The attackers know what every honest rank sends. Digits of scikit-learn, a network of 6 k parameters, the same
data for all rules. Every rank sends its own momentum (Karimireddy et al., 2021), for steps of plain SGD:
the noise of single gradients would hide the attackers. "clean" is the plain mean of as many ranks, all
honest.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

import gradlane as gl
from gradlane.train.digits import DigitModel
from gradlane.train.tasks import Task, digits_task

STEPS, BATCH, RATE, MOMENTUM, WIDTH = 300, 64, 1.0, 0.9, 48
SEEDS = (0, 1, 2)
SETTINGS = ((4, 1), (10, 2), (10, 4))

Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""From the honest rows, and what the attackers would have sent themselves, to what they send.

Inner product: Xie et al., 2020, "Fall of empires". ALIE: Baruch et al., 2019, "A little is enough". Mimic:
Karimireddy et al., 2022, "Byzantine-robust learning on heterogeneous datasets via bucketing".
"""


def _gaussian(honest: Tensor, own: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(own.shape, generator=generator)  # far above any gradient here


ATTACKS: dict[str, Attack] = {
    "sign flip": lambda honest, own, generator: -own,
    "10x flip": lambda honest, own, generator: -10 * own,
    "inner product": lambda honest, own, generator: -0.5 * honest.mean(0).expand_as(own),
    "ALIE": lambda honest, own, generator: (honest.mean(0) - 1.5 * honest.std(0)).expand_as(own),
    "Gaussian": _gaussian,
    "label flip": lambda honest, own, generator: own,  # of labels 9 - y
    "mimic": lambda honest, own, generator: honest[:1].expand_as(own),
    "inf": lambda honest, own, generator: torch.full_like(own, torch.inf),
    "zero": lambda honest, own, generator: torch.zeros_like(own),
}
STRONG = ("10x flip", "Gaussian", "inf")
"""Those that no mean survives, whatever the share of attackers here."""


def arms(f: int) -> dict[str, gl.Strategy]:
    """By name: the plain mean, and what is to stand f attackers."""
    return {
        "mean": gl.Mean(),
        "trimmed mean": gl.Combined(gl.TrimmedMean(f)),
        "median": gl.Combined(gl.Median()),
        "multi-Krum": gl.Combined(gl.MultiKrum(f)),
        "NNM + trimmed mean": gl.Combined(gl.NNM(f, then=gl.TrimmedMean(f))),
    }


def judged_at(world: int, f: int) -> list[str]:
    """The arms of which something is asked: of all, up to a quarter of wrong ranks; then of the strongest."""
    return [arm for arm in arms(f) if 4 * f <= world or arm in ("mean", "NNM + trimmed mean")]


@lru_cache(maxsize=1)
def task() -> Task:
    return digits_task(128)


class Crew:
    """Ranks of one run: their data, and the gradients of all at once."""

    def __init__(self, world: int, f: int, attack: str | None, seed: int) -> None:
        self.world, self.f, self.attack, self.seed = world, f if attack else 0, attack, seed
        torch.manual_seed(seed)
        self.model = DigitModel(WIDTH)
        self.shapes = {name: p.shape for name, p in self.model.named_parameters()}
        self._chance = torch.Generator().manual_seed(1000 + seed)
        self._moving = torch.zeros(())  # the momentum of all ranks
        self._gradients = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return functional_call(self.model, weights, (inputs, targets))

    def sent(self, step: int) -> list[dict[str, Tensor]]:
        """What each rank sends; the attackers are the last."""
        batches = [task().batch(BATCH, self.seed, rank, step) for rank in range(self.world)]
        inputs, targets = (torch.stack(part) for part in zip(*batches, strict=True))
        if self.attack == "label flip":
            targets[self.world - self.f :] = 9 - targets[self.world - self.f :]
        found = self._gradients(
            {name: p.detach() for name, p in self.model.named_parameters()}, inputs, targets
        )
        rows = torch.cat([part.reshape(self.world, -1) for part in found.values()], dim=1)
        rows = self._moving = rows + MOMENTUM * (self._moving - rows) if step else rows
        if self.f:
            honest, own = rows[: -self.f], rows[-self.f :]
            rows = torch.cat([honest, ATTACKS[self.attack](honest, own, self._chance)])
        sizes = [shape.numel() for shape in self.shapes.values()]
        return [
            {
                name: part.view(self.shapes[name])
                for name, part in zip(self.shapes, row.split(sizes), strict=True)
            }
            for row in rows
        ]

    def accuracy(self) -> float:
        """In per cent of the images held out."""
        inputs, targets = task().held_out
        with torch.no_grad():
            return 100 * float((self.model.layers(inputs).argmax(1) == targets).float().mean())


def trained(
    strategy: gl.Strategy, world: int, f: int, attack: str | None, seed: int, steps: int = STEPS
) -> float:
    """The accuracy after a run in which the last f ranks attack."""
    crew = Crew(world, f, attack, seed)
    ranks = gl.Simulation(strategy, world=world)
    optimizer = torch.optim.SGD(crew.model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        answer = ranks.step(crew.sent(step))[0]
        for name, parameter in crew.model.named_parameters():
            parameter.grad = answer[name]
        optimizer.step()
        schedule.step()
    return crew.accuracy()


class Case(NamedTuple):
    world: int
    f: int
    arm: str
    attack: str | None
    seed: int

    def run(self) -> float:
        return trained(arms(self.f)[self.arm], self.world, self.f, self.attack, self.seed)


def cases(seeds: Sequence[int] = SEEDS) -> list[Case]:
    return [
        Case(world, f, arm, attack, seed)
        for world, f in SETTINGS
        for arm in judged_at(world, f)
        for attack in (None, *ATTACKS)
        for seed in seeds
    ]


def loss_of(
    found: Mapping[Case, float],
    world: int,
    f: int,
    arm: str,
    attack: str | None,
    seeds: Sequence[int] = SEEDS,
) -> float:
    """Points of accuracy below clean training, the mean over seeds."""
    pairs = [(Case(world, f, "mean", None, seed), Case(world, f, arm, attack, seed)) for seed in seeds]
    return statistics.mean(found[clean] - found[attacked] for clean, attacked in pairs)


def table(found: Mapping[Case, float], world: int, f: int, seeds: Sequence[int] = SEEDS) -> list[str]:
    clean = statistics.mean(found[Case(world, f, "mean", None, seed)] for seed in seeds)
    lines = [f"| n = {world}, f = {f}; clean {clean:.1f} % | nobody | " + " | ".join(ATTACKS) + " |"]
    lines.append("|---" * (len(ATTACKS) + 2) + "|")
    for arm in judged_at(world, f):
        losses = [loss_of(found, world, f, arm, attack, seeds) for attack in (None, *ATTACKS)]
        lines.append(f"| {arm} | " + " | ".join(f"{loss:.1f}" for loss in losses) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="a file of JSON lines; what it lacks is run and added")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop then; go on with the same command")
    parser.add_argument("--first-seed", type=int, default=SEEDS[0], help="of three")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + len(SEEDS))
    torch.set_num_threads(1)
    found: dict[Case, float] = {}
    if options.results.exists():
        rows = [json.loads(line) for line in options.results.read_text().splitlines()]
        found = {Case(**{name: row[name] for name in Case._fields}): row["accuracy"] for row in rows}
    end = time.monotonic() + 60 * options.minutes
    with options.results.open("a") as file:
        for case in cases(seeds):
            if case not in found and time.monotonic() < end:
                found[case] = case.run()
                file.write(json.dumps({**case._asdict(), "accuracy": round(found[case], 3)}) + "\n")
                file.flush()
    missing = len(set(cases(seeds)) - set(found))
    if missing:
        print(f"{missing} of {len(cases(seeds))} runs are missing; call it again")
    else:
        print(*("\n".join(table(found, *setting, seeds)) + "\n" for setting in SETTINGS), sep="\n")


if __name__ == "__main__":
    main()
