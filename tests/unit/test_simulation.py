from dataclasses import dataclass

import pytest
import torch
from torch import nn

import gradlane as gl
from gradlane.core.events import wire_bytes
from gradlane.simulate.after import same_bits


def gradients(*values):
    return [{"a": torch.tensor([float(value)])} for value in values]


def test_a_deadlock_is_an_error():
    @gl.strategy_from
    async def some_ask(bucket):
        return await gl.all_reduce(bucket.flat) if bucket.rank else bucket.flat

    @gl.strategy_from
    async def differently(bucket):
        return await gl.all_reduce(bucket.flat, op="max" if bucket.rank else "mean")

    with pytest.raises(gl.RanksDisagree, match=r"rank 1 asks for all_reduce mean.*, rank 0 has finished"):
        gl.Simulation(some_ask, world=2).step(gradients(1, 2))
    with pytest.raises(gl.RanksDisagree, match=r"rank 0 asks for all_reduce mean.*rank 1 for all_reduce max"):
        gl.Simulation(differently, world=2).step(gradients(1, 2))


def test_ranks_that_bring_different_gradients_disagree():
    simulation = gl.Simulation("Mean()", world=2)
    with pytest.raises(gl.RanksDisagree, match="rank 0 gives"):
        simulation.step([{"a": torch.zeros(2)}, {"a": torch.zeros(3)}])
    with pytest.raises(gl.InvalidValue, match="gradients of 1 ranks for world=2"):
        simulation.step(gradients(1))


def test_each_rank_has_its_own_copy():
    strategy = gl.WeightedMean(1.0)
    assert all(own is not strategy for own in gl.Simulation(strategy, world=2).strategies)


def test_scopes():
    @dataclass
    class Within(gl.Strategy):
        scope: str
        alike = False  # as Noop: all ranks of a scope agree, and no more

        async def reduce(self, bucket):
            return gl.Reduced(await gl.all_reduce(bucket.flat, over=self.scope))

    values = gradients(0, 2, 10, 20, 100, 300)
    answers = gl.Simulation(Within("node"), world=6, node_size=2).step(values)
    assert [answer["a"].item() for answer in answers] == [1, 1, 15, 15, 200, 200]
    answers = gl.Simulation(Within("cross"), world=6, node_size=3).step(values)
    assert [answer["a"].item() for answer in answers] == [10, 51, 155, 10, 51, 155]


def test_sparse_gradients_have_a_bucket_of_their_own():
    def table(row):
        return torch.sparse_coo_tensor([[row]], [[2.0, 4.0]], (3, 2), check_invariants=True)

    simulation = gl.Simulation("Mean()", world=2)
    answers = simulation.step([{"table": table(rank), "w": torch.ones(2)} for rank in (0, 1)])
    assert answers[1]["table"].to_dense().tolist() == [[1, 2], [1, 2], [0, 0]]
    assert [event.parameters for event in simulation.events] == [("w",), ("table",)]
    with pytest.raises(gl.WrongType, match="Cast cannot carry the sparse gradient of 'table'"):
        gl.Simulation("Cast(Mean(), float16)", world=1).step([{"table": table(0)}])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world": 0}, "world=0 has no ranks"),
        ({}, "world is missing"),
        ({"world": 4, "node_size": 3}, "node_size=3 does not divide world=4"),
    ],
)
def test_impossible_worlds(arguments, message):
    with pytest.raises(gl.InvalidValue, match=message):
        gl.Simulation(gl.Mean(), **arguments)


def test_simulation_of_something_else():
    with pytest.raises(gl.WrongType, match="got dict"):
        gl.Simulation({}, world=2)
    with pytest.raises(gl.InvalidValue, match="world=3, but 2 strategies"):
        gl.Simulation([gl.Mean(), gl.Mean()], world=3)


def test_a_strategy_may_await_requests_only():
    class Other:
        def __await__(self):
            return (yield "something else")

    @gl.strategy_from
    async def waits(bucket):
        return await Other()

    with pytest.raises(gl.WrongType, match=r"reduce awaited an object of type str; .*no event loop"):
        gl.Simulation(waits, world=1).step(gradients(1))
    with pytest.raises(gl.WrongType, match=r"awaited an object of type str"):
        gl.Simulation(gl.Cast(waits, torch.float16), world=1).step(gradients(1))


@dataclass
class Returns(gl.Strategy):
    value: object

    async def reduce(self, bucket):
        return self.value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"returned nothing \(None\); return gradlane.Reduced"),
        (torch.zeros(1), "returned an object of type Tensor; return gradlane.Reduced"),
        (gl.Reduced(3.0), "the mean is a tensor"),
        (gl.Reduced(torch.zeros(2)), r"shape \(2,\) for a bucket of torch.float32 of shape \(1,\)"),
        (gl.Reduced(torch.zeros(1).half()), "returned torch.float16"),
    ],
)
def test_wrong_answers_are_named(value, message):
    with pytest.raises(gl.WrongType, match=message):
        gl.Simulation([Returns(value)]).step(gradients(1))


def test_reduce_must_be_async():
    class Plain(gl.Strategy):
        def reduce(self, bucket):
            return gl.Reduced(bucket.flat)

    with pytest.raises(gl.WrongType, match="write `async def reduce`"):
        gl.Simulation([Plain()]).step(gradients(1))


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (lambda: gl.all_reduce(torch.zeros(1), op="avg"), gl.InvalidValue, "op='avg' is not known"),
        (lambda: gl.all_reduce(torch.zeros(1), over="rack"), gl.InvalidValue, "over='rack' is not known"),
        (lambda: gl.all_reduce([1.0]), gl.WrongType, "takes a tensor, got list"),
        (lambda: gl.all_reduce(torch.zeros(1, dtype=torch.int8)), gl.InvalidValue, "8-bit integers wrap"),
        (lambda: gl.all_reduce(torch.zeros(1, dtype=torch.int32)), gl.InvalidValue, "use op='sum'"),
        (lambda: gl.all_gather(torch.zeros(1)), gl.WrongType, r"write \(tensor,\)"),
        (lambda: gl.all_to_all([torch.zeros(1)]), gl.WrongType, r"write \(tensor,\)"),
        (lambda: gl.all_to_all([(torch.zeros(1),)]), gl.InvalidValue, "for each of 2 ranks, got 1"),
    ],
)
def test_impossible_requests(request_, error, message):
    @gl.strategy_from
    async def asks(bucket):
        await request_()
        return bucket.flat

    with pytest.raises(error, match=message):
        gl.Simulation(asks, world=2).step(gradients(1, 2))


def test_dry_run_counts_elements_bytes_and_wire():
    trace = gl.dry_run(gl.Mean(), {"a": (10, 10), "b": ()}, world=4)
    assert (trace.collectives, trace.payload_elements, trace.payload_bytes) == (1, 101, 404)
    assert trace.wire_bytes == 606
    assert trace.raw_bytes == 404
    assert "1 collectives, 101 elements" in str(trace)


def test_dry_run_of_a_module_in_buckets_and_at_a_step():
    module = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10, bias=False))
    module[1].weight.requires_grad_(False)
    strategy = gl.After(5, then=gl.Cast(gl.Mean(), torch.float16))
    assert gl.dry_run(strategy, module, world=2, step=4).payload_bytes == 440
    assert gl.dry_run(strategy, module, world=2, step=5, bucket_bytes=400).payload_bytes == 220
    assert gl.dry_run(strategy, module, world=2, step=5, bucket_bytes=400).collectives == 2


def test_dry_run_asks_nobody_for_weights_and_touches_nothing():
    def not_now():
        raise AssertionError

    assert gl.dry_run(gl.WeightedMean(not_now), {"a": 9}, world=2).payload_elements == 10


def test_dry_run_says_so_where_a_strategy_needs_numbers():
    @gl.strategy_from
    async def looks(bucket):
        if bucket.flat.sum().item() > 0:
            return await gl.all_reduce(bucket.flat)
        return bucket.flat

    with pytest.raises(gl.InvalidValue, match="the strategy looks at numbers, a dry run has none"):
        gl.dry_run(looks, {"a": 3}, world=2)


def test_dry_run_refuses_nonsense():
    with pytest.raises(gl.WrongType, match="shapes is a list"):
        gl.dry_run(gl.Mean(), [3], world=2)
    with pytest.raises(gl.InvalidValue, match="step=-1"):
        gl.dry_run(gl.Mean(), {"a": 3}, world=2, step=-1)
    with pytest.raises(gl.InvalidValue, match="bucket_bytes=0 holds nothing"):
        gl.dry_run(gl.Mean(), {"a": 3}, world=2, bucket_bytes=0)
    with pytest.raises(gl.WrongType, match="got a int, not a strategy; write gradlane"):
        gl.dry_run(3, {"a": 3}, world=2)


@pytest.mark.parametrize(
    ("kind", "size", "expected"),
    [("all_reduce", 2, 1200), ("all_reduce", 4, 1800), ("all_gather", 4, 3600), ("all_to_all", 4, 900),
     ("all_reduce", 1, 0), ("all_gather", 1, 0)],
)  # fmt: skip
def test_wire_bytes_by_algorithm(kind, size, expected):
    assert wire_bytes(kind, 1200, size) == expected


def test_a_step_sum_is_over_all_buckets_whatever_comes_before_and_after():
    sums = []

    @gl.strategy_from
    async def twice(bucket):
        flat = await gl.all_reduce(bucket.flat)
        once = await gl.step_sum(torch.tensor([bucket.index, 1.0]))
        flat = await gl.all_reduce(flat)
        sums.append((bucket.index, once.tolist(), (await gl.step_sum(once)).tolist()))
        return flat

    shapes = dict.fromkeys("abc", (4,))
    ranks = gl.Simulation(twice, world=2, bucket_bytes=16)
    ranks.step([{name: torch.ones(shape) for name, shape in shapes.items()}] * 2)
    assert sums == [(n, [3.0, 3.0], [9.0, 9.0]) for n in (0, 0, 1, 1, 2, 2)]
    trace = gl.dry_run(twice, shapes, world=2, bucket_bytes=16)
    assert [(e.bucket, e.phase) for e in trace.events] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert list(trace.events) == ranks.events


def test_ranks_that_do_not_all_wait_for_the_step_disagree():
    @gl.strategy_from
    async def some(bucket):
        if bucket.rank:
            await gl.step_sum(torch.ones(1))
        return bucket.flat

    with pytest.raises(
        gl.RanksDisagree, match="rank 1 waits for the step's other buckets, rank 0 has finished"
    ):
        gl.Simulation(some, world=2).step([{"w": torch.ones(2)}] * 2)


def test_buckets_that_add_up_different_things_are_told():
    @gl.strategy_from
    async def different(bucket):
        await gl.step_sum(torch.ones(1 + bucket.index))
        return bucket.flat

    grads = [{"a": torch.ones(4), "b": torch.ones(4)}] * 2
    with pytest.raises(gl.WrongType, match=r"step_sum of torch.float32 \[2\], an earlier bucket gave"):
        gl.Simulation(different, world=2, bucket_bytes=16).step(grads)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_strategy_that_forgets_its_collective_is_told(world):
    @gl.strategy_from
    async def forgets(bucket):
        return bucket.flat * 2

    @gl.strategy_from
    async def adds_its_own(bucket):
        return await gl.all_reduce(bucket.flat) + bucket.rank

    values = gradients(*range(world))
    with pytest.raises(
        gl.RanksDisagree, match=r"ranks 0 and 1 have different results for 'a'.*did reduce forget"
    ):
        gl.Simulation(forgets, world=world).step(values)
    with pytest.raises(gl.RanksDisagree, match="never by a rank's own values"):
        gl.Simulation(adds_its_own, world=world).step(values)
    gl.Simulation("Noop()", world=world).step(values)
    gl.Simulation("After(1, Mean(), first=Noop())", world=world).step(values)


def test_the_sign_of_a_zero_is_a_bit_and_one_nan_is_like_another():
    zero = torch.tensor([0.0, torch.nan])
    assert same_bits(zero, torch.tensor([0.0, -torch.nan]))
    assert not same_bits(zero, torch.tensor([-0.0, torch.nan]))
    assert not same_bits(zero.half(), torch.tensor([0.0, 1.0]).half())


KEPT = {
    "all_gather": lambda bucket: gl.all_gather((bucket.flat.clone(),)),
    "all_to_all": lambda bucket: gl.all_to_all([(bucket.flat.clone(),)] * bucket.world),
}


@pytest.mark.parametrize("what", [*KEPT, "flat", "empty"])
def test_what_is_kept_beyond_its_step_is_poison(what):
    """On a network the next step writes over it, with something else on every rank."""

    @dataclass
    class Keeps(gl.Strategy):
        memory: gl.Memory

        async def reduce(self, bucket):
            mean = await gl.all_reduce(bucket.flat.clone())
            before = self.memory.get("last")
            answer = gl.Reduced(mean if before is None else mean + before)
            if what == "flat":
                kept = bucket.flat.copy_(mean)
            elif what == "empty":
                kept = bucket.empty("mean", mean.numel()).copy_(mean)
            else:
                kept = (await KEPT[what](bucket))[1 - bucket.rank][0].copy_(mean)
            self.memory.put("last", kept)
            return answer

    ranks = gl.Simulation(Keeps(gl.Memory()), world=2)
    assert ranks.step(gradients(1, 3))[0]["a"].item() == 2
    assert ranks.step(gradients(1, 3))[0]["a"].isnan().all()


def test_too_few_ranks_for_a_rule_are_told_before_the_first_step():
    for strategy in (
        "Combined(Krum(1))",
        "After(9, Sharded(Raw(), TrimmedMean(1)))",
        "Combined(NNM(0, then=Krum(1)))",
    ):
        with pytest.raises(gl.InvalidValue, match="=1"):
            gl.Simulation(strategy, world=2)
        with pytest.raises(gl.InvalidValue, match="=1"):
            gl.dry_run(strategy, {"a": 3}, world=2)
        gl.Simulation(strategy, world=1)
        gl.Simulation(strategy, world=5)


def test_two_ranks_with_one_memory_are_refused():
    own = gl.parse("ErrorFeedback(Gathered(TopK()))")
    with pytest.raises(gl.WrongState, match="two ranks of a simulation share"):
        gl.Simulation([own, own])
    gl.Simulation([gl.Mean()] * 2)
    both = gl.Route({"a": own}, otherwise=own)  # in one rank: fine
    gl.Simulation([both, gl.Mean()])
