"""What error feedback keeps, what it has sent and what has decayed are the gradients, always."""

import dataclasses
import itertools

import pytest
import torch

import gradlane as gl
from gradlane.strategies.encoding import SALT
from gradlane.strategies.feedback import squared_norm
from gradlane.strategies.text import saved_by

from ..support.catalogue import STRATEGIES, WITH_FEEDBACK, GatheredMean, decayed, median
from ..support.grids import dealt, grid
from .test_laws import SHAPES, gradients, simulation

ROUGH = {
    "int2 feedback bf16": "its memory rounds to bf16",
    "powersgd by name, bf16 memory": "its memory rounds to bf16",
    "acpsgd, bf16 memory": "its memory rounds to bf16",
    "powersgd decay, bf16 memory": "its memory rounds to bf16",
    "powersgd bf16": "sums on the wire round to bf16",
    "acpsgd bf16": "sums on the wire round to bf16",
    "bf16 feedback": "sums on the wire round to bf16",
    "bf16 decay": "sums on the wire round to bf16",
}
"""The exceptions, as the docs have them: what this rounding drops nobody keeps."""


BLOCKS = {"a.weight": (24, 32), "a.bias": (40,)}
"""Some blocks of 32 for each of eight ranks, but for the last."""
STEPS = 200


def with_outliers(world, step):
    """A steady gradient below the noise, and in every block an element that is far above both."""
    generator = torch.Generator().manual_seed(1000 * world + step)
    given = {name: 0.1 + torch.randn(world, *shape, generator=generator) for name, shape in BLOCKS.items()}
    for ranks in given.values():
        ranks.view(world, -1)[:, ::31] += 30.0
    return given


@pytest.mark.parametrize(("name", "world"), dealt(WITH_FEEDBACK, (3, 8, 4, 5, 2)))
def test_what_arrived_what_is_kept_and_what_has_decayed_is_what_was_given(name, world):
    ranks = gl.Simulation(STRATEGIES[name](), world=world)
    missing = {key: torch.zeros(shape, dtype=torch.double) for key, shape in BLOCKS.items()}
    for step in range(STEPS):
        given = with_outliers(world, step)
        for key, rows in given.items():
            missing[key] += rows.double().sum(0)
        mine = [{key: rows[rank] for key, rows in given.items()} for rank in range(world)]
        for key, mean in ranks.step(mine)[0].items():
            missing[key] -= world * mean.double()
            missing[key] -= sum(decayed(strategy, key) for strategy in ranks.strategies)
    slack = (1e-2 if name in ROUGH else 1e-6) * 30 * world * STEPS
    for key in BLOCKS:
        kept = sum(strategy.memory.state_dict()[key].double() for strategy in ranks.strategies)
        assert (missing[key] - kept).abs().max() <= slack


@pytest.mark.parametrize("bucket_bytes", [64])
@pytest.mark.parametrize("world", [2, 5])
@pytest.mark.parametrize("name", WITH_FEEDBACK)
def test_so_it_is_in_many_small_buckets(name, world, bucket_bytes):
    """Shards of a few elements, or of none."""
    ranks = simulation(name, world, bucket_bytes=bucket_bytes)
    given, arrived = ({key: torch.zeros(shape).double() for key, shape in SHAPES.items()} for _ in range(2))
    for step in range(8):
        mine = gradients(world, step)
        for key in SHAPES:
            given[key] += sum(own[key].double() for own in mine)
        answer = ranks.step(mine)[0]
        for key in SHAPES:
            arrived[key] += world * answer[key].double()
            arrived[key] += sum(decayed(strategy, key) for strategy in ranks.strategies)
    slack = 5e-2 if name in ROUGH else 1e-5
    for key in SHAPES:
        kept = sum(strategy.memory.state_dict()[key].double() for strategy in ranks.strategies)
        torch.testing.assert_close(arrived[key] + kept, given[key], rtol=slack, atol=slack)


@pytest.mark.parametrize(
    "codec",
    [gl.Int4(), gl.Int2(), gl.Sign(rotate=True), gl.Fp8(), gl.TopK(0.05), gl.ChunkTopK(0.05)],
    ids=str,
)
@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.slow) for world in (2, 4, 8))])
def test_a_steady_gradient_arrives_beside_outliers_at_any_number_of_ranks(codec, world):
    """Whatever is kept stays bounded: it may not be kept for ever either."""
    generator = torch.Generator().manual_seed(world)
    ranks = gl.Simulation(gl.ErrorFeedback(gl.Sharded(codec)), world=world)
    numel, steps = 2048, 200
    arrived = torch.zeros(numel, dtype=torch.double)
    for _ in range(steps):
        mine = [torch.randn(numel, generator=generator) + 0.1 for _ in range(world)]
        for own in mine:
            own[::256] = 30.0
        arrived += ranks.step([{"w": own} for own in mine])[0]["w"]
    steady = torch.ones(numel, dtype=torch.bool)
    steady[::256] = False
    share = arrived[steady].mean().item() / (0.1 * steps)
    assert share == pytest.approx(1.0, abs=0.25)


class TwoBuffers(gl.Memory):
    """A memory that gives a buffer of its own for the new residual, with anything in it before."""

    def buffers(self, bucket):
        self.residual = super().buffers(bucket)[0]
        self.before = self.residual.clone()
        self.residual_out = torch.full_like(self.residual, torch.nan)
        return self.residual, self.residual_out


@dataclasses.dataclass
class Apart(gl.Strategy):
    """Error feedback whose new residual goes to a buffer of its own."""

    inner: gl.ErrorFeedback

    def __post_init__(self):
        self.inner.memory = TwoBuffers(self.inner.dtype)

    async def reduce(self, bucket):
        reduced = await self.inner.reduce(bucket)
        memory = self.inner.memory
        assert torch.equal(memory.residual, memory.before)
        memory.residual.copy_(memory.residual_out)
        return reduced


@pytest.mark.parametrize("name", WITH_FEEDBACK)
@pytest.mark.parametrize(
    ("world", "dtype"),
    grid(
        [2, 4],
        [torch.float32, torch.bfloat16, torch.float64],
        quick=[(2, torch.float32), (4, torch.bfloat16), (2, torch.float64)],
    ),
)
def test_a_new_residual_beside_the_old_one_has_the_same_bits(name, world, dtype):
    in_place = simulation(name, world)
    apart = gl.Simulation(Apart(STRATEGIES[name]()), world=world)
    for step in range(6):
        mine = gradients(world, step, dtype)
        if step in (2, 3):  # in a matrix, and beside it
            mine[step % 2]["a.weight" if step == 2 else "a.bias"].view(-1)[3] = torch.inf
        expected = in_place.step([dict(own) for own in mine])
        found = apart.step([dict(own) for own in mine])
        for key in SHAPES:
            assert same(found[0][key], expected[0][key])
            for one, other in zip(in_place.strategies, apart.strategies, strict=True):
                assert same(one.memory.state_dict()[key], other.inner.memory.state_dict()[key])


def same(x, y):
    return torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(nan=0), y.nan_to_num(nan=0))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("codec", [gl.Int4(block=32), gl.TopK(0.1)], ids=str)
def test_decay_is_that_of_sparseloco(codec, world):
    """residual <- decay * residual + gradient; send; subtract what was sent: in this order, and dense."""
    decay = 0.9
    ranks = gl.Simulation(gl.ErrorFeedback(gl.Gathered(codec), decay=decay), world=world)
    residual = [torch.zeros(500) for _ in range(world)]
    generator = torch.Generator().manual_seed(world)
    for step in range(6):
        mine = [torch.randn(500, generator=generator) for _ in range(world)]
        answer = ranks.step([{"w": own.clone()} for own in mine])[0]["w"]
        sent = []
        for rank, own in enumerate(mine):
            residual[rank] = decay * residual[rank] + own
            seed = bucket_of(step, rank, world).seed(SALT, shared=False)
            sent.append(codec.decode(codec.encode(residual[rank], seed), torch.empty(500), seed))
            residual[rank] -= sent[-1]
        torch.testing.assert_close(answer, sum(sent) / world, rtol=1e-5, atol=1e-6)


def bucket_of(step, rank, world):
    return gl.Bucket(torch.zeros(500), (gl.Slot("w", torch.Size([500])),), step, rank, world)


@pytest.mark.parametrize("name", [name for name in WITH_FEEDBACK if "decay" not in name])
def test_without_decay_nothing_changes(name):
    one, other = simulation(name, 3), simulation(name, 3)
    other.strategies = [dataclasses.replace(own, decay=1) for own in other.strategies]
    for step in range(3):
        a, b = one.step(gradients(3, step)), other.step(gradients(3, step))
        assert all(torch.equal(a[0][key], b[0][key]) for key in SHAPES)


def test_a_state_that_was_saved_before_there_was_a_decay_is_known():
    strategy = gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1)))
    before = gl.describe(strategy).replace(", decay=1.0", "")
    assert before != gl.describe(strategy)
    assert saved_by(strategy, before)
    assert not saved_by(dataclasses.replace(strategy, decay=0.95), before)


def test_feedback_makes_a_constant_gradient_arrive_and_its_absence_does_not():
    """A tenth is sent each time; over many steps the mean of what arrives is the gradient."""
    gradient = {"w": torch.linspace(0.5, 1.5, 640)}

    def arrived(strategy, steps=200):
        ranks = gl.Simulation(strategy, world=2)
        return sum(ranks.step([dict(gradient)] * 2)[0]["w"] for _ in range(steps)) / steps

    with_it = arrived(gl.ErrorFeedback(gl.Gathered(gl.TopK(0.1))))
    without = arrived(gl.Gathered(gl.TopK(0.1)))
    torch.testing.assert_close(with_it, gradient["w"], rtol=0.1, atol=0.05)
    assert (without - gradient["w"]).abs().max() > 0.4


def test_ef21_comes_to_a_constant_gradient_and_stays():
    gradient = {"w": torch.randn(640, generator=torch.Generator().manual_seed(0))}
    ranks = gl.Simulation(gl.EF21(gl.Gathered(gl.TopK(0.1))), world=2)
    errors = [(ranks.step([dict(gradient)] * 2)[0]["w"] - gradient["w"]).norm().item() for _ in range(15)]
    assert all(later <= earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 1e-5


@pytest.mark.parametrize("world", [2, 3, *(pytest.param(world, marks=pytest.mark.slow) for world in (4, 8))])
@pytest.mark.parametrize("name", ["ef21", "ef21 sharded", "ef21 powersgd"])
def test_the_mean_that_ef21_answers_stays_the_mean_of_the_ranks_estimates(name, world):
    ranks = gl.Simulation(STRATEGIES[name](), world=world)
    for step in range(STEPS):
        given = with_outliers(world, step)
        ranks.step([{key: rows[rank] for key, rows in given.items()} for rank in range(world)])
    for key in BLOCKS:
        mean = ranks.strategies[0].mean.state_dict()[key].double()
        own = sum(strategy.own.state_dict()[key].double() for strategy in ranks.strategies) / world
        assert (mean - own).abs().max() <= 1e-5 * 30


@pytest.mark.parametrize("world", [3, 5])
def test_ef21_divides_by_those_who_still_train(world):
    """As under ``join(divide_by_initial_world_size=False)``: the last rank has left, and gives zeros."""
    strategy = gl.EF21(gl.Sharded(gl.Int8(block=32)))
    ranks = gl.Simulation(strategy, world=world)
    gradient = {"w": torch.linspace(-1, 1, 320)}
    for _ in range(5):
        ranks.step([gradient] * world)
    ranks.sizes = {**ranks.sizes, "world": world - 1}
    for _ in range(20):
        answer = ranks.step([gradient] * (world - 1) + [{"w": torch.zeros(320)}])[0]["w"]
    torch.testing.assert_close(answer, gradient["w"], rtol=1e-3, atol=1e-3)


def test_the_residual_norm_is_noted():
    ranks = gl.Simulation(STRATEGIES["top-k"](), world=2)
    ranks.step([{"w": torch.ones(500)} for _ in range(2)])
    residual = [strategy.memory.state_dict()["w"] for strategy in ranks.strategies]
    assert ranks.figures["residual_square"] == pytest.approx(
        float(sum(own.square().sum() for own in residual))
    )


@pytest.mark.parametrize("numel", [8_193, 50_003])
def test_the_sampled_norm_is_near_and_looks_everywhere_in_time(numel):
    residual = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    residual[: numel // 3] *= 5  # as layers differ
    exact = float(residual.square().sum())
    ones, seen = torch.ones(numel, requires_grad=True), torch.zeros(numel, dtype=torch.bool)
    for step in range(100):
        assert float(squared_norm(residual, step)) == pytest.approx(exact, rel=0.15)
        seen |= torch.autograd.grad(squared_norm(ones, step), ones)[0] > 0
    assert seen.all()


def plain_dgc(gradients, momentum, clip, share, steps):
    """The slow obvious one: dense tensors, exact top-k per rank."""
    world = len(gradients[0])
    velocity = [torch.zeros_like(gradients[0][0]) for _ in range(world)]
    residual = [torch.zeros_like(gradients[0][0]) for _ in range(world)]
    answers = []
    for step in range(steps):
        sent = []
        for rank in range(world):
            gradient = gradients[step][rank]
            gradient = gradient * min(1.0, clip / world**0.5 / gradient.norm().item())
            velocity[rank] = momentum * velocity[rank] + gradient
            residual[rank] = residual[rank] + velocity[rank]
            slots = max(1, -(-int(share(step) * 1e9) * gradient.numel() // 10**9))
            threshold = residual[rank].abs().topk(slots).values[-1]
            mask = residual[rank].abs() >= threshold
            sent.append(torch.where(mask, residual[rank], 0.0))
            velocity[rank][mask] = 0
            residual[rank][mask] = 0
        answers.append(sum(sent) / world)
    return answers


def test_dgc_is_the_paper_step_by_step():
    generator = torch.Generator().manual_seed(1)
    given = [[torch.randn(400, generator=generator) for _ in range(2)] for _ in range(12)]
    strategy = gl.DGC(ratio=0.05, momentum=0.9, clip=2.0, warmup=5)
    assert [strategy.share(step) for step in range(6)] == [0.25, 0.0625, 0.05, 0.05, 0.05, 0.05]
    expected = plain_dgc(given, 0.9, 2.0, strategy.share, 12)
    ranks = gl.Simulation(strategy, world=2)
    for mine, answer in zip(given, expected, strict=True):
        found = ranks.step([{"w": own.clone()} for own in mine])[0]["w"]
        torch.testing.assert_close(found, answer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gl.Summed(gl.Int8()), gl.InvalidValue, r"Int8 cannot be summed .* Sharded\(Int8\(\)\)"),
        (lambda: gl.Gathered(gl.Mean()), gl.WrongType, "Mean is a strategy"),
        (lambda: gl.Sharded(gl.Int8), gl.WrongType, r"the class Int8; write Sharded\(Int8\(\)\)"),
        (lambda: gl.Sharded(8), gl.WrongType, "takes a codec, got int"),
        (lambda: gl.ErrorFeedback(gl.TopK()), gl.WrongType, r"TopK is a codec; write ErrorFeedback\(Sharded"),
        (lambda: gl.ErrorFeedback(gl.Mean(), torch.float16), gl.InvalidValue, "use float32 or bfloat16"),
        (lambda: gl.ErrorFeedback(gl.Mean(), decay=0.0), gl.InvalidValue, "decay=0.0; use a factor above 0"),
        (lambda: gl.ErrorFeedback(gl.Mean(), decay=1.1), gl.InvalidValue, "decay=1.1"),
        (lambda: gl.ErrorFeedback(gl.Mean(), decay=torch.nan), gl.InvalidValue, "decay=nan"),
        (lambda: gl.ErrorFeedback(gl.Mean(), decay="1"), gl.InvalidValue, "decay='1'"),
        (
            lambda: gl.ErrorFeedback(gl.Mean(), torch.bfloat16, decay=0.999),
            gl.InvalidValue,
            "decay=0.999: a memory in bfloat16 rounds it away; use at most 0.996, 1, or float32",
        ),
        (lambda: gl.EF21(3), gl.WrongType, "wraps a strategy, got int"),
        (
            lambda: gl.EF21(gl.Cast(gl.Mean(), torch.bfloat16)),
            gl.InvalidValue,
            "not the mean of what the ranks have sent",
        ),
        (lambda: gl.EF21(gl.Combined(gl.Median())), gl.InvalidValue, "would drift apart"),
        (lambda: gl.EF21(gl.Gathered(gl.Raw(), median)), gl.InvalidValue, "would drift apart"),
        (
            lambda: gl.Cast(gl.Sharded(gl.Int8()), torch.bfloat16),
            gl.InvalidValue,
            "narrow what the codec of Sharded sends, its scales too",
        ),
        (lambda: gl.Cast(gl.After(3, gl.DGC()), torch.float16), gl.InvalidValue, "the codec of DGC"),
        (
            lambda: gl.ErrorFeedback(gl.Cast(gl.WorkerMomentum(gl.Mean()), torch.bfloat16)),
            gl.InvalidValue,
            r"put it inside: WorkerMomentum\(ErrorFeedback\(...\)\)",
        ),
        (lambda: gl.DGC(momentum=1.0), gl.InvalidValue, "momentum=1.0; use a number from 0 to below 1"),
        (lambda: gl.DGC(ratio=0), gl.InvalidValue, "ratio=0"),
        (lambda: gl.DGC(clip=0.0), gl.InvalidValue, "clip=0.0"),
        (lambda: gl.DGC(warmup=-1), gl.InvalidValue, "warmup=-1"),
    ],
)
def test_what_does_not_go_together_is_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_feedback_round_a_narrowed_strategy_that_does_not_say_what_it_sent_is_refused():
    """A dry run refuses it too, before anything is trained."""
    feedback = gl.ErrorFeedback(gl.Cast(GatheredMean(), torch.bfloat16))
    with pytest.raises(gl.InvalidValue, match="cannot know what GatheredMean lost"):
        gl.dry_run(feedback, {"w": (300,)}, world=4)
    with pytest.raises(gl.InvalidValue, match="cannot know what GatheredMean lost"):
        gl.Simulation(feedback, world=3).step([{"w": torch.ones(300)}] * 3)


@pytest.mark.parametrize("codec", [gl.Int8(), gl.Int4(), gl.Int2(), gl.Sign(), gl.Fp8()])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_sharded_sends_2_n_minus_1_over_n_payloads_whatever_n(codec, world):
    numel = 8 * 8192 * 3
    payload = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in codec.layout(numel))
    trace = gl.dry_run(gl.Sharded(codec), {"w": (numel,)}, world=world)
    assert trace.wire_bytes == pytest.approx(2 * (world - 1) / world * payload, rel=1e-6)
    assert trace.collectives == (1 if world == 2 else 2)


def test_at_two_ranks_sharded_is_gathered():
    first, second = (simulation(n, 2) for n in ("int8", "int8"))
    second.strategies = [gl.Sharded(gl.Int8()) for _ in range(2)]
    for step in range(2):
        a, b = first.step(gradients(2, step)), second.step(gradients(2, step))
        assert all(torch.equal(a[0][key], b[0][key]) for key in SHAPES)
    assert first.events == second.events


def test_a_narrow_memory_does_not_narrow_what_is_sent():
    """What a plain mean sends is the gradient itself; bfloat16 is for the residual, and nothing is."""
    given_ = [{"w": torch.tensor([1.0 + 2.0**-20, 3.0])} for _ in range(2)]
    ranks = gl.Simulation(gl.ErrorFeedback(gl.Mean(), torch.bfloat16), world=2)
    assert torch.equal(ranks.step(given_)[0]["w"], given_[0]["w"])
