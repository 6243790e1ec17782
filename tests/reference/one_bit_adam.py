"""1-bit Adam (Tang et al., 2021) by the formulas of its algorithm 1: n ranks in one place, in fp64.

With AdamW's decay. The server compresses too if ``shards`` says which rank is the server of which part.
"""

import torch


def compressed(x, block):
    """The signs of each block times its mean magnitude, in bfloat16 as ``Sign`` sends it."""
    parts = []
    for part in x.split(block):
        scale = part.abs().mean().to(torch.bfloat16).double()
        parts.append(torch.where(part < 0, -scale, scale))
    return torch.cat(parts)


def one_bit_adam(gradient, theta, *, ranks, steps, warmup, lr, betas, eps, decay, block, shards=None):
    """The weights after each step; ``gradient(rank, step, theta)`` is what a rank computes."""
    theta, (b1, b2) = theta.double().clone(), betas
    m, v = torch.zeros_like(theta), torch.zeros_like(theta)
    errors = [torch.zeros_like(theta) for _ in range(ranks)]
    server = torch.zeros_like(theta)
    seen = []
    for t in range(1, steps + 1):
        g = [gradient(rank, t - 1, theta).double() for rank in range(ranks)]
        theta = theta * (1 - lr * decay)
        if t <= warmup:
            mean = sum(g) / ranks
            m, v = b1 * m + (1 - b1) * mean, b2 * v + (1 - b2) * mean**2
            theta = theta - lr * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + eps)
            if t == warmup:
                m, v = m / (1 - b1**t), v / (1 - b2**t)
                v[v == 0] = torch.inf  # never had a gradient: does not move
        else:
            sent = []
            for rank in range(ranks):
                p = b1 * m + (1 - b1) * g[rank] + errors[rank]
                c = compressed_by(rank, p, block, shards)
                errors[rank] = p - c
                sent.append(c)
            total = sum(sent) / ranks
            if shards is not None:
                p = total + server
                total = torch.cat([compressed(p[part], block) for part in shards if p[part].numel()])
                server = p - total
            m = total
            theta = theta - lr * m / (v.sqrt() + eps)
        seen.append(theta.clone())
    return seen


def compressed_by(rank, p, block, shards):
    """What the others see of it. A rank that combines a shard itself has its own part of that as it is."""
    if shards is None:
        return compressed(p, block)
    parts = [p[part] if owner == rank else compressed(p[part], block) for owner, part in enumerate(shards)
             if p[part].numel()]  # fmt: skip
    return torch.cat(parts)
