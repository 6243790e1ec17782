"""Clipping whole contributions, slow and obvious, in fp64."""

import torch


def clipped_sum(gradients, clip):
    """The sum over workers of what each gives without noise, by name."""
    total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in gradients[0].items()}
    for own in gradients:
        norm = sum(value.double().square().sum() for value in own.values()).sqrt()
        if not torch.isfinite(norm):
            continue
        for name, value in own.items():
            total[name] += value.double() * min(1.0, clip / max(norm.item(), 1e-300))
    return total
