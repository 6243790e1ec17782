"""What each strategy costs on a device, for one bucket; and where the host waits: here are all places."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from ..support.catalogue import STRATEGIES, WITH_FEEDBACK
from .costs import HOOKS, cost_of, cost_of_torch_hook
from .interpreted import in_interpreter, needs_triton
from .ranks import needs_compiler, run

pytestmark = needs_compiler

WAITS = {
    # Whether this rank may take part is decided before anything is sent, and counted in the budget.
    **{name: 1 for name in STRATEGIES if "private" in name},
    # Rules decide on the host which ranks count; rules for whole vectors once a step.
    **{name: 1 for name in STRATEGIES if "median" in name or "mixed" in name},
    **dict.fromkeys(("aggregate of one's own", "multi-krum", "centered clipping", "adasum"), 1),
    **dict.fromkeys(("momentum", "momentum int4 feedback", "some by a rule"), 1),
}
BY_SHARD = ("median sharded", "int8 sharded median", "raw gathered median")  # no decision of the host
WAITS |= dict.fromkeys(BY_SHARD, 0)

BOUNDS = {  # kernels, bytes an element, and the same with Triton: what is needed today, and a tenth more
    "Mean()": ((1, 8), (1, 8)),
    "Cast(Mean(), bfloat16)": ((7, 13), (7, 13)),
    "Cast(Mean(), float16)": ((24, 93), (11, 18)),
    "ErrorFeedback(Sharded(Int8()))": ((193, 201), (34, 39)),
    "ErrorFeedback(Sharded(Int4(rounding='stochastic')))": ((400, 600), (34, 34)),
    "ErrorFeedback(Sharded(Fp8()))": ((188, 192), (34, 39)),
    "ErrorFeedback(Gathered(Int2(rotate=True)))": ((500, 1500), (16, 22)),
    "ErrorFeedback(Gathered(Sign()))": ((152, 463), (14, 20)),
    "Gathered(Natural())": ((127, 829), (7, 25)),
    "ErrorFeedback(Gathered(TopK(0.01)))": ((140, 140), (163, 71)),
    "ErrorFeedback(PowerSGD(4))": ((247, 126), (220, 39)),
    "ErrorFeedback(AcpSGD(4))": ((157, 119), (130, 32)),
    "ErrorFeedback(PowerSGD(4), dtype=bfloat16)": ((254, 145), (215, 47)),
}
GPUS = Path(__file__).parents[2] / "docs" / "gpus.md"


def costs(rank, names, width):
    return {name: cost_of(STRATEGIES[name]() if name in STRATEGIES else name, width=width) for name in names}


def test_the_host_waits_only_where_it_is_written():
    (found,) = run(costs, 1, list(STRATEGIES), 128, deadline=120)
    waits = {name: sum(cost.waits.values()) for name, cost in found.items()}
    wrong = {name: found[name].waits for name in waits if waits[name] > WAITS.get(name, 0)}
    assert not wrong
    too_many = {name: (waits[name], count) for name, count in WAITS.items() if waits[name] < count}
    assert not too_many, "fewer waits than written: write the new count"


def in_tf32(rank, names):
    torch.set_float32_matmul_precision("high")
    log = importlib.import_module(f"{__package__}.device").log
    found = {}
    for name in names:
        cost_of(STRATEGIES[name](), width=128)
        found[name] = log.narrow_products, sum(kernel.name.startswith("addmm") for kernel in log.kernels)
    return found, torch.get_float32_matmul_precision()


def test_what_is_kept_is_computed_in_fp32_where_products_are_in_tf32():
    names = [name for name in WITH_FEEDBACK if "powersgd" in name or "acpsgd" in name]
    ((found, precision),) = run(in_tf32, 1, names)
    assert precision == "high"
    assert {narrow for narrow, _ in found.values()} == {0}
    assert sum(products for _, products in found.values()) > len(names)


def beyond(found, which):
    return {
        text: (kernels, size)
        for text, (kernels, size, *_) in found.items()
        if kernels > BOUNDS[text][which][0] or size > BOUNDS[text][which][1]
    }


def test_kernels_and_bytes_stay_below_their_bounds():
    (found,) = run(costs, 1, list(BOUNDS), 512)
    assert beyond({text: (cost.kernels, cost.bytes_per_element) for text, cost in found.items()}, 0) == {}


@needs_triton
@pytest.mark.slow
def test_they_stay_below_with_triton():
    found = in_interpreter("costs", *BOUNDS)
    assert set(found) == set(BOUNDS)
    assert beyond(found, 1) == {}


@pytest.mark.parametrize(
    ("text", "hook"), [("Mean()", "allreduce_hook"), ("Cast(Mean(), bfloat16)", "bf16_compress_hook")]
)
def test_bytes_are_at_most_those_of_torchs_hook(text, hook):
    (found,) = run(costs, 1, [text], 512)
    theirs, _ = run(cost_of_torch_hook, 2, hook)
    assert found[text].bytes_per_element <= theirs.bytes_per_element


def rows_of_the_page():
    """Of its table: by strategy or hook, (kernels, bytes an element) in plain torch, and with Triton."""
    lines = [line for line in GPUS.read_text().splitlines() if re.match(r"\| `.*` \|( \d+ \|){4}$", line)]
    return {
        name.strip(" `"): tuple(int(cell) for cell in cells)
        for name, *cells in (line.strip("|").split("|") for line in lines)
    }


@needs_triton
@pytest.mark.slow
def test_the_page_has_these_figures():
    page = rows_of_the_page()
    (plain,), triton = run(costs, 1, list(BOUNDS), 512), in_interpreter("costs", *BOUNDS)
    for text in BOUNDS:
        own, (kernels, size, *_) = plain[text], triton[text]
        assert page.pop(text) == (own.kernels, round(own.bytes_per_element), kernels, round(size)), text
    for hook in HOOKS:
        theirs, _ = run(cost_of_torch_hook, 2, hook)
        assert page.pop(hook)[:2] == (theirs.kernels, round(theirs.bytes_per_element)), hook
    assert page == {}
