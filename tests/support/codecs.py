"""Every codec, in one list: each law test runs over all of it. A new codec adds a line here."""

import torch

import gradlane as gl

CODECS: dict[str, gl.Codec] = {
    "raw": gl.Raw(),
    "raw bfloat16": gl.Raw("bfloat16"),
    "int8": gl.Int8(),
    "int8 stochastic": gl.Int8(block=256, rounding="stochastic"),
    "int8 rotated": gl.Int8(rotate=True),
    "int4": gl.Int4(),
    "int4 block 96": gl.Int4(block=96),
    "int4 stochastic": gl.Int4(block=128, rounding="stochastic"),
    "int4 rotated stochastic": gl.Int4(rotate=True, rounding="stochastic"),
    "int2": gl.Int2(),
    "int2 stochastic": gl.Int2(block=32, rounding="stochastic"),
    "int2 rotated": gl.Int2(block=64, rotate=True),
    "sign": gl.Sign(),
    "sign block 32": gl.Sign(block=32),
    "sign rotated": gl.Sign(rotate=True),
    "fp8 e4m3": gl.Fp8(),
    "fp8 e5m2": gl.Fp8(format="e5m2", block=96),
    "natural": gl.Natural(),
    "topk": gl.TopK(),
    "topk bfloat16": gl.TopK(0.05, value="bfloat16"),
    "topk all": gl.TopK(1.0),
    "chunk topk": gl.ChunkTopK(),
    "chunk topk float32": gl.ChunkTopK(0.05, value="float32"),
    "chunk topk bfloat16": gl.ChunkTopK(0.05, value="bfloat16"),
    "chunk topk all": gl.ChunkTopK(1.0),
    "randomk": gl.RandomK(),
    "randomk runs": gl.RandomK(0.05, run=7),
    "randomk unbiased": gl.RandomK(0.1, unbiased=True),
}

NEAREST = ("int8", "int8 rotated", "int4", "int4 block 96", "int2", "int2 rotated", "sign", "sign block 32",
           "sign rotated", "fp8 e4m3", "fp8 e5m2")  # fmt: skip
"""Block codecs without chance: chunks encode to parts of the whole."""

UNBIASED = ("int8 stochastic", "int4 stochastic", "int4 rotated stochastic", "int2 stochastic", "natural",
            "randomk unbiased")  # fmt: skip

CONTRACTIONS = {"raw": 0.0, "raw bfloat16": 1e-5, "int8": 1e-4, "int8 rotated": 1e-4, "int4": 0.02,
                "int2": 0.7, "int2 rotated": 0.7, "sign": 0.37, "sign block 32": 0.37, "sign rotated": 0.37,
                "fp8 e4m3": 1e-3, "fp8 e5m2": 4e-3, "topk": 0.99, "topk bfloat16": 0.95, "topk all": 0.0,
                "chunk topk": 0.87, "chunk topk float32": 0.75, "chunk topk bfloat16": 0.75,
                "chunk topk all": 0.13,
                "randomk": 0.995, "randomk runs": 0.97}  # fmt: skip
"""|x - decoded|^2 / |x|^2 is at most this on Gaussian data."""


def gaussian(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)
