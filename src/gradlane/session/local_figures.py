"""The metrics of local training."""

from __future__ import annotations


def local_figures(
    comm: dict[str, float], local_steps: int, dense_bytes: float, gradient_bytes: float
) -> dict[str, float]:
    """``comm`` with the figures of ``LocalTraining.metrics``.

    ``dense_bytes``: what DDP sends in one step. ``gradient_bytes``: what was sent for gradients.
    """
    figures = dict(comm)
    update, last = figures.get("comm/update_norm", 0.0), figures.pop("comm/last_update_norm", 0.0)
    product = figures.pop("comm/step/update_product", 0.0)
    figures.pop("comm/update_product", None)
    sent = figures["comm/bytes_wire"] + gradient_bytes
    return figures | {
        "local/steps": float(local_steps),
        "local/rounds": figures["comm/steps"],
        "local/bytes_per_step": sent / max(1, local_steps),
        "local/ratio": dense_bytes * local_steps / sent if sent else 1.0,
        "local/drift": figures.get("comm/drift_norm", 0.0) / update if update else 0.0,
        "local/cosine": product / (update * last) if update and last else 0.0,
    }
