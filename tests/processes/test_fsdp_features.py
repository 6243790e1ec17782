"""What FSDP2 offers, with a strategy attached: the mean is torch's own, or a sentence says why not."""

import contextlib
import gc
import itertools
import logging
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint as recomputed

import gradlane as gl
from gradlane.local import run_ranks

from ..support.fsdp import WIDTH, Odd, batch, mesh_of, replicas_equal, sharded, shards

INT4 = "ErrorFeedback(Sharded(Int4()))"


class Tied(nn.Module):
    """The first and the last block have one weight."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x).square().mean()


class Recomputed(Odd):
    """Reentrant checkpoints: a backward inside of backward for each block."""

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(recomputed(block, x, use_reentrant=True))
        return self.head(x).square().mean()


class Even(nn.Module):
    """All dimensions can be halved, as ``Shard(1)`` needs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 4, bias=False)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def by_columns(parameter):
    return Shard(1)


def divided(model):
    model.set_gradient_divide_factor(2)


def summed(model):
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def unused_too(model):
    model.set_reduce_scatter_unused_params(True)


def untouched(model):
    """As ``fully_shard`` leaves it."""


HALF = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
FEATURES = {
    "offload": (Odd, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, untouched),
    "tied": (Tied, {}, untouched),
    "divide factor": (Odd, {}, divided),
    "sums": (Odd, {}, summed),
    "by columns": (Even, {"shard_placement_fn": by_columns}, untouched),
    "unused too": (lambda: Odd(sometimes=True), {}, unused_too),
    "kept after forward": (Odd, {"reshard_after_forward": False}, untouched),
    "reentrant checkpoints": (Recomputed, {}, untouched),
}


def with_features(rank, names, text):
    return {name: with_feature(rank, name, text) for name in names}


def with_feature(rank, name, text):
    make, options, prepare = FEATURES[name]
    model = sharded((2, 2), model=make, **options)
    prepare(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    attachment = gl.attach(model, text, timeout=20) if text else None
    for step in range(3):
        optimizer.zero_grad()
        model(batch(rank, step).requires_grad_(name == "reentrant checkpoints")).backward()
        optimizer.step()
    if attachment is not None:
        attachment.close()
    return shards(model), replicas_equal(model, (2, 2))


@pytest.mark.parametrize(
    "names",
    [list(FEATURES)[::2], pytest.param(list(FEATURES)[1::2], marks=pytest.mark.slow)],
    ids=["one half", "the other"],
)
def test_the_mean_is_torchs_with_each_of_them(names):
    texts = (None, "Mean()", INT4)
    native, ours, lossy = (run_ranks(with_features, 4, names, text, deadline=120) for text in texts)
    for theirs, mine, compressed in zip(native, ours, lossy, strict=True):
        for name in names:
            pairs = zip(theirs[name][0], mine[name][0], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), name
            assert compressed[name][1], name


def in_half(rank, text):
    model = sharded((2, 2), mp_policy=HALF)
    with gl.attach(model, text, timeout=20) if text else contextlib.nullcontext():
        (1000 * model(batch(rank, 0))).backward()
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def test_the_mean_in_fp16_is_torchs_to_rounding():
    """Ours divides before it adds, so that sums cannot overflow; torch divides in two parts."""
    native, ours = run_ranks(in_half, 4, None), run_ranks(in_half, 4, "Mean()")
    for theirs, mine in zip(itertools.chain(*native), itertools.chain(*ours), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-9, atol=2**-22)


def compiled(rank, text, before):
    model = sharded((2, 2))
    called = torch.compile(model, backend="aot_eager") if before else model
    attachment = gl.attach(called, text, timeout=20) if text else None
    called = called if before else torch.compile(model, backend="aot_eager")
    for step in range(3):
        model.zero_grad()
        called(batch(rank, step)).backward()
    gradients = [p.grad.to_local().clone() for p in model.parameters() if p.grad is not None]
    if attachment is not None:
        attachment.close()
    return gradients


@pytest.mark.slow
@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model(before):
    native = run_ranks(compiled, 4, None, before, deadline=120)
    ours = run_ranks(compiled, 4, "Mean()", before, deadline=120)
    for theirs, mine in zip(native, ours, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


def scaled(rank, text):
    """A scaler whose scale changes, and an overflow on one rank in step 3."""
    model = sharded((2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    skipped = []
    with gl.attach(model, text, timeout=20, scaler=scaler) as attachment:
        for step in range(6):
            optimizer.zero_grad()
            factor = float("inf") if step == 3 and rank == 2 else 1.0
            scaler.scale(model(batch(rank, step)) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            skipped.append(attachment.skipped)
    return skipped, replicas_equal(model, (2, 2)), all(part.isfinite().all() for part in shards(model))


def test_a_scaler_whose_loss_overflows_on_one_rank():
    expected = ([False, False, False, True, False, False], True, True)
    assert run_ranks(scaled, 4, INT4) == [expected] * 4


def closure(rank):
    """A NaN batch inside of ``optimizer.step(closure)``."""
    model = sharded((2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with gl.attach(model, INT4, timeout=20) as attachment:
        for step in range(4):

            def evaluate(step=step):
                optimizer.zero_grad()
                data = batch(rank, step)
                if step == 2 and rank == 1:
                    data[:] = float("nan")
                loss = model(data)
                loss.backward()
                return loss

            optimizer.step(evaluate)
        return attachment.metrics()["comm/skipped"], all(part.isfinite().all() for part in shards(model))


def test_a_closure_with_a_bad_batch():
    assert run_ranks(closure, 4) == [(1, True)] * 4


class _Stop(Exception):
    pass


def stopped(rank):
    """Backward raises on all ranks after some groups; FSDP is reset, and training goes on."""
    model = sharded((2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with gl.attach(model, INT4, timeout=20) as attachment:
        for step in range(5):
            optimizer.zero_grad()
            handle = model.blocks[0].register_forward_hook(_raising if step == 2 else _nothing)
            try:
                model(batch(rank, step)).backward()
            except _Stop:
                model.reset_iter_state()
                continue
            finally:
                handle.remove()
            optimizer.step()
        return attachment.step, replicas_equal(model, (2, 2))


def _raising(module, inputs, output):
    def stop(grad):
        raise _Stop

    output.register_hook(stop)


def _nothing(module, inputs, output):
    pass


def test_a_backward_that_raises_is_a_failed_step():
    steps = run_ranks(stopped, 4)
    assert steps == [(4, True)] * 4 or steps == [(5, True)] * 4


def twins(rank):
    """Two models at once, each with its own strategy object; one object for both is refused."""
    one, two = sharded((2, 2)), sharded((2, 2), seed=3)
    strategy = gl.parse(INT4)
    with gl.attach(one, strategy, timeout=20), pytest.raises(gl.WrongState, match="another model"):
        gl.attach(two, strategy, timeout=20)
    with gl.attach(one, INT4, timeout=20), gl.attach(two, INT4, timeout=20) as second:
        for step in range(3):
            (one(batch(rank, step)) + two(batch(rank, step))).backward()
            one.zero_grad()
            two.zero_grad()
        return second.step


def test_two_models():
    assert run_ranks(twins, 4) == [3] * 4


def dropped(rank):
    """A model that is deleted while its attachment is open, and one that is closed: torch's own is back."""
    model = sharded((2, 2))
    attachment = gl.attach(model, INT4, timeout=20)
    model(batch(rank, 0)).backward()
    found = weakref.ref(model)
    del model
    gc.collect()
    gone = found() is None and not attachment.is_open
    model = sharded((2, 2))
    attachment = gl.attach(model, "Noop()", timeout=20)
    attachment.close()
    model(batch(rank, 0)).backward()
    return gone, [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def plain_gradients(rank):
    model = sharded((2, 2))
    model(batch(rank, 0)).backward()
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def test_an_attachment_keeps_no_model_alive_and_leaves_nothing_behind():
    for (gone, mine), theirs in zip(run_ranks(dropped, 4), run_ranks(plain_gradients, 4), strict=True):
        assert gone
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def swapped(rank):
    model = sharded((2, 2))
    with gl.attach(model, "Mean()", timeout=20) as attachment:
        for step, text in enumerate(("Mean()", INT4, "ErrorFeedback(Gathered(TopK(0.5)))", INT4)):
            attachment.swap(text)
            model.zero_grad()
            model(batch(rank, step)).backward()
        kept = sum(t.abs().sum().item() for t in attachment.strategy.cross.memory.state_dict().values())
        return repr(attachment), kept > 0


def test_swap_takes_what_attach_takes():
    name = f"<ShardedAttachment of AcrossReplicas({INT4}), step 4>"
    assert run_ranks(swapped, 4) == [(name, True)] * 4


def frozen(rank):
    model = sharded((2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with gl.attach(model, "Mean()") as attachment, pytest.raises(gl.WrongType, match="full copies"):
        gl.freeze_moments(optimizer, attachment, after=3)
    return True


def test_moments_of_shards_are_not_frozen():
    assert run_ranks(frozen, 4) == [True] * 4


def partly(rank):
    """The blocks are sharded, and the rest of the model is not."""
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("gradlane").addHandler(handler)
    model = Odd()
    for block in model.blocks:
        fully_shard(block, mesh=mesh_of((2, 2)))
    with gl.attach(model, "Mean()", timeout=20) as attachment:
        model(batch(rank, 0)).backward()
        step = attachment.step
    whole = sharded((2, 2), model=Tied)
    gl.attach(whole, "Mean()", timeout=20).close()
    return step, lines


def test_a_parameter_outside_of_fsdp_is_named():
    for step, lines in run_ranks(partly, 4):
        assert step == 1
        assert len(lines) == 1
        assert "spare and 2 more is trained, and outside of FSDP" in lines[0]


def two_hops(rank, text):
    model = sharded((4,))
    events = []
    with gl.attach(model, text, timeout=20, ranks_per_node=2, observer=events.append):
        model(batch(rank, 0)).backward()
    sent = {
        over: sum(event.wire_bytes for event in events if event.over == over) for over in ("node", "cross")
    }
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None], sent


def native_scatter(rank):
    model = sharded((4,))
    model(batch(rank, 0)).backward()
    return [p.grad.to_local() for p in model.parameters() if p.grad is not None]


def test_a_reduce_scatter_in_two_hops():
    native = run_ranks(native_scatter, 4)
    for text, close in (("Hierarchical(Mean())", 1e-6), ("Hierarchical(Sharded(Int8()))", 0.02)):
        for (mine, sent), theirs in zip(run_ranks(two_hops, 4, text), native, strict=True):
            scale = max(t.abs().max().item() for t in theirs if t.numel())
            for a, b in zip(mine, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=close * scale)
            assert sent["node"] > 0
            assert sent["cross"] < sent["node"]
