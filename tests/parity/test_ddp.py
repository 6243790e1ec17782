"""gradlane against DDP without a hook, in real processes on Gloo."""

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.catalogue import STRATEGIES
from ..support.training import (
    Awkward,
    ComplexWeights,
    SparseLookup,
    build,
    data,
    flat,
    replicas_equal,
    same,
    train,
)

MEANS = ("Mean()", "compat allreduce")
SMALL = {"bucket_cap_mb": 0.004}  # about one layer a bucket

SETTINGS = {
    "one bucket": {},
    "many buckets": SMALL,
    "many buckets, random delays": {**SMALL, "delays": True},
    "bucket view": {**SMALL, "gradient_as_bucket_view": True},
    "static graph": {**SMALL, "static_graph": True},
    "static graph, bucket view": {**SMALL, "static_graph": True, "gradient_as_bucket_view": True},
    "find unused": {
        **SMALL,
        "find_unused_parameters": True,
        "make": functools.partial(build, sometimes=True),
    },
    "no_sync": {**SMALL, "accumulate": 3},
    "fp64": {"make": functools.partial(build, dtype=torch.float64), "dtype": torch.float64, **SMALL},
    "bf16": {"make": functools.partial(build, dtype=torch.bfloat16), "dtype": torch.bfloat16, **SMALL},
    "fp16": {"make": functools.partial(build, dtype=torch.float16), "dtype": torch.float16, **SMALL},
    "sparse embedding": {"make": functools.partial(build, SparseLookup)},
    "complex": {"make": functools.partial(build, ComplexWeights)},
}


def compare_with_plain(rank, names):
    outcomes = {}
    for name in names:
        plain = train(rank, None, **SETTINGS[name])
        for how in MEANS:
            got = train(rank, how, **SETTINGS[name])
            pairs = zip([*plain[0], plain[1]], [*got[0], got[1]], strict=True)
            close = all(torch.allclose(flat(a), flat(b), rtol=1e-5, atol=1e-7) for a, b in pairs)
            outcomes[name, how] = (same(plain, got), close, replicas_equal(got[1]))
    return outcomes


@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_mean_is_ddp(world):
    # bf16 and fp16 round at every step, so only the two-rank runs, which are bit-equal, compare
    names = [name for name in SETTINGS if world == 2 or name not in ("bf16", "fp16")]
    for outcomes in run_ranks(compare_with_plain, world, names, deadline=120):
        for case, (bit_equal, close, replicas) in outcomes.items():
            assert replicas, case
            assert close, case
            assert bit_equal or world > 2, case


def one_of_each_kind():
    """The first strategy of each outermost class: a lane opens for each, which takes time."""
    return list({type(make()): name for name, make in reversed(STRATEGIES.items())}.values())


def every_strategy(rank, names):
    drift = []
    for name in names:
        ddp = DistributedDataParallel(build(), **SMALL)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with gl.attach(ddp, STRATEGIES[name](), ranks_per_node=2, timeout=20):
            for step in range(4):
                optimizer.zero_grad()
                ddp(data(rank, step)).backward()
                optimizer.step()
                if not replicas_equal(ddp.parameters()):
                    drift.append((name, step))
    return drift


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_replicas_are_bit_equal_after_every_step(world):
    assert run_ranks(every_strategy, world, list(STRATEGIES), deadline=240) == [[]] * world


def test_replicas_are_bit_equal_with_a_strategy_of_each_kind():
    assert run_ranks(every_strategy, 4, one_of_each_kind(), deadline=120) == [[]] * 4


def in_both_worlds(rank, world):
    """The same gradients through the simulator and through DDP, for every strategy."""
    differences = {}
    for name, make in STRATEGIES.items():
        ddp = DistributedDataParallel(build(), **SMALL)
        events = []
        raw = {}
        for other in range(world):
            model = build()
            model(data(other, 0)).backward()
            raw[other] = {key: p.grad.clone() for key, p in model.named_parameters() if p.requires_grad}
        with gl.attach(ddp, make(), observer=events.append, ranks_per_node=1, timeout=20) as attachment:
            ddp(data(rank, 0)).backward()
            metrics = attachment.metrics()
        # DDP's buckets, as its own events tell them, in one simulated step each
        layouts = list(dict.fromkeys(event.parameters for event in events))
        worst, trace = 0.0, []
        for index, parameters in enumerate(layouts):
            ranks = gl.Simulation(make(), world=world, node_size=1)
            answer = ranks.step([{key: raw[other][key] for key in parameters} for other in range(world)])[
                rank
            ]
            real = dict(ddp.module.named_parameters())
            for key, value in answer.items():
                worst = max(worst, (value - real[key].grad).abs().max().item())
            priced = gl.dry_run(
                make(), {key: raw[0][key].shape for key in parameters}, world=world, node_size=1
            )
            assert list(priced.events) == ranks.events
            trace += [
                (index, e.phase, e.kind, e.op, e.over, e.payload_bytes, e.wire_bytes) for e in priced.events
            ]
        if name != "route":  # its parts are events of their own, so buckets cannot be told from events
            assert trace == [
                (e.bucket, e.phase, e.kind, e.op, e.over, e.payload_bytes, e.wire_bytes) for e in events
            ], name
        assert metrics["comm/bytes_wire"] == sum(event.wire_bytes for event in events)
        assert metrics["comm/collectives"] == len(events)
        differences[name] = worst
    return differences


def test_simulator_dry_run_and_ddp_agree():
    for differences in run_ranks(in_both_worlds, 2, 2, deadline=240):
        assert all(worst == 0.0 for worst in differences.values()), differences  # bit for bit


def uneven(rank, how, divide):
    """DDP.join: rank r has 2 + 2r batches."""
    make = functools.partial(build, Awkward)
    ddp = DistributedDataParallel(make(), **SMALL)
    attachment = None if how is None else gl.attach(ddp, how, timeout=20)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            ddp(data(rank, step)).backward()
            optimizer.step()
    if attachment is not None:
        attachment.close()
    return [p.detach().clone() for p in ddp.parameters()]


def join_both_ways(rank):
    return {
        divide: torch.equal(flat(uneven(rank, None, divide)), flat(uneven(rank, "Mean()", divide)))
        for divide in (True, False)
    }


def test_join_with_both_divisors():
    for outcome in run_ranks(join_both_ways, 2, deadline=60):
        assert all(outcome.values()), outcome


def join_weighted(rank):
    """A rank that has joined weighs nothing, whatever its weight function says."""
    ddp = DistributedDataParallel(build())
    grads = []
    with gl.attach(ddp, gl.WeightedMean(lambda: 3.0), timeout=20), ddp.join():
        for step in range(1 + rank):
            ddp.zero_grad()
            ddp(data(rank, step)).backward()
            grads.append(flat([p.grad for p in ddp.parameters() if p.requires_grad]))
    if rank == 1:
        alone = build()
        alone(data(1, 1)).backward()
        mine = flat([p.grad for p in alone.parameters() if p.requires_grad])
        torch.testing.assert_close(grads[1], mine, rtol=1e-5, atol=1e-7)
    return True


def test_joined_ranks_weigh_nothing():
    assert run_ranks(join_weighted, 2) == [True, True]


def test_alone():
    for outcomes in run_ranks(compare_with_plain, 1, ["many buckets", "complex"]):
        assert all(all(outcome) for outcome in outcomes.values()), outcomes


def on_a_subgroup(rank):
    """Ranks 1 and 3 train together, rank 0 and 2 do not: two lanes on two subgroups."""
    odd = torch.distributed.new_group([1, 3])
    even = torch.distributed.new_group([0, 2])
    group = odd if rank % 2 else even
    plain = train(rank, None, group=group, **SMALL)
    got = train(rank, "Mean()", group=group, **SMALL)
    world = train(rank, "Mean()", **SMALL)
    return same(plain, got), same(plain, world)


def test_ddp_on_a_subgroup():
    assert run_ranks(on_a_subgroup, 4) == [(True, False)] * 4


def two_models(rank):
    plain = [train(rank, None, make=functools.partial(build, seed=seed), **SMALL) for seed in (1, 2)]
    models = [DistributedDataParallel(build(seed=seed), **SMALL) for seed in (1, 2)]
    attachments = [gl.attach(models[0], "Mean()"), gl.attach(models[1], "Cast(Mean(), float32)")]
    optimizer = torch.optim.SGD([p for m in models for p in m.parameters()], lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        (models[0](data(rank, step)) + models[1](data(rank, step))).backward()  # one backward for both
        optimizer.step()
    for attachment in attachments:
        attachment.close()
    return [
        torch.equal(flat(model.parameters()), flat(alone[1]))
        for model, alone in zip(models, plain, strict=True)
    ]


def test_two_models_at_once():
    assert run_ranks(two_models, 2) == [[True, True]] * 2


def compiled(rank, backend):
    results = []
    for inside in (True, False):
        weights = []
        for how in (None, "Mean()"):
            torch._dynamo.reset()
            module = build(depth=2)
            ddp = DistributedDataParallel(torch.compile(module, backend=backend) if inside else module)
            attachment = None if how is None else gl.attach(ddp, how, timeout=60)
            step_of = ddp if inside else torch.compile(ddp, backend=backend)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
            for step in range(3):
                optimizer.zero_grad()
                step_of(data(rank, step)).backward()
                optimizer.step()
            if attachment is not None:
                assert attachment.metrics()["comm/steps"] == 3
                attachment.close()
            weights.append(flat(module.parameters()))
        results.append(torch.equal(*weights))
    return results


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler
@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("aot_eager", "inductor"))]
)
def test_compiled_modules(backend):
    assert run_ranks(compiled, 2, backend, deadline=240) == [[True, True]] * 2
