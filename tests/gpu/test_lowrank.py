"""The passes of low rank in Triton's interpreter: the answer has the bits of a CPU, the rest is close."""

import contextlib
import importlib

import pytest
import torch

from gradlane.kernels import products, triton_lowrank, triton_state
from gradlane.kernels.bf16_residual import subtract_product

from .interpreted import in_interpreter, launches, missing, needs_triton
from .ranks import needs_compiler

if not missing:
    from triton import language as tl

pytestmark = [needs_compiler, needs_triton]
SHAPES = [(8, 256, 4), (9, 257, 1), (37, 300, 3), (1, 700, 1), (300, 2, 2), (64, 64, 16), (40, 40, 17)]
ODD = (37, 300, 4)
MOST = 1e36
LOOSE = {"bf16": {"rtol": 2**-7, "atol": 1e-3}}


def computed(device, rows, columns, rank, matrices):
    """By pass: what it writes."""
    g, e, p, q = (part.clone().to(device) for part in matrices(rows, columns, rank))
    out, found = torch.empty_like(g), {}
    products.expand(p, q, out)
    found["expand"] = [out]
    m, own, left = g.clone(), torch.empty_like(p), torch.full_like(e, 7.0)
    products.project_rows(m, e, q, own, keep_sum=True)
    found["sum rows"] = [m, own]
    own = torch.empty_like(p)
    products.project_rows(g, e, q, own, subtract=True, residual_out=left)
    found["subtract"] = [own, left]
    kept, other = e.clone(), torch.empty_like(q)
    products.project_columns(g, kept, p, other, subtract=True)
    found["sum columns"] = [other, kept]
    narrow = e.to(torch.bfloat16)
    subtract_product(g, p, q, narrow, narrow)
    found["bf16"] = [narrow.float()]
    return {name: [tensor.cpu() for tensor in tensors] for name, tensors in found.items()}


def usual(rows, columns, rank):
    """As in a step: the factors have rows of length 1."""
    generator = torch.Generator().manual_seed(rows)
    g, e = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    p, q = (torch.randn(rank, size, generator=generator) for size in (rows, columns))
    return g, e, p / p.norm(dim=1, keepdim=True), q / q.norm(dim=1, keepdim=True)


def wrong(device, rows, columns, rank, matrices):
    """The passes that differ from a CPU: ``expand`` by a bit, the others by more than rounding."""
    own, cpu = (computed(where, rows, columns, rank, matrices) for where in (device, "cpu"))
    found = []
    for name in own:
        exact = {"rtol": 0.0, "atol": 0.0}
        close = exact if name == "expand" else LOOSE.get(name, {"rtol": 1e-4, "atol": 1e-4})
        for one, two in zip(own[name], cpu[name], strict=True):
            known = two.abs() < MOST  # of larger numbers the order of a sum decides whether they overflow
            if not torch.allclose(one[known], two[known], **close):
                found.append(f"{name} of {rows} x {columns}, {rank}")
    return found


@contextlib.contextmanager
def rounded_once():
    """As with an instruction that multiplies and adds."""
    kernels = triton_state.kernels().lowrank
    right, kernels._product = kernels._product, importlib.import_module("triton").jit(_wide_product)
    yield
    kernels._product = right


def _wide_product(p, q, row, column, rows, columns, RANK):
    total = tl.zeros([row.shape[0], column.shape[0]], tl.float64)
    for k in range(RANK):
        left = tl.load(p + k * rows + row, mask=row < rows, other=0.0)[:, None].to(tl.float64)
        total += left * tl.load(q + k * columns + column, mask=column < columns, other=0.0)[None, :]
    return total.to(tl.float32)


def in_triton(rank):
    device, found = importlib.import_module(f"{__package__}.device"), []
    for fault in (contextlib.nullcontext, rounded_once):
        triton_state._trusted.clear()
        device.log.clear()
        with fault():
            differ = [name for shape in SHAPES for name in wrong(device.DEVICE, *shape, usual)]
            differ += wrong(device.DEVICE, *ODD, triton_lowrank.odd_matrix)
        refused = [why for (name, _), why in triton_state.refused.items() if name == triton_lowrank.NAME]
        found.append((differ, len(launches()), refused, device.races()[:3]))
    return found


@pytest.mark.slow
def test_passes_are_those_of_a_cpu_and_a_wrong_kernel_is_refused():
    (differ, count, refused, races), (after, launched, why, _) = in_interpreter("lowrank")
    assert (differ, refused, races) == ([], [], [])
    assert count > 4 * len(SHAPES)
    assert after == []  # plain torch does it
    assert launched <= 3 * 4  # the check itself
    assert why == ["its bits are not those of plain torch"]
