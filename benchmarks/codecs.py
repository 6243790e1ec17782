"""What codecs cost against a copy of the same gradient: encode, decode, decode and add, encode with feedback.

Feedback is in place, or apart: the new residual goes to another buffer, and the two are exchanged every time.

Arms take turns on the same sets of 25 MB buffers, so that other load on the machine slows them alike, and no
arm finds its buffers in the cache, where a copy is much faster than one through memory.
Medians over all rounds and sets, as multiples of the median copy. One thread.

    python benchmarks/codecs.py --json benchmarks/results/DATE-codecs.json
"""

import os
import statistics
from collections.abc import Callable

import torch
from copies import parser_for, timed, write

import gradlane as gl
from gradlane.kernels.native import VARIABLE, kernels_in_use

CODECS = (gl.Raw(), gl.Int8(), gl.Int4(), gl.Int2(), gl.Sign(), gl.Fp8(), gl.Fp8(format="e5m2"), gl.Natural(),
          gl.Int8(rounding="stochastic"), gl.Int4(rotate=True), gl.Sign(rotate=True), gl.TopK(),
          gl.TopK(value="bfloat16"), gl.ChunkTopK(), gl.ChunkTopK(value="float32"), gl.RandomK(),
          gl.RandomK(run=64))  # fmt: skip
SETS = 4
ACTS = ("encode", "decode", "decode+add", "encode+feedback", "feedback apart")


class Buffers:
    """One set of buffers; arms take turns on several sets, so that no arm finds its buffers in the cache."""

    def __init__(self, codec: gl.Codec, numel: int) -> None:
        self.x, self.residual = torch.randn(numel), torch.randn(numel) * 0.1
        self.residual_out = self.residual.clone()
        self.into, self.copied = torch.zeros(numel), torch.zeros(numel)
        self.payload = codec.encode(self.x, 1)
        self.arms: dict[str, Callable[[], object]] = {
            "copy": lambda: self.copied.copy_(self.x),
            "encode": lambda: codec.encode(self.x, 1, out=self.payload),
            "decode": lambda: codec.decode(self.payload, self.into, 1),
            "decode+add": lambda: codec.add_decoded(self.payload, self.into, 1),
            "encode+feedback": lambda: codec.encode_with_feedback(self.x, self.residual, 1, out=self.payload),
            "feedback apart": lambda: self.apart(codec),
        }

    def apart(self, codec: gl.Codec) -> None:
        codec.encode_with_feedback(self.x, self.residual, 1, out=self.payload, residual_out=self.residual_out)
        self.residual, self.residual_out = self.residual_out, self.residual


def measure(codec: gl.Codec, kernels: str, numel: int, rounds: int) -> dict[str, float]:
    os.environ[VARIABLE] = kernels
    sets = [Buffers(codec, numel) for _ in range(SETS)]
    taken: dict[str, list[float]] = {name: [] for name in ("copy", *ACTS)}
    for turn in range(rounds + 1):
        for name in taken:
            for buffers in sets:
                seconds = timed(buffers.arms[name])
                if turn:  # the first round touches new pages
                    taken[name].append(seconds)
    copy = statistics.median(taken["copy"])
    return {"copy_s": copy, **{name: statistics.median(taken[name]) / copy for name in ACTS}}


def main() -> None:
    parser = parser_for(__doc__, rounds=12)
    parser.add_argument("--mb", type=float, default=25.0)
    parser.add_argument("--fallback-rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--codec", action="append", help="a part of the text form; repeat for more")
    parser.add_argument(
        "--kernels", action="append", help="torch, portable, avx2, avx512; default: best, torch"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    numel = int(options.mb * 2**20 / 4)
    rows = []
    for kernels in options.kernels or ["", "torch"]:
        os.environ[VARIABLE] = kernels
        used = kernels_in_use()
        print(f"\n{used}; {options.mb:g} MB, {options.threads} thread(s); times a copy")
        print(f"{'codec':32s}", *(f"{name:>16s}" for name in ACTS), f"{'x smaller':>10s} {'copy ms':>8s}")
        for codec in CODECS:
            text = gl.describe(codec)
            if options.codec and not any(part in text for part in options.codec):
                continue
            rounds = options.fallback_rounds if kernels == "torch" else options.rounds
            found = measure(codec, kernels, numel, rounds)
            wire = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in codec.layout(numel))
            print(f"{text:32s}", *(f"{found[name]:16.2f}" for name in ACTS), f"{4 * numel / wire:10.1f}",
                  f"{found['copy_s'] * 1e3:8.2f}")  # fmt: skip
            rows.append({"codec": text, "kernels": used, "wire_bytes": wire, **found})
    write(options, rows)


if __name__ == "__main__":
    main()
