"""Local steps in real processes: laws over the whole catalogue, references, options, checkpoints."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.feed.weight_buckets import fragments_of
from gradlane.local import run_ranks

from ..reference import local_steps as reference
from ..support.catalogue import STRATEGIES
from ..support.grids import dealt
from ..support.training import ComplexWeights, SparseLookup, build, data, flat, replicas_equal

INSIDE = [name for name, make in STRATEGIES.items() if not isinstance(make(), gl.Auto)]  # for whole steps
OFTEN = INSIDE[::6]  # strategies of the quick suite
worlds = pytest.mark.parametrize(
    ("world", "names"),
    [(3, OFTEN), *(pytest.param(world, INSIDE, marks=pytest.mark.slow) for world in (2, 3, 4))],
)


class Small(nn.Module):
    """Two matrices, a vector and BatchNorm's buffers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(24, 12)
        self.norm = nn.BatchNorm1d(12)
        self.b = nn.Linear(12, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.norm(self.a(x)))).square().mean()


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        model(data(rank, step)).backward()
        optimizer.step()


def weights(model):
    return flat([*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())])


# Every strategy


def every_strategy(rank, names):
    """What differs between the ranks at the anchor, in the middle and at the end."""
    wrong = []
    for name in names:
        model = build(Small)
        optimizer = sgd(model.parameters())
        with gl.local_steps(model, optimizer, STRATEGIES[name](), every=3, timeout=20) as local:
            train(model, optimizer, rank, range(7))
            own = weights(model)
            with local.agreed():
                if not replicas_equal([weights(model)]):
                    wrong.append((name, "anchor"))
            if not torch.equal(weights(model), own):
                wrong.append((name, "restored"))
        if not replicas_equal([weights(model)]):
            wrong.append((name, "end"))
    return wrong


@worlds
def test_ranks_are_bit_equal_at_the_anchor(world, names):
    assert run_ranks(every_strategy, world, names, deadline=200) == [[]] * world


SAVED = {"streaming": {"every": 4, "fragments": 2, "delay": 1, "blend": 0.5}, "whole": {"every": 4}}


def run_or_resume(rank, folder, names, save_at, last, resume):
    """The weights at the end of each strategy; saved on the way, or resumed from there in new processes."""
    found = {}
    for number, (name, how) in enumerate(names):
        model = build(Small)
        optimizer = (sgd, adam)[number % 2](model.parameters())
        local = gl.local_steps(model, optimizer, STRATEGIES[name](), timeout=20, **SAVED[how])
        place = f"{folder}/{number}"
        if resume:
            local.load(place)
            train(model, optimizer, rank, range(save_at, last))
        else:
            train(model, optimizer, rank, range(save_at))
            local.save(place)
            train(model, optimizer, rank, range(save_at, last))
        own = weights(model)
        local.finish()
        found[name, how] = (own, weights(model))
        local.close()
    return found


@worlds
def test_twelve_steps_are_five_and_seven(tmp_path, world, names):
    """The save is in the middle of a round; with a delay, one is on its way."""
    arguments = (
        str(tmp_path),
        [(name, ("whole", "streaming")[n % 2]) for n, name in enumerate(names)],
        5,
        12,
    )
    through = run_ranks(run_or_resume, world, *arguments, False, deadline=200)
    resumed = run_ranks(run_or_resume, world, *arguments, True, deadline=200)
    for rank in range(world):
        differ = [
            key for key, both in through[rank].items() if not all(map(torch.equal, both, resumed[rank][key]))
        ]
        assert differ == []


# References


def local_sgd(rank, ddp):
    """H = 1 with the plain mean, against DDP."""
    torch.manual_seed(1)
    model = build(Small)
    plain = DistributedDataParallel(copy.deepcopy(model))
    model = DistributedDataParallel(model) if ddp else model
    both = []
    for trained in (plain, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        local = gl.local_steps(trained, optimizer, "Mean()", every=1) if trained is model else None
        train(trained, optimizer, rank, range(6))
        both.append(flat(trained.parameters()))
        if local is not None:
            local.close()
    return (both[0] - both[1]).abs().max().item()


@pytest.mark.parametrize("ddp", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_one_local_step_is_ddp_to_rounding(world, ddp):
    assert max(run_ranks(local_sgd, world, ddp)) < 1e-6


OUTER = {"Mean()": lambda name, delta: delta}
CASES = {
    "local SGD": {"every": 4},
    "fragments": {"every": 6, "fragments": 3},
    "late": {"every": 4, "delay": 2},
    "late and mixed": {"every": 6, "fragments": 2, "delay": 2, "blend": 0.5},
}


def streaming(rank, options):
    model = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 5))
    optimizer = sgd(model.parameters())
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    local = gl.local_steps(model, optimizer, "Mean()", **options)
    for step in range(14):
        optimizer.zero_grad()
        model(data(rank, step)).square().mean().backward()
        optimizer.step()
    with local.agreed():
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
    local.close()
    return found


@pytest.mark.parametrize(("case", "world"), dealt(CASES, [4, 3, 2]))
def test_rounds_are_those_of_the_reference(case, world):
    options = CASES[case]
    model = nn.Sequential(nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 5))
    torch.manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    fragments = [
        [name for bucket in buckets for name in bucket.names]
        for buckets in fragments_of(
            dict(model.named_parameters()), gl.LocalSteps(gl.Mean(), **options), 1 << 20
        )
    ]
    expected = reference.streamed(
        model, sgd, world, lambda model, rank, step: model(data(rank, step)).square().mean(), steps=14,
        every=options["every"], fragments=fragments, delay=options.get("delay", 0),
        blend=options.get("blend", 0.0), outer=OUTER["Mean()"],
    )  # fmt: skip
    for found in run_ranks(streaming, world, options):
        for name, anchor in expected.items():
            assert torch.allclose(found[name], anchor, atol=2e-6), name


# Models and options


def kinds_of_models(rank):
    """Sparse, complex and narrow weights, and one of them in DDP, bit-equal at the end."""
    equal = {}
    for name, make in {
        "sparse": lambda: build(SparseLookup),
        "complex": lambda: build(ComplexWeights),
        "awkward": build,
        "fp64": lambda: build(dtype=torch.float64),
        "bf16": lambda: build(dtype=torch.bfloat16),
        "channels last": lambda: build(Convolution).to(memory_format=torch.channels_last),
    }.items():
        model = make()
        dtype = next(p.dtype for p in model.parameters() if not p.is_complex())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int8(block=32)))", every=2):
            for step in range(5):
                optimizer.zero_grad()
                model(data(rank, step, dtype)).backward()
                optimizer.step()
        equal[name] = replicas_equal([flat(model.parameters())])
    return equal


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(2, 4, 2)

    def forward(self, x):
        return self.layer(x.view(-1, 2, 3, 4)).square().mean()


def test_all_kinds_of_weights():
    for equal in run_ranks(kinds_of_models, 3):
        assert all(equal.values()), equal


def narrow(rank):
    """Without any training, nothing may change: rounding to bf16 is no progress."""
    model = nn.Linear(64, 64, dtype=torch.bfloat16)
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    local = gl.local_steps(model, optimizer, "Mean()", every=1)
    local.strategy.anchor.load_state_dict(
        {name: p.detach().float() + 1e-4 for name, p in model.named_parameters()}
    )
    before = local.strategy.anchor.state_dict()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(before[name])
    for _ in range(3):
        optimizer.step()  # no gradients: no weight moves
    after = local.strategy.anchor.state_dict()
    local.close()
    return all(torch.equal(before[name], after[name]) for name in before)


def test_the_anchor_of_narrow_weights_is_an_fp32_master():
    assert run_ranks(narrow, 2) == [True, True]


def with_buffers(rank, buffers):
    model = build(Small)
    optimizer = sgd(model.parameters())
    local = gl.local_steps(model, optimizer, "Mean()", every=2, buffers=buffers)
    train(model, optimizer, rank, range(2))
    same = replicas_equal([model.norm.running_mean]), int(model.norm.num_batches_tracked)
    local.close()
    return same


def test_buffers_are_averaged_or_left_alone():
    assert run_ranks(with_buffers, 3, "mean") == [(True, 2)] * 3
    assert run_ranks(with_buffers, 3, "own") == [(False, 2)] * 3


def warmed_up(rank, ddp):
    """During the warm-up the ranks are together after every step; then they are not; DDP is restored."""
    model = build(Small)
    model = DistributedDataParallel(model) if ddp else model
    optimizer = sgd(model.parameters())
    together = []
    with gl.local_steps(model, optimizer, "Mean()", every=3, warmup=2) as local:
        for step in range(5):
            train(model, optimizer, rank, [step])
            together.append(replicas_equal(model.parameters()))
        figures = local.metrics()
    settings = (model.require_backward_grad_sync, model.broadcast_buffers) if ddp else None
    return together, settings, figures["local/rounds"], figures["local/steps"]


@pytest.mark.parametrize("ddp", [False, True])
def test_a_warm_up_averages_gradients(ddp):
    for together, settings, rounds, steps in run_ranks(warmed_up, 3, ddp):
        assert together == [True, True, False, False, True]
        assert settings in (None, (True, True))
        assert (rounds, steps) == (1, 5)


def in_nodes(rank, ddp):
    """Two nodes of two ranks: those of a node stay together."""
    model = build(Small)
    model = DistributedDataParallel(model) if ddp else model
    optimizer = sgd(model.parameters())
    with gl.local_steps(model, optimizer, "Mean()", every=3, inside="NodeMean()", ranks_per_node=2):
        train(model, optimizer, rank, range(2))
        mine = flat(model.parameters())
        everyone = [torch.empty_like(mine) for _ in range(4)]
        torch.distributed.all_gather(everyone, mine)
    return [torch.equal(mine, other) for other in everyone]


@pytest.mark.parametrize("ddp", [False, True])
def test_the_ranks_of_a_node_can_stay_together(ddp):
    first, second = [True, True, False, False], [False, False, True, True]
    assert run_ranks(in_nodes, 4, ddp) == [first, first, second, second]


def swapped(rank):
    model = build(Small)
    optimizer = sgd(model.parameters())
    with gl.local_steps(model, optimizer, "Mean()", every=2) as local:
        train(model, optimizer, rank, range(3))
        local.swap("ErrorFeedback(Sharded(Int8(block=32)))")
        train(model, optimizer, rank, range(3, 8))
        text = gl.describe(local.strategy, short=True)
    return replicas_equal([weights(model)]), text


def test_the_strategy_inside_can_be_swapped():
    for equal, text in run_ranks(swapped, 3):
        assert equal
        assert text == "LocalSteps(ErrorFeedback(Sharded(Int8(block=32))), every=2)"


def measured(rank):
    model = build(Small)
    optimizer = sgd(model.parameters())
    with gl.local_steps(model, optimizer, "Mean()", every=4, verify_every=1) as local:
        train(model, optimizer, rank, range(12))
        return local.metrics()


def test_metrics_count_local_steps_and_rounds():
    for figures in run_ranks(measured, 3):
        assert (figures["local/steps"], figures["local/rounds"]) == (12, 3)
        assert 3.3 < figures["local/ratio"] < 4  # the roll call and the buffers are counted
        assert 0 < figures["local/drift"] < 3
        assert -1 <= figures["local/cosine"] <= 1
        assert figures["local/cosine"] != 0


def frozen(rank, folder, resume):
    """Adam's second moment is frozen at the end of the warm-up, before the ranks part."""
    model = build(Small)
    optimizer = adam(model.parameters())
    local = gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int4(block=32)))", every=3, warmup=4)
    if resume:
        local.load(folder)
    for step in range(local.local_steps, 12):
        if step == 4:
            gl.freeze_moments(optimizer)
        train(model, optimizer, rank, [step])
        if step == 5 and not resume:
            local.save(folder)
    own, group = weights(model), optimizer.param_groups[0]
    local.close()
    return own, group["frozen_moments"], group["betas"]


def test_frozen_moments_go_on_in_new_processes(tmp_path):
    through = run_ranks(frozen, 3, str(tmp_path), False)
    resumed = run_ranks(frozen, 3, str(tmp_path), True)
    for one, other in zip(through, resumed, strict=True):
        assert torch.equal(one[0], other[0])
        assert one[1:] == other[1:]
    assert not torch.equal(through[0][0], through[1][0])


def another_world(rank, folder, save):
    model = build(Small)
    optimizer = sgd(model.parameters())
    with gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int4(block=32)))", every=4) as local:
        if save:
            train(model, optimizer, rank, range(6))
            local.save(folder)
            return local.strategy.anchor.state_dict()
        local.load(folder)
        found = {name: p.detach().clone() for name, p in model.named_parameters()}
        train(model, optimizer, rank, range(6, 9))
    return found, local.local_steps, replicas_equal([weights(model)])


def test_another_number_of_ranks_goes_on_from_the_anchor(tmp_path):
    anchor = run_ranks(another_world, 3, str(tmp_path), True)[0]
    for world in (2, 4):
        for found, steps, equal in run_ranks(another_world, world, str(tmp_path), False):
            assert all(torch.equal(found[name], anchor[name]) for name in anchor)
            assert steps == 9
            assert equal


def sent_by_step(rank, options):
    """Bytes of this rank after each step of the optimizer, and the dry run of that step."""
    model = DistributedDataParallel(build(Small))
    optimizer = sgd(model.parameters())
    strategy = gl.LocalSteps(gl.ErrorFeedback(gl.Sharded(gl.Int4(block=32))), buffers="own", **options)
    sent, priced = [0], []
    local = gl.local_steps(model, optimizer, strategy)
    for step in range(9):
        train(model, optimizer, rank, [step])
        figures = local.metrics()
        sent.append(round(figures["local/bytes_per_step"] * figures["local/steps"]))
        priced.append(gl.dry_run(strategy, model.module, 3, step=step).wire_bytes)
    local.close()
    return [after - before for before, after in itertools.pairwise(sent)], priced


@pytest.mark.parametrize(
    "options",
    [
        {"every": 3},
        {"every": 4, "fragments": 2, "warmup": 2, "first": gl.Sharded(gl.Int8(block=32))},
    ],
)
def test_a_dry_run_prices_a_local_step_a_round_and_the_warm_up(options):
    warmup, period = options.get("warmup", 0), options["every"] // options.get("fragments", 1)
    for sent, priced in run_ranks(sent_by_step, 3, options):
        rounds = [step for step in range(9) if step >= warmup and (step + 1 - warmup) % period == 0]
        roll_call = 64 * (3 - 1)
        assert sent == [price + roll_call * (step in rounds) for step, price in enumerate(priced)]
        assert [step for step, price in enumerate(priced) if price] == [*range(warmup), *rounds]


def another_every(rank, folder, save, strict):
    model = build(Small)
    optimizer = sgd(model.parameters())
    every = 4 if save else 3
    with gl.local_steps(model, optimizer, "ErrorFeedback(Sharded(Int4(block=32)))", every=every) as local:
        if save:
            train(model, optimizer, rank, range(6))
            local.save(folder)
            return weights(model)
        try:
            local.load(folder, strict=strict)
        except gl.InvalidValue as error:
            return str(error)
        found = weights(model)
        train(model, optimizer, rank, range(6, 11))
    return found, local.local_steps, local.step, replicas_equal([weights(model)])


def test_another_number_of_steps_between_rounds_loads_what_fits(tmp_path):
    own = run_ranks(another_every, 3, str(tmp_path), True, True)
    for refusal in run_ranks(another_every, 3, str(tmp_path), False, True):
        assert "call local_steps with the same options" in refusal
        assert "strict=False" in refusal
    for before, (found, steps, rounds, equal) in zip(
        own, run_ranks(another_every, 3, str(tmp_path), False, False), strict=True
    ):
        assert torch.equal(found, before)  # in the middle of a round
        assert (steps, rounds) == (11, 3)  # after steps 4 and 9, and at the end
        assert equal
