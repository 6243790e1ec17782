"""The checks. Each returns what it has found in words, or raises; all ranks run all of them in one order."""

import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import gradlane as gl
from gradlane.codecs.blockwise import BlockCodec
from gradlane.codecs.plain_blocks import PlainBlocks
from gradlane.kernels import elementwise, triton_lowrank, triton_state
from gradlane.kernels.counter import keys_of
from gradlane.kernels.triton_blocks import TritonBlocks
from gradlane.kernels.triton_check import equal_bits
from gradlane.kernels.triton_state import device_kernels_in_use

from ...support.codecs import CODECS
from ...unit.test_device_products import factor, orthonormal
from ..ranks import train
from ..test_codecs import SIZES, inputs, same
from ..test_costs import WAITS
from ..test_device_times import Times
from ..test_failures import Breaks, breaks_everywhere, breaks_on_meta_too

PACKAGE = f"{Path(gl.__file__).parent}/"  # a checkout may be in a folder of the same name
SIZES_OF_TRITON = (1 << 20, 1_000_003)
STRATEGIES = (
    "Mean()",
    "Cast(Mean(), bfloat16)",
    "ErrorFeedback(Sharded(Int8()))",
    "ErrorFeedback(Sharded(Int4()))",
    "ErrorFeedback(Gathered(Sign()))",
    "ErrorFeedback(Gathered(TopK(0.1)))",
    "ErrorFeedback(PowerSGD(2, min_compression_rate=1))",
    "EF21(Gathered(Int8()))",
    "Combined(Median())",
)


@dataclass
class Paused(gl.Strategy):
    """Makes the lane's stream late: what does not wait for it reads what is not there yet."""

    inner: gl.Strategy
    pause: object

    async def reduce(self, bucket):
        self.pause()
        reduced = await self.inner.reduce(bucket)
        self.pause()
        return reduced


class Checks:
    def __init__(self, machine, rank, group):
        self.machine, self.rank = machine, rank
        self._host = group  # of the CPU, to compare

    def _train(self, strategy, **options):
        found = train(self.rank, strategy, device=self.machine.device, **options)
        assert not found.races, found.races[:3]
        return found

    def _equal(self, value):
        """On all ranks."""
        everyone = [None] * dist.get_world_size(self._host)
        dist.all_gather_object(everyone, value, group=self._host)
        return all(np.array_equal(other, everyone[0]) for other in everyone)

    def codecs_have_the_bits_of_the_cpu(self):
        wrong = set()
        for name, codec in CODECS.items():
            for numel in SIZES:
                for kind in ("normal", "sparse", "broken"):
                    flat, residual = inputs(numel, kind)
                    out, own_out = torch.empty(numel), torch.empty(numel, device=self.machine.device)
                    expected = codec.encode_with_feedback(flat, residual, 5, None, out)
                    moved = flat.to(self.machine.device), residual.to(self.machine.device)
                    own = codec.encode_with_feedback(*moved, 5, None, own_out)
                    pairs = [*zip(own, expected, strict=True), (own_out, out)]
                    if not all(same(*pair) for pair in pairs):
                        wrong.add(name)
        assert not wrong, f"other bits than on the CPU: {', '.join(sorted(wrong))}"
        return f"{len(CODECS)} codecs, payloads and residuals"

    def triton_has_the_bits_of_plain_torch(self):
        device = self.machine.device
        used = device_kernels_in_use(device)
        if used.startswith("torch"):
            return f"not used here: {used}"
        elementwise.prepare(device)
        triton_lowrank.prepare(device)
        wrong = set()
        for name, codec in CODECS.items():
            codec.prepare(device)
            if isinstance(codec, BlockCodec):
                wrong |= {f"{name} of {numel}" for numel in SIZES_OF_TRITON if not self._same(codec, numel)}
        refused = [kernel for kernel, on in triton_state.refused if on == device]
        assert not wrong, f"other bits than in plain torch: {', '.join(sorted(wrong))}"
        assert not refused, f"refused: {device_kernels_in_use(device)}"
        return f"{used}, all block codecs, top-k, low rank"

    def _same(self, codec, numel):
        """Encoded with the residual, and decoded, beginning at an odd address too."""
        plain, own = PlainBlocks(codec), TritonBlocks(codec.block_form)
        found, keys, device = [], keys_of(9), self.machine.device
        for kernels in (plain, own):
            generator = torch.Generator().manual_seed(numel)
            flat, residual = (torch.randn(numel + 1, generator=generator).to(device)[1:] for _ in range(2))
            payload, after = codec.encode(flat, 0), torch.empty_like(flat)
            kernels.encode(flat, residual, after, keys, payload)
            kernels.decode([payload] * 3, [keys] * 3, flat, 1 / 3, False)
            found.append((*payload, after, flat))
        return all(bool(equal_bits(*pair)) for pair in zip(*found, strict=True))

    def factors_have_the_bits_of_the_cpu(self):
        for rank, size in ((1, 7), (2, 64), (4, 1000), (4, 40_000), (16, 4096)):
            for kind in ("normal", "scaled", "dependent", "zero"):
                given = factor(rank, size, kind)
                (expected,) = orthonormal(given)
                (own,) = orthonormal(given.to(self.machine.device))
                assert torch.equal(own.cpu(), expected), f"{kind} factors of {rank} x {size}"
        return "low rank: no order of summation matters"

    def device_times_are_there(self):
        times = Times()
        found = self._train("ErrorFeedback(Sharded(Int8()))", options={"observer": times}, steps=3)
        assert not found.errors, found.errors
        assert [step.step for step in times.steps] == [0, 1, 2]
        parts = [(r.encode, r.collective, r.decode) for step in times.steps for r in step.requests]
        assert all(part >= 0 for request in parts for part in request), parts
        assert all(sum(request) > 0 for request in parts), parts
        last = parts[-len(times.steps[-1].requests) :]
        encode, collective, decode = (sum(part) * 1e6 for part in zip(*last, strict=True))
        return f"last step: encode {encode:.0f}, collectives {collective:.0f}, decode {decode:.0f} us"

    def replicas_are_equal(self):
        for text in STRATEGIES:
            found = self._train(text)
            assert not found.errors, (text, found.errors)
            assert self._equal(found.weights), f"{text}: weights differ between ranks"
        return f"{len(STRATEGIES)} strategies, four steps each"

    def a_late_stream_changes_nothing(self):
        for text in STRATEGIES:
            plain = self._train(text)
            late = self._train(Paused(gl.strategies.as_strategy.as_strategy(text), self.machine.pause))
            for step, (own, other) in enumerate(zip(late.gradients, plain.gradients, strict=True)):
                assert np.array_equal(own, other), f"{text}: step {step} has other gradients when it is late"
        return "the same gradients when the lane's stream is ten milliseconds late, twice a bucket"

    def the_mean_is_that_of_the_cpu(self):
        own = self._train("Mean()").weights
        expected = train(self.rank, "Mean()", device="cpu", ddp_options={"process_group": self._host}).weights
        worst = float(np.abs(own - expected).max())
        assert worst < 1e-4, f"weights differ by {worst:.2g} from those of a run on CPUs"
        return f"largest difference of a weight after four steps: {worst:.1e}"

    def a_resume_has_the_same_bits(self):
        for text in STRATEGIES:
            states = []

            def keep(attachment, ddp, step, rank, states=states):
                if step == 1:
                    states.append(attachment.state_dict())

            def load(attachment, ddp, step, rank, states=states):
                if step == 2:
                    on_cpu = [{**s, "state": _to_cpu(s["state"])} for s in states]
                    attachment.load_state_dict(on_cpu.pop())

            plain, resumed = self._train(text), self._train(text, between=keep, faults=load)
            assert np.array_equal(plain.weights, resumed.weights), f"{text}: other bits after a resume"
        return "state_dict on the CPU, and back"

    def a_step_that_is_not_finite_is_skipped(self):
        def spoil(attachment, ddp, step, rank):
            if rank == 1 and step == 1:
                ddp.module.last.bias.register_hook(lambda grad: grad * float("nan"))

        for text in ("Mean()", "ErrorFeedback(Sharded(Int8()))"):
            found = self._train(text, faults=spoil, steps=2)
            assert found.metrics["comm/skipped"] == 1, found.metrics
            assert np.isfinite(found.weights).all()
            assert self._equal(found.weights)
        return "on all ranks, with memory as before"

    def a_rank_that_raises_costs_one_step(self):
        for before in (True, False):
            found = self._train(Breaks(before, 0), cap=0.01, steps=3)
            ((step, kind, _),) = found.errors
            assert (step, kind) == (1, "ArithmeticError" if self.rank == 1 else "PeerFailed"), found.errors
            assert self._equal(found.weights)
        found = self._train(breaks_everywhere, cap=0.01)
        assert [error[:2] for error in found.errors] == [(1, "ArithmeticError")], found.errors
        return "the others get PeerFailed in the same step, and go on"

    def the_host_waits_where_it_is_written(self):
        counts, strategies = {}, importlib.import_module("tests.support.catalogue").STRATEGIES
        for name in ("mean", "bf16", "int8 sharded", "int4 feedback", "top-k", "1-bit", "ef21 sharded"):
            with self.machine.counted_waits() as places:
                self._train(strategies[name](), steps=2, between=None)
            counts[name] = [place for place in places if place.startswith(PACKAGE)]
            assert not counts[name] or name in WAITS, f"{name}: {sorted(set(counts[name]))}"
        return "no wait inside of " + ", ".join(counts)

    def a_rank_that_cannot_go_on_ends_all(self):
        """The last check: afterwards the group is of no use."""
        found = self._train(breaks_on_meta_too, cap=0.01, steps=3)
        kinds = [kind for _, kind, _ in found.errors]
        assert kinds == ["ArithmeticError" if self.rank == 1 else "PeerFailed", "WrongState"], found.errors
        return "all ranks say why, within seconds"


def _to_cpu(state):
    if isinstance(state, torch.Tensor):
        return state.cpu()
    return {key: _to_cpu(value) for key, value in state.items()} if isinstance(state, dict) else state


ALL = tuple(name for name, value in vars(Checks).items() if not name.startswith("_") and callable(value))
