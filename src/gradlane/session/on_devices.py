"""What a model on a device must not have: parameters elsewhere, and gradients that no backend there takes."""

from __future__ import annotations

import torch
from torch import nn

from ..core.streams import has_streams
from ..errors import InvalidValue
from ..feed.own_model_checks import sparse_names


def refuse_several_devices(model: nn.Module) -> None:
    """The lane has one stream, and futures that order one device."""
    devices = {str(p.device) for p in model.parameters() if p.requires_grad and not nn.parameter.is_lazy(p)}
    if len(devices) > 1:
        raise InvalidValue(
            f"the parameters are on {', '.join(sorted(devices))}, and a rank works on one device; give each "
            "rank one, or reduce each part of the model by itself: reduce_gradients(part, strategy)"
        )


def refuse_sparse_gradients(model: nn.Module, device: torch.device) -> None:
    if not has_streams(device):
        return
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if names := sparse_names(model, trained):
        raise InvalidValue(
            f"{names[0]} gets a sparse gradient (Embedding(sparse=True)), and NCCL and XCCL reduce dense "
            "tensors only; use Embedding(sparse=False)"
        )
