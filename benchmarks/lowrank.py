"""What low-rank compression costs against a copy of the same gradient: each pass, and a step of PowerSGD.

A step is: p from rows, p made orthonormal, q from columns with the new residual, the matrix from p and q.
`apart` means that the new residual goes to another buffer, and the two are exchanged every time. The arm
`torch's sequence` computes the same as torch's powerSGD_hook does. Arms take turns on the same sets of
buffers, so that no arm finds its buffers in the cache. Medians over all rounds and sets, as multiples of the
median copy. One thread. torch's own sequence runs beside the first kernels only.

    python benchmarks/lowrank.py --json benchmarks/results/DATE-lowrank-kernels.json
"""

import os
import statistics
from collections.abc import Callable

import torch
from copies import parser_for, timed, write
from torch import Tensor

from gradlane.kernels import native, products
from gradlane.kernels.bf16_residual import add_residual, subtract_product

SHAPES = {"mlp9m": [(1024, 1024)] * 8 + [(1000, 1024)], "conv": [(512, 4608)] * 4}
PASSES = ("rows", "orthonormalise", "columns+subtract", "expand")
OTHERS = ("step", "step, bf16 residual", "columns apart", "rows+subtract", "rows apart", "torch's sequence")


class Buffers:
    """One set; arms take turns on several sets, so that no arm finds its buffers in the cache."""

    def __init__(self, shapes: list[tuple[int, int]], rank: int) -> None:
        numel = sum(a * b for a, b in shapes)
        self.flat, self.error, self.out = torch.randn(numel), torch.randn(numel) * 0.1, torch.zeros(numel)
        self.g, self.into = matrices(self.flat, shapes), matrices(self.out, shapes)
        self.residual, self.residual_out = (matrices(self.error.clone(), shapes) for _ in range(2))
        # A step overwrites its gradient, so it has buffers of its own.
        self.step_g, self.step_residual, self.step_out = (
            matrices(self.flat.clone(), shapes) for _ in range(3)
        )
        self.flat_sum = torch.randn(numel)
        self.sums = matrices(self.flat_sum, shapes)
        self.bf16, bf16_out = (self.error.bfloat16() for _ in range(2))
        self.bf16_residual, self.bf16_out = matrices(self.bf16, shapes), matrices(bf16_out, shapes)
        self.p = [torch.randn(rank, a) for a, _ in shapes]
        self.q = [torch.randn(rank, b) for _, b in shapes]
        self.fixed = [torch.randn(rank, b) for _, b in shapes]
        self.p_out = [torch.randn(rank, a) for a, _ in shapes]
        for factor in (*self.p, *self.fixed):
            products.orthonormalise(factor)
        self.ours, self.theirs = torch.zeros(numel), torch.zeros(numel)
        self.arms: dict[str, Callable[[], object]] = {
            "copy": lambda: self.ours.copy_(self.flat),
            "rows": lambda: self.each(products.project_rows, self.g, self.residual, self.fixed, self.p_out),
            "orthonormalise": lambda: products.orthonormalise_all(self.p_out),
            "columns+subtract": lambda: self.columns(),
            "expand": lambda: self.each(products.expand, self.p, self.q, self.into),
            "step": lambda: self.step(),
            "step, bf16 residual": lambda: self.step_bf16(),
            "columns apart": lambda: self.columns_apart(),
            "rows+subtract": lambda: self.rows_subtract(),
            "rows apart": lambda: self.rows_apart(),
            "torch's sequence": lambda: torch_sequence(self.flat, self.error, self.theirs, shapes, self.q),
        }

    def each(self, act: Callable[..., object], *lists: list[Tensor]) -> None:
        for matched in zip(*lists, strict=True):
            act(*matched)

    def columns(self) -> None:
        for g, residual, p, q in zip(self.g, self.residual, self.p, self.q, strict=True):
            products.project_columns(g, residual, p, q, subtract=True)

    def rows_subtract(self) -> None:
        for g, residual, q, p in zip(self.g, self.residual, self.fixed, self.p_out, strict=True):
            products.project_rows(g, residual, q, p, subtract=True)

    def columns_apart(self) -> None:
        for g, residual, residual_out, p, q in zip(
            self.g, self.residual, self.residual_out, self.p, self.q, strict=True
        ):
            products.project_columns(g, residual, p, q, subtract=True, residual_out=residual_out)
        self.residual, self.residual_out = self.residual_out, self.residual

    def rows_apart(self) -> None:
        for g, residual, residual_out, q, p in zip(
            self.g, self.residual, self.residual_out, self.fixed, self.p_out, strict=True
        ):
            products.project_rows(g, residual, q, p, subtract=True, residual_out=residual_out)
        self.residual, self.residual_out = self.residual_out, self.residual

    def step(self) -> None:
        """As the strategy does it: the first pass stores gradient + residual in the gradient."""
        for g, residual, q, p in zip(self.step_g, self.step_residual, self.q, self.p, strict=True):
            products.project_rows(g, residual, q, p, keep_sum=True)
        products.orthonormalise_all(self.p)
        for g, residual, residual_out, p, q in zip(
            self.step_g, self.step_residual, self.step_out, self.p, self.q, strict=True
        ):
            products.project_columns(g, residual, p, q, subtract=True, residual_out=residual_out, summed=True)
        self.step_residual, self.step_out = self.step_out, self.step_residual
        self.each(products.expand, self.p, self.q, self.step_g)

    def step_bf16(self) -> None:
        """The same with a residual in bfloat16."""
        add_residual(self.flat_sum, self.bf16)
        for m, q, p in zip(self.sums, self.q, self.p, strict=True):
            products.project_rows(m, None, q, p)
        products.orthonormalise_all(self.p)
        residuals = zip(self.sums, self.p, self.q, self.bf16_residual, self.bf16_out, strict=True)
        for m, p, q, residual, residual_out in residuals:
            products.project_columns(m, None, p, q)
            subtract_product(m, p, q, residual, residual_out)
        self.each(products.expand, self.p, self.q, self.sums)


def matrices(flat: Tensor, shapes: list[tuple[int, int]]) -> list[Tensor]:
    parts = flat.split([a * b for a, b in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def torch_sequence(
    flat: Tensor, error: Tensor, work: Tensor, shapes: list[tuple[int, int]], qs: list[Tensor]
) -> None:
    """What torch's powerSGD_hook computes between its collectives: factors n x r, batches of one matrix."""
    work.copy_(flat)  # DDP's bucket, which the hook overwrites
    work.add_(error)
    total = work.clone()
    for matrix, factor in zip(matrices(work, shapes), qs, strict=True):
        m, q = matrix.unsqueeze(0), factor.t().contiguous().unsqueeze(0)
        p = torch.bmm(m, q)
        for i in range(p.shape[2]):
            column = p[:, :, i : i + 1]
            column /= torch.norm(column, dim=1, keepdim=True) + 1e-8
            later = p[:, :, i + 1 :]
            later -= torch.sum(column * later, dim=1, keepdim=True) * column
        torch.bmm(m.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=m)
    torch.sub(total, work, out=error)


def measure(shapes: list[tuple[int, int]], rank: int, rounds: int, sets: int, own: bool) -> dict[str, float]:
    buffers = [Buffers(shapes, rank) for _ in range(sets)]
    names = ("copy", *PASSES, *(OTHERS if own else OTHERS[:-1]))
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names:
            for one in buffers:
                seconds = timed(one.arms[name])
                if turn:  # the first round touches new pages
                    taken[name].append(seconds)
    copy = statistics.median(taken["copy"])
    found = {name: statistics.median(taken[name]) / copy for name in names[1:]}
    return {"copy_s": copy, **found, "sum": sum(found[name] for name in PASSES)}


def main() -> None:
    parser = parser_for(__doc__, rounds=8)
    parser.add_argument("--fallback-rounds", type=int, default=3)
    parser.add_argument("--sets", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, action="append", help="default: 1, 2, 4")
    parser.add_argument("--shapes", choices=SHAPES, action="append", help="default: all")
    parser.add_argument(
        "--kernels", action="append", help="torch, portable, avx2, avx512; default: all there are"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    columns = (*PASSES, "sum", *OTHERS)
    for turn, kernels in enumerate(options.kernels or [*reversed(native.levels()), "torch"]):
        os.environ[native.VARIABLE] = kernels
        used = native.kernels_in_use()
        print(f"\n{used}; {options.threads} thread(s); times a copy")
        print(f"{'shapes':8s} rank", *(f"{name:>16s}" for name in columns), f"{'copy ms':>8s}")
        for name in options.shapes or SHAPES:
            for rank in options.rank or (1, 2, 4):
                rounds = options.fallback_rounds if kernels == "torch" else options.rounds
                found = measure(SHAPES[name], rank, rounds, options.sets, own=not turn)
                shown = (f"{found[column]:16.2f}" if column in found else " " * 16 for column in columns)
                print(f"{name:8s} {rank:4d}", *shown, f"{found['copy_s'] * 1e3:8.2f}", flush=True)
                rows.append({"shapes": name, "rank": rank, "kernels": used, **found})
    write(options, rows)


if __name__ == "__main__":
    main()
