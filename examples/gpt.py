"""A small GPT learns Python's standard library byte by byte, on any number of ranks, and can be stopped:

torchrun --nproc-per-node 2 examples/gpt.py --steps 200 --checkpoint /tmp/gpt
torchrun --nproc-per-node 2 examples/gpt.py --steps 400 --checkpoint /tmp/gpt   # goes on at step 200
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl

CONTEXT, WIDTH, LAYERS, BATCH = 64, 128, 4, 8


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, rows: Tensor) -> Tensor:
        """The mean loss of predicting each byte from those before it, in bits."""
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = self.bytes(rows[:, :-1]) + self.places.weight
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)


def library() -> Tensor:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def batch(text: Tensor, step: int) -> Tensor:
    """Other rows on each rank and in each step, the same ones after a restart."""
    seed = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=seed)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def train(strategy: str, steps: int, folder: Path | None) -> None:
    torch.manual_seed(0)
    text, model = library(), DistributedDataParallel(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gl.attach(model, strategy) as attachment:
        if folder is not None and (folder / "weights.pt").exists():
            saved = torch.load(folder / "weights.pt", weights_only=True)
            model.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            attachment.load(folder / "gradlane")  # residuals, and the number of the next step
        for step in range(attachment.step, steps):
            loss = model(batch(text, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and (step % 50 == 0 or step == steps - 1):
                print(f"step {step}: loss {loss.item():.3f} bits per byte", flush=True)
        if folder is not None:
            if dist.get_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, folder / "weights.pt")
            attachment.save(folder / "gradlane")  # all ranks; the others wait for rank 0 here
        metrics = attachment.metrics()
    if dist.get_rank() == 0:
        print(f"{metrics['comm/bytes_wire']:,.0f} bytes sent by each rank, ratio {metrics['comm/ratio']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategy", default="ErrorFeedback(Sharded(Int4()))")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to, and to go on from")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.strategy, options.steps, options.checkpoint)
    gl.shutdown()


if __name__ == "__main__":
    main()
