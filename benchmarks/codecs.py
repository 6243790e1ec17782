"""What codecs cost against a copy of the same gradient: encode, decode, decode and add, encode with feedback.

All arms work on the same buffers of 25 MB and take turns, so that whatever else the machine does hits them
alike; every figure is the median over the rounds of (this arm / the copies next to it). One thread.

    python benchmarks/codecs.py --json benchmarks/results/DATE-codecs.json
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import gradlane as gl
from gradlane.kernels.native import VARIABLE, kernels_in_use

CODECS = (gl.Raw(), gl.Int8(), gl.Int4(), gl.Int2(), gl.Sign(), gl.Fp8(), gl.Fp8(format="e5m2"), gl.Natural(),
          gl.Int8(rounding="stochastic"), gl.Int4(rotate=True), gl.TopK(), gl.TopK(value="bfloat16"),
          gl.RandomK(), gl.RandomK(run=64))  # fmt: skip
ACTS = ("encode", "decode", "decode+add", "encode+feedback")


def arms(codec: gl.Codec, x: torch.Tensor, owed: torch.Tensor, into: torch.Tensor) -> dict[str, Callable]:
    payload = codec.encode(x, 1)
    owed = owed.clone()  # what one codec owes must not become another's
    return {
        "encode": lambda: codec.encode(x, 1, out=payload),
        "decode": lambda: codec.decode(payload, into, 1),
        "decode+add": lambda: codec.add_decoded(payload, into, 1),
        "encode+feedback": lambda: codec.encode_owed(x, owed, 1, out=payload),
    }


def timed(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def measure(codec: gl.Codec, kernels: str, numel: int, rounds: int) -> dict[str, float]:
    os.environ[VARIABLE] = kernels
    x = torch.randn(numel)
    owed, into = torch.randn(numel) * 0.1, torch.zeros(numel)
    acts = arms(codec, x, owed, into)
    ratios: dict[str, list[float]] = {name: [] for name in ACTS}
    for turn in range(rounds + 2):
        for name in ACTS:
            if name.startswith("decode"):
                into.zero_()
            before = timed(lambda: into.copy_(x))
            taken = timed(acts[name])
            after = timed(lambda: into.copy_(x))
            if turn >= 2:  # the first rounds touch new pages
                ratios[name].append(2 * taken / (before + after))
    return {name: statistics.median(found) for name, found in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=25.0)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--fallback-rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--codec", action="append", help="a part of the text form; repeat for more")
    parser.add_argument("--kernels", action="append", help="torch, portable, avx2, avx512; default: best, torch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    numel = int(options.mb * 2**20 / 4)
    rows = []
    for kernels in options.kernels or ["", "torch"]:
        os.environ[VARIABLE] = kernels
        used = kernels_in_use()
        print(f"\n{used}; {options.mb:g} MB, {options.threads} thread(s); times a copy")
        print(f"{'codec':32s}", *(f"{name:>16s}" for name in ACTS), f"{'x smaller':>10s}")
        for codec in CODECS:
            text = gl.describe(codec)
            if options.codec and not any(part in text for part in options.codec):
                continue
            rounds = options.fallback_rounds if kernels == "torch" else options.rounds
            found = measure(codec, kernels, numel, rounds)
            wire = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in codec.layout(numel))
            print(f"{text:32s}", *(f"{found[name]:16.2f}" for name in ACTS), f"{4 * numel / wire:10.1f}")
            rows.append({"codec": text, "kernels": used, "wire_bytes": wire, **found})
    if options.json:
        where = {"torch": torch.__version__, "gradlane": gl.__version__, "cpu": platform.machine()}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        told = {"command": " ".join(sys.argv), **where, **settings, "rows": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
