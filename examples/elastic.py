"""Training that survives its workers: torchrun restarts them, and they continue from the last checkpoint.

torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --folder /tmp/elastic

Kill a worker while it runs (kill -9), or start it again with another number of workers.
"""

import argparse
import os
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl

BATCH = 64  # samples of a step, over all workers


def batch(step: int) -> torch.Tensor:
    """This worker's share of a step's samples: which they are depends on the step alone."""
    samples = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step))
    return samples[dist.get_rank() :: dist.get_world_size()]


def save(folder: Path, step: int, model, optimizer, attachment: gl.Attachment) -> None:
    """A checkpoint counts when it is complete: its name is written last, atomically."""
    checkpoint = folder / f"step-{step}"
    if dist.get_rank() == 0:
        checkpoint.mkdir(parents=True, exist_ok=True)
        weights = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(weights, checkpoint / "model.pt")
    attachment.save(checkpoint / "strategy")  # the residual of every worker; returns when all have written
    if dist.get_rank() == 0:
        new = folder / "latest.new"
        new.write_text(str(step))
        os.replace(new, folder / "latest")


def load(folder: Path, model, optimizer, attachment: gl.Attachment) -> int:
    """The step to continue with: 0 without a checkpoint."""
    if not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    checkpoint = folder / f"step-{step}"
    saved = torch.load(checkpoint / "model.pt", weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    attachment.load(checkpoint / "strategy")  # with any number of workers
    return step


def train(folder: Path, strategy: str, steps: int, every: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attachment = gl.attach(model, strategy)
    start = load(folder, model, optimizer, attachment)
    chief = dist.get_rank() == 0
    if chief:
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        print(f"attempt {attempt}: {dist.get_world_size()} workers from step {start}", flush=True)
    for step in range(start, steps):
        inputs = batch(step)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if chief and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
        if (step + 1) % every == 0:
            save(folder, step + 1, model, optimizer, attachment)
    if chief:
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        print(f"done: step {max(start, steps)}, weights {sha256(weights).hexdigest()[:16]}", flush=True)
    attachment.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints")
    parser.add_argument("--strategy", default="ErrorFeedback(Sharded(Int4()))")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--every", type=int, default=20, help="steps between two checkpoints")
    options = parser.parse_args()
    gl.init_elastic("gloo")  # instead of init_process_group
    train(options.folder, options.strategy, options.steps, options.every)
    gl.shutdown()


if __name__ == "__main__":
    main()
