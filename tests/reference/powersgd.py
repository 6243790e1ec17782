"""PowerSGD and ACP-SGD for one matrix, dense and obvious, with all ranks at hand."""

import torch


def orthonormal(columns):
    """Gram-Schmidt, column by column."""
    done = []
    for column in columns.T:
        for _ in range(2):
            for other in done:
                column = column - other * (other @ column)
        done.append(column / column.norm())
    return torch.stack(done, dim=1)


class PlainPowerSGD:
    """Algorithms 1 and 2 of Vogels et al. (2019), every matrix in full.

    The residual of a rank is its matrix less P times its own Q (``subtracts="own"``), as ``gl.PowerSGD`` has
    it, or less the averaged answer (``"mean"``), as the paper and torch have it.
    """

    def __init__(self, q, world, subtracts="own", iterations=1):
        self.q, self.subtracts, self.iterations = q.T, subtracts, iterations
        self.errors = [torch.zeros(()) for _ in range(world)]

    def step(self, gradients):
        given = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        world = len(given)
        for _ in range(self.iterations):
            p = orthonormal(sum(m @ self.q for m in given) / world)
            own = [m.T @ p for m in given]
            self.q = sum(own) / world
        answer = p @ self.q.T
        taken = [p @ q.T for q in own] if self.subtracts == "own" else [answer] * world
        self.errors = [m - t for m, t in zip(given, taken, strict=True)]
        return answer


class PlainAcpSGD:
    """Zhang et al. (2023): in even steps P is sent, in odd ones Q."""

    def __init__(self, q, world):
        self.known, self.steps = orthonormal(q.T), 0
        self.errors = [torch.zeros(()) for _ in range(world)]

    def step(self, gradients):
        given = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        if self.steps % 2:
            given = [m.T for m in given]
        own = [m @ self.known for m in given]
        sent = sum(own) / len(own)
        answer = sent @ self.known.T
        self.errors = [m - s @ self.known.T for m, s in zip(given, own, strict=True)]
        if self.steps % 2:
            answer, self.errors = answer.T, [e.T for e in self.errors]
        self.known = orthonormal(sent)
        self.steps += 1
        return answer
