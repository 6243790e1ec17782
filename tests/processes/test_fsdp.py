"""Strategies on models of FSDP2: HSDP, ``replicate`` and ``fully_shard`` on one dimension."""

import functools
import itertools
import time
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

import gradlane as gl
from gradlane.lane import open as lane_open
from gradlane.lane.stream import StreamLane
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES, ClippedMean
from ..support.fsdp import Odd, RaisesOn, batch, mesh_of, replicas_equal, residual_sums, sharded, shards
from ..support.grids import every, grid

INT4 = "ErrorFeedback(Sharded(Int4()))"
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
}


def plain(model, rank, step):
    model(batch(rank, step)).backward()


def clipped(model, rank, step):
    plain(model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def accumulated(model, rank, step):
    """Three backwards, of which the last communicates."""
    for part in range(3):
        model.set_requires_gradient_sync(part == 2)
        plain(model, rank, 100 * step + part)


def added(model, rank, step):
    """Each of two backwards communicates, and the second adds to the gradients of the first."""
    plain(model, rank, 100 * step)
    plain(model, rank, 100 * step + 1)


def scattered(model, rank, step):
    """Two backwards reduce in the node, the second one across replicas too."""
    for part in range(2):
        model.set_requires_all_reduce(part == 1)
        plain(model, rank, 100 * step + part)


WAYS = (plain, clipped, accumulated, added, scattered)
MESHES = [((2, 2), False), ((2,), True), ((2,), False)]


def sometimes():
    return Odd(sometimes=True)


def checkpointed():
    model = Odd()
    for block in model.blocks:
        checkpoint(block)
    return model


def trained(rank, shape, copies, text, cases, steps):
    """The weights after each case; whether replicas are equal."""
    torch.set_num_threads(1)
    found = []
    for way, optimizer, make, options in cases:
        model = sharded(shape, copies=copies, model=make, **options)
        optimizer = OPTIMIZERS[optimizer](model)
        attachment = gl.attach(model, text, timeout=20) if text else None
        for step in range(steps):
            optimizer.zero_grad()
            way(model, rank, step)
            optimizer.step()
        assert replicas_equal(model, shape, copies)
        if attachment is not None:
            assert attachment.metrics()["comm/steps"] == attachment.step > 0
            attachment.close()
        found.append(shards(model))
    return found


CASES = [
    *((way, "sgd", Odd, {}) for way in WAYS),
    *((way, "adam", Odd, {}) for way in (plain, added)),
    (plain, "sgd", sometimes, {}),
    (plain, "sgd", checkpointed, {}),
    (plain, "adam", Odd, {"blocks": False}),
    (added, "sgd", Odd, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}),
    (plain, "sgd", Odd, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
]


@pytest.mark.parametrize("steps", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("shape", "copies"), MESHES, ids=str)
def test_the_mean_is_torchs_bit_for_bit(shape, copies, steps):
    """Few steps on each mesh take every third case, many take all."""
    ranks = 4 if len(shape) == 2 else 2
    cases = CASES if steps > 3 else CASES[MESHES.index((shape, copies)) :: len(MESHES)]
    cases = [case for case in cases if len(shape) == 2 or case[0] is not scattered]
    native = run_ranks(trained, ranks, shape, copies, None, cases, steps, deadline=240)
    ours = run_ranks(trained, ranks, shape, copies, "Mean()", cases, steps, deadline=240)
    for theirs, mine in zip(native, ours, strict=True):
        for number, case in enumerate(cases):
            pairs = zip(theirs[number], mine[number], strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), case


def gradients(rank, shape, copies, text):
    model = sharded(shape, copies=copies)
    with gl.attach(model, text) if text else torch.enable_grad():
        plain(model, rank, 0)
    return [parameter.grad.to_local() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    ("shape", "copies"), every(3, [((3,), True), ((3,), False), ((4,), False), ((2, 4), False)])
)
def test_with_more_ranks_sums_have_another_order(shape, copies):
    ranks = functools.reduce(lambda a, b: a * b, shape)
    native = run_ranks(gradients, ranks, shape, copies, None)
    ours = run_ranks(gradients, ranks, shape, copies, "Mean()")
    for theirs, mine in zip(itertools.chain(*native), itertools.chain(*ours), strict=True):
        scale = max(theirs.abs().max().item(), 1e-30) if theirs.numel() else 1.0
        torch.testing.assert_close(mine, theirs, rtol=0, atol=2 * 2**-23 * scale)


def lossy(rank, shape, copies, names, steps):
    torch.set_num_threads(1)
    found = {}
    for name in names:
        model = sharded(shape, copies=copies)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        with gl.attach(model, STRATEGIES[name](), timeout=20):
            for step in range(steps):
                optimizer.zero_grad()
                plain(model, rank, step)
                optimizer.step()
        finite = all(part.isfinite().all() for part in shards(model))
        found[name] = finite and replicas_equal(model, shape, copies)
    return found


def across(strategy):
    """Whether a strategy may work across replicas."""
    try:
        gl.AcrossReplicas(strategy)
    except gl.GradlaneError:
        return False
    return True


ACROSS = [name for name, make in STRATEGIES.items() if across(make()) and name not in ("node first", "noop")]


PARTS = [
    pytest.param(ACROSS[start::8], marks=pytest.mark.slow if start else (), id=str(start))
    for start in range(8)
]


@pytest.mark.parametrize("names", PARTS)
def test_replicas_are_bit_equal_after_lossy_steps_of_every_strategy(names):
    for found in run_ranks(lossy, 4, (2, 2), False, names, 4, deadline=280):
        assert not [name for name, equal in found.items() if not equal]


@pytest.mark.slow
@pytest.mark.parametrize("names", [ACROSS[start::4] for start in range(4)], ids=["0", "1", "2", "3"])
@pytest.mark.parametrize(("shape", "copies"), [((2, 2), False), ((4, 2), False), ((3,), True)], ids=str)
def test_for_long(shape, copies, names):
    ranks = 8 if shape == (4, 2) else 4 if shape == (2, 2) else 3
    for found in run_ranks(lossy, ranks, shape, copies, names, 100, deadline=290):
        assert not [name for name, equal in found.items() if not equal]


def wire(rank, shape, text):
    torch.manual_seed(0)
    model = sharded(shape, model=lambda: Wide())
    events = []
    with gl.attach(model, text, observer=events.append, timeout=20) as attachment:
        for step in range(2):
            model.zero_grad()
            plain(model, rank, step)
        state = attachment.strategy.state_dict()
        metrics = attachment.metrics()
    sent = dict.fromkeys(("node", "cross", "world"), 0)
    for event in events:
        sent[event.over] += event.wire_bytes * (event.step == 1)
    kept = sum(tensor.numel() for tensor in _tensors(state))
    return sent, kept, metrics["comm/step/bytes_wire"] * metrics["comm/step/ratio"]


class Wide(nn.Module):
    """Divides by 4 ranks, but for a bias of 10."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(24, 256), nn.Linear(256, 64)])
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x).square().mean()


def _tensors(state):
    for value in state.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        else:
            yield value


def test_bytes_and_residual_are_those_of_a_shard():
    for shape, ranks in (((2, 2), 4), ((2, 4), 8)):
        for sent, kept, dense in run_ranks(wire, ranks, shape, INT4):
            part = sum(-(-rows // shape[1]) * rest for rows, rest in ROWS)
            assert kept == part
            assert sent["node"] == 0
            assert sent["cross"] == pytest.approx(part * (0.5 + 4 / 256), rel=0.02)
            assert dense == pytest.approx(4 * part)


ROWS = ((256, 24), (256, 1), (64, 256), (64, 1), (10, 64), (10, 1))
"""Rows of each parameter of ``Wide``, and the elements of a row."""


def raising(rank, shape, copies, text, points):
    found = []
    for at, step, bucket in points:
        model = sharded(shape, copies=copies)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        caught, seconds = [], 0.0
        with gl.attach(model, RaisesOn(gl.parse(text), at, step, bucket), timeout=20):
            for number in range(6):
                optimizer.zero_grad()
                start = time.monotonic()
                try:
                    plain(model, rank, number)
                except (ZeroDivisionError, gl.PeerFailed) as error:
                    caught.append((number, type(error).__name__))
                    seconds = time.monotonic() - start
                    continue
                optimizer.step()
        found.append((caught, seconds, replicas_equal(model, shape, copies)))
    return found


@pytest.mark.parametrize(("shape", "copies"), [((2, 2), False), ((3,), True)], ids=str)
def test_a_strategy_that_raises_fails_the_step_on_all_ranks_of_both_dimensions(shape, copies):
    ranks = 4 if len(shape) == 2 else 3
    points = [(0, 2, 0), (ranks - 1, 2, 1), (1, 0, 3)]
    everyone = run_ranks(raising, ranks, shape, copies, INT4, points, deadline=120)
    for number, (at, step, _) in enumerate(points):
        for rank, found in enumerate(everyone):
            caught, seconds, equal = found[number]
            assert caught == [(step, "ZeroDivisionError" if rank == at else "PeerFailed")], (
                rank,
                points[number],
            )
            assert seconds < 3
            assert equal


def skipping(rank, shape, copies, text, bad):
    """Rank ``bad`` has a NaN in one parameter's gradient, in step 2."""
    model = sharded(shape, copies=copies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    skipped = []
    with gl.attach(model, text, timeout=20) as attachment:
        for step in range(5):
            optimizer.zero_grad()
            data = batch(rank, step)
            if step == 2 and rank == bad:
                data[:] = float("nan")
            before = shards(model)
            model(data).backward()
            optimizer.step()
            skipped.append(attachment.skipped)
            same = all(torch.equal(a, b) for a, b in zip(before, shards(model), strict=True))
            assert same == attachment.skipped or not any(part.numel() for part in before)
        finite = all(part.isfinite().all() for part in shards(model))
        return skipped, finite, replicas_equal(model, shape, copies), attachment.metrics()["comm/skipped"]


@pytest.mark.parametrize(
    ("shape", "copies", "text"), [((2, 2), False, INT4), ((3,), True, INT4), ((3,), False, "Sharded(Int8())")]
)
def test_nan_on_one_rank_is_skipped_by_all(shape, copies, text):
    ranks = 4 if len(shape) == 2 else 3
    for found in run_ranks(skipping, ranks, shape, copies, text, 1):
        assert found == ([False, False, True, False, False], True, True, 1)


def one_shard(rank):
    """A NaN in the last row of one parameter: in the shard of one rank of each node."""
    model = sharded((2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    seen = []
    with gl.attach(model, "Mean()", timeout=20) as attachment:
        for step in range(3):
            optimizer.zero_grad()
            handle = model.blocks[0].register_forward_hook(
                functools.partial(poisoned, step == 1 and rank == 2)
            )
            plain(model, rank, step)
            handle.remove()
            optimizer.step()
            seen.append(attachment.skipped)
    return seen, all(part.isfinite().all() for part in shards(model))


def poisoned(active, module, inputs, output):
    if active:
        output.register_hook(lambda grad: torch.cat([grad[:, :-1], grad[:, -1:] * float("nan")], 1))
    return output


def test_nan_in_one_shard_is_skipped_by_all():
    assert run_ranks(one_shard, 4) == [([False, True, False], True)] * 4


def skipping_a_part(rank, shape, copies, text, bad, parts, in_closure, without):
    """Backwards that add: all communicate, and one has a NaN on one rank, in step 1; or without step 1. The
    last one may be in the optimizer's closure, as in Lightning."""
    model = sharded(shape, copies=copies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    skipped = []
    with gl.attach(model, text, timeout=20) as attachment:
        for step in range(4):
            if step == 1 and without:
                continue

            def backward(part, step=step):
                data = batch(rank, 100 * step + part)
                if step == 1 and part == bad and rank == 1:
                    data[:] = float("nan")
                model(data).backward()
                skipped.append(attachment.skipped)

            for part in range(parts - 1):
                backward(part)
            if in_closure:
                optimizer.step(functools.partial(backward, parts - 1))
            else:
                backward(parts - 1)
                optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return skipped, shards(model)


@pytest.mark.parametrize(
    ("mesh", "bad", "in_closure"),
    grid(
        MESHES, (0, 1, 2), (False, True),
        quick=[(MESHES[0], 1, True), (MESHES[1], 2, False), (MESHES[2], 0, False)],
    ),
    ids=str,
)  # fmt: skip
def test_a_sum_of_means_with_nan_in_one_is_skipped_by_all(mesh, bad, in_closure):
    shape, copies = mesh
    ranks = 4 if len(shape) == 2 else 2
    arguments = (shape, copies, "Mean()", bad, 3, in_closure)
    found = run_ranks(skipping_a_part, ranks, *arguments, False)
    wanted = run_ranks(skipping_a_part, ranks, *arguments, True)
    for (skipped, weights), (none, expected) in zip(found, wanted, strict=True):
        assert skipped == [3 + bad <= number < 6 for number in range(12)]
        assert not any(none)
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


def differing(rank, shape, copies):
    model = sharded(shape, copies=copies, seed=0 if rank < 2 else 1)
    with pytest.raises(gl.RanksDisagree, match=r"rank 2 of 3 has other weights .* in head\.weight"):
        gl.attach(model, "Mean()", timeout=20)
    model = sharded(shape, copies=copies)
    with gl.attach(model, "Mean()", timeout=20, verify_every=2) as attachment:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plain(model, rank, 0)
        optimizer.step()
        if rank == 2:
            model.head.weight.to_local().detach().add_(1.0)
        with pytest.raises(
            gl.RanksDisagree, match=r"rank 2 of \d has drifted from the others in head\.weight"
        ):
            plain(model, rank, 1)
    return attachment.is_open


def test_replicas_with_other_weights_are_refused_and_drift_is_found():
    assert run_ranks(differing, 3, (3,), True) == [False] * 3


def resumed(rank, shape, copies, text, folder, first):
    """Six steps, or three and three with new objects between."""
    model = sharded(shape, copies=copies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    attachment = gl.attach(model, text, timeout=20)
    for step in range(6):
        if step == first:
            attachment.save(folder)
            attachment.close()
            fresh = sharded(shape, copies=copies, seed=9)
            with torch.no_grad():
                for new, old in zip(fresh.parameters(), model.parameters(), strict=True):
                    new.to_local().copy_(old.to_local())
            model = fresh
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
            attachment = gl.attach(model, text, timeout=20)
            attachment.load(folder)
            assert attachment.step == first
        optimizer.zero_grad()
        plain(model, rank, step)
        optimizer.step()
    attachment.close()
    return shards(model)


POWERSGD = "ErrorFeedback(PowerSGD(1, min_compression_rate=1))"


@pytest.mark.parametrize(
    ("shape", "copies", "text"),
    [
        ((2, 2), False, INT4),
        ((2,), True, POWERSGD),
        pytest.param((2, 2), False, POWERSGD, marks=pytest.mark.slow),
        pytest.param((2,), True, INT4, marks=pytest.mark.slow),
    ],
)
def test_a_resume_is_bit_identical(shape, copies, text, tmp_path):
    ranks = 4 if len(shape) == 2 else 2
    whole = run_ranks(resumed, ranks, shape, copies, text, tmp_path, -1)
    parts = run_ranks(resumed, ranks, shape, copies, text, tmp_path, 3)
    for one, two in zip(whole, parts, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def saved_residual(rank, shape, text, folder):
    model = sharded(shape)
    with gl.attach(model, text, timeout=20) as attachment:
        for step in range(3):
            model.zero_grad()
            plain(model, rank, step)
        attachment.save(folder)
        return attachment.strategy.cross.memory.state_dict()


def loaded_residual(rank, shape, text, folder):
    model = sharded(shape)
    with gl.attach(model, text, timeout=20) as attachment:
        attachment.load(folder)
        return attachment.strategy.cross.memory.state_dict()


OTHER_MESHES = [((2, 2), (2, 1)), ((4, 1), (2, 1)), ((2, 2), (4, 1)), ((2, 1), (2, 3)), ((1, 4), (1, 2))]


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(*each, marks=pytest.mark.slow if n > 1 else ()) for n, each in enumerate(OTHER_MESHES)],
)
def test_another_mesh_keeps_the_sum_of_residuals(before, after, tmp_path):
    old = run_ranks(saved_residual, before[0] * before[1], before, INT4, tmp_path)
    new = run_ranks(loaded_residual, after[0] * after[1], after, INT4, tmp_path)
    one, two = residual_sums(old), residual_sums(new)
    assert one.keys() == two.keys()
    assert any(value.abs().sum() > 0 for value in one.values())
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-6, atol=1e-9)


def refusals(rank):
    found = {}
    for name, shape, text, options in (
        ("feedback on one dimension", (2,), INT4, {}),
        ("hierarchy", (1, 2), f"Hierarchical({INT4})", {}),
        ("weights", (1, 2), "WeightedMean(2.0)", {}),
        ("nodes", (1, 2), INT4, {"ranks_per_node": 1}),
    ):
        model = sharded(shape)
        with pytest.raises(gl.InvalidValue) as caught:
            gl.attach(model, text, timeout=20, **options)
        found[name] = str(caught.value)
        plain(model, rank, 0)  # it is as it was
    with gl.attach(model, "Mean()") as attachment:
        with pytest.raises(gl.WrongState, match="has an attachment already"):
            gl.attach(model, "Mean()")
        adam = torch.optim.Adam(model.parameters())
        with pytest.raises(gl.WrongType, match="with FSDP each rank has a part of the model; use DDP"):
            gl.freeze_moments(adam, attachment, after=2)
        with pytest.raises(gl.WrongType, match="local steps need a full copy"):
            gl.local_steps(model, adam, "Mean()", every=2)
    plain(model, rank, 1)
    return found


def test_what_is_not_possible_is_refused_with_the_way_out():
    for found in run_ranks(refusals, 2):
        assert "or give the model replicas" in found["feedback on one dimension"]
        assert "Attach what is inside" in found["hierarchy"]
        assert "divide the loss" in found["weights"]
        assert "leave it out" in found["nodes"]


def compiled(rank, text):
    """``fully_shard(torch.compile(model))`` keeps the parameters of the root in a group of the wrapper's."""
    torch.manual_seed(0)
    model, mesh = Wide(), mesh_of((2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    outer = fully_shard(torch.compile(model, backend="eager"), mesh=mesh)
    attachment = gl.attach(outer, text, timeout=20) if text else None
    plain(outer, rank, 0)
    names = []
    if attachment is not None:
        names = sorted(parameter.name for parameter in attachment._parameters)
        attachment.close()
    return names, [parameter.grad.to_local() for parameter in model.parameters()]


def test_all_parameters_of_a_model_that_was_compiled_before_it_was_sharded_are_carried():
    texts = (None, "Mean()", "Cast(Mean(), bfloat16)")
    for native, mean, cast in run_ranks(lambda rank: [compiled(rank, text) for text in texts], 2):
        assert mean[0] == sorted(name for name, _ in Wide().named_parameters())
        assert all(torch.equal(a, b) for a, b in zip(native[1], mean[1], strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(native[1], cast[1], strict=True))


def loaded(rank, shape, text):
    """A model that is sharded on the meta device, and gets other parameters afterwards: as transformers'
    ``from_pretrained(distributed_config=...)`` makes it."""
    with torch.device("meta"):
        model = sharded(shape, model=Wide)
    if text:
        with pytest.raises(gl.WrongState, match=r"weight is on the meta device.* then attach"):
            gl.attach(model, text, timeout=20)
    torch.manual_seed(0)
    for (name, own), value in zip(list(model.named_parameters()), Wide().parameters(), strict=True):
        module, _, last = name.rpartition(".")
        value = distribute_tensor(value.detach(), own.device_mesh, own.placements)
        setattr(model.get_submodule(module), last, nn.Parameter(value))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    attachment = gl.attach(model, text, timeout=20) if text else None
    before = shards(model)
    for step in range(3):
        optimizer.zero_grad()
        data = batch(rank, step)
        if step == 1 and text and rank == 1:
            data[:] = float("nan")
        if step != 1 or text:
            model(data).backward()
            optimizer.step()
            if attachment is not None:
                assert attachment.skipped == (step == 1)
    assert not any(torch.equal(a, b) for a, b in zip(before, shards(model), strict=True))
    return shards(model)


def test_parameters_that_replace_those_of_the_meta_device_are_the_ones():
    native, ours = (run_ranks(loaded, 4, (2, 2), text) for text in (None, "Mean()"))
    for theirs, mine in zip(native, ours, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, mine, strict=True))


def used_between(rank, shape, text):
    """What users do with a model before they attach, while it is attached, and after that: evaluate, which
    leaves the parameters of the root whole, and ``to``, which swaps all of them."""
    model = sharded(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)

    def between():
        model.to("cpu")
        with torch.no_grad():
            model(batch(rank, 7))

    between()
    found = []
    for first in (0, 3):
        attachment = gl.attach(model, text, timeout=20)
        for step in range(first, first + 3):
            optimizer.zero_grad()
            data = batch(rank, step)
            if step == first and rank == 1:
                data[:] = float("nan")
            model(data).backward()
            optimizer.step()
            found.append(attachment.skipped)
            between()
        attachment.close()
        between()
    own = [parameter.to_local() for parameter in optimizer.param_groups[0]["params"]]
    assert not hasattr(model.spare, "to_local")  # it is whole
    return found, all(part.isfinite().all() for part in own)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_a_model_may_be_evaluated_and_moved_around_an_attachment(shape):
    ranks = 4 if len(shape) == 2 else 2
    assert run_ranks(used_between, ranks, shape, "Mean()") == [([True, False, False] * 2, True)] * ranks


def at_once(rank, policy):
    """A strategy that needs the whole gradient, where FSDP wants each group's answer."""
    model = sharded((2, 2))
    attachment = gl.attach(model, ClippedMean(0.5), timeout=20)
    plain(model, rank, 0)
    with pytest.raises((gl.InvalidValue, gl.PeerFailed), match="all groups before it can answer for one"):
        plain(model, rank, 1)  # adds to the gradient
    model.zero_grad()
    plain(model, rank, 2)
    attachment.close()
    return True


def test_a_strategy_over_the_whole_gradient_needs_cleared_gradients():
    assert run_ranks(at_once, 4, None) == [True] * 4


def whole_norm(rank, text):
    model = sharded((2, 2))
    with gl.attach(model, text, timeout=20):
        plain(model, rank, 0)
    return nn.utils.clip_grad_norm_(model.parameters(), 1e9).full_tensor().item()


def test_a_sum_over_the_step_is_one_over_the_shards_too(monkeypatch):
    """Each of the two nodes clips its own gradient, so the norm of the mean is at most that limit."""
    assert run_ranks(whole_norm, 4, "Mean()")[0] > 0.02
    for norm in run_ranks(whole_norm, 4, ClippedMean(0.01)):
        assert 0.003 < norm <= 0.01 + 1e-6


def on_streams(rank, shape, copies, text):
    """The lane for NCCL, on the groups of the mesh, which are Gloo's here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_open, "HOST_BACKENDS", ())
        patch.setattr(lane_open, "STREAM_BACKENDS", ("gloo",))
        model = sharded(shape, copies=copies)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        attachment = gl.attach(model, text)
        assert type(attachment._step.lane) is StreamLane
        for step in range(4):
            optimizer.zero_grad()
            plain(model, rank, step)
            optimizer.step()
        attachment.close()
        return shards(model), replicas_equal(model, shape, copies)


@pytest.mark.parametrize(("shape", "copies"), [((2, 2), False), ((2,), True), ((2,), False)], ids=str)
def test_the_lane_for_nccl_uses_the_groups_of_the_mesh(shape, copies):
    ranks = 4 if len(shape) == 2 else 2
    ours = run_ranks(on_streams, ranks, shape, copies, "Mean()")
    for (mine, equal), theirs in zip(ours, run_ranks(without, ranks, shape, copies), strict=True):
        assert equal
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    lossy = "Sharded(Int8())" if len(shape) == 1 and not copies else INT4
    assert all(equal for _, equal in run_ranks(on_streams, ranks, shape, copies, lossy))


def without(rank, shape, copies):
    model = sharded(shape, copies=copies)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        plain(model, rank, step)
        optimizer.step()
    return shards(model)


@dataclass
class Counted(gl.Strategy):
    """Adds up what a strategy was given and what it answered."""

    inner: gl.Strategy
    sums: gl.Memory = field(init=False, default_factory=lambda: gl.Memory(torch.float64, any_shape=True))

    async def reduce(self, bucket):
        self._add("given", bucket)
        reduced = await self.inner.reduce(bucket)
        self._add("arrived", bucket.with_flat(reduced.mean))
        return reduced

    def _add(self, what, bucket):
        for name, tensor in bucket.named().items():
            key = f"{what} {name}"
            before = self.sums.get(key)
            self.sums.put(key, tensor.double() if before is None else before + tensor.double())


CONSERVING = {
    "int4": "ErrorFeedback(Sharded(Int4(block=32)))",
    "top-k": "ErrorFeedback(Gathered(TopK(0.1)))",
    "sign": "ErrorFeedback(Sharded(Sign(block=32), answer=Int2(block=32)))",
    "powersgd": "ErrorFeedback(PowerSGD(1, min_compression_rate=1))",
}


def counted(rank, shape, texts, steps):
    """By strategy: what each parameter's shard was given in all, what arrived, and the residual."""
    found = {}
    for name, text in texts.items():
        model = sharded(shape)
        with gl.attach(model, Counted(gl.parse(text)), timeout=20) as attachment:
            for step in range(steps):
                model.zero_grad()
                plain(model, rank, step)
            strategy = attachment.strategy.cross
            sums = strategy.sums.state_dict()
            kept = strategy.inner.memory.state_dict()
        given = {key.removeprefix("given "): value for key, value in sums.items() if key.startswith("given ")}
        found[name] = {
            key: (value, sums[f"arrived {key}"], kept[key].double()) for key, value in given.items()
        }
    return found


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        ((2, 2), 12),
        pytest.param((3, 1), 30, marks=pytest.mark.slow),
        pytest.param((4, 2), 100, marks=pytest.mark.slow),
    ],
)
def test_what_arrived_and_what_is_kept_is_what_was_given(shape, steps):
    everyone = run_ranks(counted, shape[0] * shape[1], shape, CONSERVING, steps, deadline=250)
    for name in CONSERVING:
        for column in range(shape[1]):
            replicas = [everyone[rank][name] for rank in range(column, shape[0] * shape[1], shape[1])]
            for key in replicas[0]:
                given = sum(replica[key][0] for replica in replicas)
                kept = sum(replica[key][2] for replica in replicas)
                arrived = shape[0] * replicas[0][key][1]
                scale = max(given.abs().max().item(), 1e-6) if given.numel() else 1.0
                torch.testing.assert_close(arrived + kept, given, rtol=0, atol=1e-4 * scale)
                assert name != "int4" or kept.abs().sum() <= 0.5 * given.abs().sum()
