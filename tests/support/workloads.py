"""Models for ``gradlane bench --model tests.support.workloads:NAME``."""

import torch
from torch import nn


def tiny():
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4)), torch.randn(4, 32)


class WithLoss(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs).square().mean()


def with_loss():
    return WithLoss(32, 4), torch.randn(4, 32)


def million():
    return nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]), torch.randn(2, 512)


def raises():
    raise RuntimeError("no such data set")


def only_a_model():
    return nn.Linear(2, 2)


def wrong_batch():
    return nn.Linear(2, 2), torch.randn(4, 3)


def frozen():
    return nn.Linear(2, 2).requires_grad_(False), torch.randn(4, 2)
