"""What low-rank strategies obey: the paper's algorithm, its algebra, and a memory that stays bounded."""

import math

import pytest
import torch

import gradlane as gl

from ..reference.powersgd import PlainAcpSGD, PlainPowerSGD

KINDS = (gl.PowerSGD, gl.AcpSGD)


def iterated(rank):
    return gl.PowerSGD(rank, iterations=3)


def noise(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def given(world, step, shapes, dtype=torch.float64):
    return [
        {name: noise(*shape, seed=97 * step + 13 * rank + place, dtype=dtype)
         for place, (name, shape) in enumerate(shapes.items())}
        for rank in range(world)
    ]  # fmt: skip


def starting_from(strategy, world, **factors):
    """A simulation whose ranks all begin with these factors."""
    ranks = gl.Simulation(strategy, world=world)
    for own in ranks.strategies:
        inner = own.inner if isinstance(own, gl.ErrorFeedback) else own
        memory = inner.factors if isinstance(inner, gl.PowerSGD) else inner.right
        memory.load_state_dict(factors)
    return ranks


@pytest.mark.parametrize("iterations", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_powersgd_is_the_paper_step_by_step(iterations, world):
    shapes = {"a": (12, 20), "bias": (12,), "b": (16, 3, 5)}
    firsts = {"a": noise(2, 20, seed=5), "b": noise(2, 15, seed=6)}
    strategy = gl.ErrorFeedback(gl.PowerSGD(2, iterations=iterations))
    ranks = starting_from(strategy, world, **firsts)
    plain = {name: PlainPowerSGD(q, world, iterations=iterations) for name, q in firsts.items()}
    for step in range(12):
        mine = given(world, step, shapes)
        found = ranks.step(mine)[0]
        for name, reference in plain.items():
            expected = reference.step([own[name].view(shapes[name][0], -1) for own in mine])
            torch.testing.assert_close(found[name], expected.view(shapes[name]), rtol=1e-9, atol=1e-9)
            errors = [own.memory.state_dict()[name] for own in ranks.strategies]
            for error, slow in zip(errors, reference.errors, strict=True):
                torch.testing.assert_close(error, slow.reshape(shapes[name]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found["bias"], sum(own["bias"] for own in mine) / world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_acpsgd_is_the_paper_step_by_step(world):
    first = noise(2, 20, seed=5)
    plain = PlainAcpSGD(first, world)
    start = torch.linalg.qr(first.T).Q.T  # the kept factor is orthonormal; its span is what counts
    ranks = starting_from(gl.ErrorFeedback(gl.AcpSGD(2)), world, a=start)
    for step in range(12):
        mine = given(world, step, {"a": (12, 20)})
        found = ranks.step(mine)[0]["a"]
        torch.testing.assert_close(found, plain.step([own["a"] for own in mine]), rtol=1e-9, atol=1e-9)
        for own, error in zip(ranks.strategies, plain.errors, strict=True):
            torch.testing.assert_close(own.memory.state_dict()["a"], error, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_aggregate_of_n_is_the_compression_of_the_mean(kind):
    many, one = (gl.Simulation(gl.ErrorFeedback(kind(3)), world=world) for world in (4, 1))
    for step in range(6):
        mine = given(4, step, {"w": (24, 40)})
        mean = sum(own["w"] for own in mine) / 4
        torch.testing.assert_close(many.step(mine)[0]["w"], one.step([{"w": mean}])[0]["w"])


def test_a_matrix_of_the_rank_is_recovered_in_one_step():
    low = noise(30, 3) @ noise(3, 50, seed=1)
    answer = gl.Simulation(gl.PowerSGD(3), world=2).step([{"w": low}, {"w": low}])[0]["w"]
    torch.testing.assert_close(answer, low)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_answer_is_a_projection(rank):
    matrix = noise(40, 60)
    answer = gl.Simulation(gl.PowerSGD(rank), world=1).step([{"w": matrix}])[0]["w"]
    left = (matrix - answer).square().sum()
    torch.testing.assert_close(left, matrix.square().sum() - answer.square().sum())
    assert torch.linalg.matrix_rank(answer) == rank


def test_warm_start_converges_to_the_best_approximation_and_a_cold_one_does_not():
    u, s, v = torch.linalg.svd(noise(30, 40), full_matrices=False)
    s = 2.0 ** -torch.arange(30.0, dtype=torch.float64)
    matrix, best = u * s @ v, u[:, :2] * s[:2] @ v[:2]

    def distance(strategy):
        ranks = gl.Simulation(strategy, world=2)
        for _ in range(40):
            answer = ranks.step([{"w": matrix}] * 2)[0]["w"]
        return float((answer - best).norm())

    assert distance(gl.PowerSGD(2)) < 1e-9
    assert distance(gl.PowerSGD(2, warm_start=False)) > 1e-3


def test_the_residual_stays_bounded_where_the_papers_grows_with_the_root_of_the_steps():
    """The paper and torch subtract the averaged product from a rank's own matrix: ``PlainPowerSGD`` with
    ``subtracts="mean"``. The strategy subtracts the product with the rank's own factor."""
    ranks = gl.Simulation(gl.ErrorFeedback(gl.PowerSGD(2)), world=2)
    plain = PlainPowerSGD(noise(2, 16, seed=5), world=2, subtracts="mean")
    own, mean = [], []
    for step in range(400):
        mine = given(2, step, {"w": (16, 16), "b": (9,)})
        ranks.step(mine)
        plain.step([gradient["w"] for gradient in mine])
        residual = ranks.strategies[0].memory.state_dict()
        own.append(math.hypot(*(float(part.norm()) for part in residual.values())))
        mean.append(float(plain.errors[0].norm()))
    assert max(own[200:]) < 1.3 * max(own[20:100])
    assert mean[399] > 1.7 * mean[99]  # 2 by the root
    assert mean[399] > 3 * own[399]


def test_dense_parts_leave_no_residual():
    ranks = gl.Simulation(gl.ErrorFeedback(gl.PowerSGD(2)), world=2)
    ranks.step(given(2, 0, {"w": (20, 20), "b": (20,), "scale": ()}, torch.float32))
    residual = ranks.strategies[0].memory.state_dict()
    assert residual["w"].count_nonzero() > 0
    assert residual["b"].count_nonzero() == residual["scale"].count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_gradients_are_computed_with_in_fp32(kind, dtype):
    """torch's products of fp16 numbers overflow: here sums of squares pass 65504 by far."""
    low = (noise(64, 1, dtype=torch.float32) @ noise(1, 64, seed=1, dtype=torch.float32)).mul(500).to(dtype)
    ranks = gl.Simulation(gl.ErrorFeedback(kind(2)), world=2)
    answers = [ranks.step([{"w": low}, {"w": low}])[0]["w"] for _ in range(40)]
    assert all(answer.dtype == dtype for answer in answers)
    arrived = torch.stack([answer.float() for answer in answers]).mean(0)
    assert (arrived - low.float()).norm() < 0.03 * low.float().norm()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_saved_by_a_cast_are_residual_too(kind):
    """What bf16 factors lose stays in the memory, up to what the sum of two bf16 numbers is rounded by."""
    strategy = gl.ErrorFeedback(gl.Cast(kind(2), torch.bfloat16))
    ranks = gl.Simulation(strategy, world=2)
    total, applied = torch.zeros(24, 24).double(), torch.zeros(24, 24).double()
    for step in range(8):
        mine = given(2, step, {"w": (24, 24)}, torch.float32)
        total += sum(own["w"].double() for own in mine)
        applied += 2 * ranks.step(mine)[0]["w"].double()
    residual = sum(own.memory.state_dict()["w"].double() for own in ranks.strategies)
    torch.testing.assert_close(applied + residual, total, rtol=0, atol=4e-2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_step_is_seen_and_leaves_no_trace(kind, bad):
    shapes = {"w": (20, 30), "b": (20,)}
    ranks = gl.Simulation(gl.ErrorFeedback(kind(2)), world=2)
    ranks.step(given(2, 0, shapes, torch.float32))
    poisoned = given(2, 1, shapes, torch.float32)
    poisoned[1]["w"][3, 4] = bad
    poisoned[0]["b"][2] = bad
    before = [own.memory.state_dict() for own in ranks.strategies]
    answers = ranks.step(poisoned)
    assert not answers[0]["w"].isfinite().all()
    assert not answers[0]["b"].isfinite().all()
    for own, then in zip(ranks.strategies, before, strict=True):
        assert all(t.isfinite().all() for t in own.memory.state_dict().values())
        if kind is gl.PowerSGD:
            assert torch.equal(own.memory.state_dict()["w"], then["w"])
    for step in range(2, 6):
        answers = ranks.step(given(2, step, shapes, torch.float32))
        assert all(value.isfinite().all() for value in answers[1].values())


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1.0, 1e25, 1e37])
@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_how_large_a_gradient_is_does_not_matter(iterations, scale):
    low = noise(40, 2, dtype=torch.float32) @ noise(2, 60, seed=1, dtype=torch.float32)
    low *= scale / low.abs().max()
    answer = gl.Simulation(gl.PowerSGD(2, iterations=iterations), world=2).step([{"w": low}] * 2)[0]["w"]
    assert (answer.double() - low.double()).norm() < 1e-5 * low.double().norm()


@pytest.mark.parametrize("kind", [*KINDS, iterated])
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-25, 1e18, 1e37])
def test_zero_denormal_and_huge_gradients_leave_it_able_to_learn(kind, scale):
    ranks = gl.Simulation(gl.ErrorFeedback(kind(2)), world=2)
    for step in range(3):
        mine = [{"w": own["w"] * scale} for own in given(2, step, {"w": (20, 30)}, torch.float32)]
        assert ranks.step(mine)[0]["w"].isfinite().all()
    low = noise(20, 2, dtype=torch.float32) @ noise(2, 30, seed=3, dtype=torch.float32)
    again = gl.Simulation(gl.ErrorFeedback(kind(2)), world=2)
    for old, new in zip(ranks.strategies, again.strategies, strict=True):
        new.inner.load_state_dict(old.inner.state_dict())
    for _ in range(6):
        answer = again.step([{"w": low}, {"w": low}])[0]["w"]
    assert (answer - low).norm() < 0.2 * low.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_good_for_gradients_of_another_width(kind):
    shapes = {"w": (20, 30), "b": (20,)}
    narrow, wide = (gl.Simulation(gl.ErrorFeedback(kind(2)), world=2) for _ in range(2))
    narrow.step(given(2, 0, shapes, torch.float32))
    wide.steps = 1
    for old, new in zip(narrow.strategies, wide.strategies, strict=True):
        new.load_state_dict(old.state_dict())
    for step in (1, 2, 3):
        mine = given(2, step, shapes, torch.float32)
        as_before = narrow.step(mine)[0]
        found = wide.step([{name: value.double() for name, value in own.items()} for own in mine])[0]
        for name, value in found.items():
            torch.testing.assert_close(value, as_before[name].double(), rtol=0, atol=1e-4)


def test_the_whole_bucket_as_one_matrix():
    shapes = {"w": (30, 10), "b": (30,), "v": (7, 11)}
    ranks = gl.Simulation(gl.ErrorFeedback(gl.PowerSGD(2, view="bucket")), world=2)
    ranks.step(given(2, 0, shapes, torch.float32))
    numel = 300 + 30 + 77
    side = math.isqrt(numel)
    first, second = ranks.events
    assert first.payload_elements == numel - side * (numel // side) + 2 * side
    assert second.payload_elements == 2 * (numel // side)


def test_ranks_by_name_by_rule_and_the_least_rate():
    shapes = {"embed": (100, 20), "body.w": (64, 64), "head.w": (10, 64)}

    def sent(rank, **options):
        trace = gl.dry_run(gl.PowerSGD(rank, **options), shapes, world=2)
        return sum(event.payload_elements for event in trace.events)

    dense = 2000 + 640
    assert sent({"body.*": 4}) == dense + 4 * 128
    assert sent({"body.*": 4, "*": 1}) == 4 * 128 + 120 + 74
    assert sent(lambda name, shape: 2 if shape[0] == 64 else 0) == dense + 2 * 128
    assert sent(64) == 2000 + 4096 + 640  # factors would be larger than the matrices
    assert sent(8, min_compression_rate=4) == sum((2000, 4096, 640))
    assert sent(8, min_compression_rate=3.9) == 2000 + 8 * 128 + 640


RESNET18 = {
    "conv1": (64, 3, 3, 3), **{f"1.{n}": (64, 64, 3, 3) for n in range(4)},
    "2.0": (128, 64, 3, 3), **{f"2.{n}": (128, 128, 3, 3) for n in range(1, 4)}, "2.s": (128, 64, 1, 1),
    "3.0": (256, 128, 3, 3), **{f"3.{n}": (256, 256, 3, 3) for n in range(1, 4)}, "3.s": (256, 128, 1, 1),
    "4.0": (512, 256, 3, 3), **{f"4.{n}": (512, 512, 3, 3) for n in range(1, 4)}, "4.s": (512, 256, 1, 1),
    "fc": (10, 512), "vectors": (9610,),
}  # fmt: skip


LSTM = {
    "encoder": (28_869, 650), **{f"{kind}{n}": (2600, 650) for kind in ("ih", "hh") for n in range(3)},
    "bias": (28_869,), **{f"bias {kind}{n}": (2600,) for kind in ("ih", "hh") for n in range(3)},
}  # fmt: skip


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [None, 25_000_000])
def test_a_language_model_sends_what_the_paper_prints(rank, bucket_bytes):
    """The paper's other task; the decoder's weights are the encoder's."""
    trace = gl.dry_run(gl.PowerSGD(rank), LSTM, world=16, bucket_bytes=bucket_bytes)
    vectors = 28_869 + 6 * 2600
    assert trace.payload_elements == vectors + rank * (28_869 + 650 + 6 * (2600 + 650))
    assert round(trace.raw_bytes / trace.payload_bytes) == {1: 310, 2: 203, 4: 120}[rank]


@pytest.mark.parametrize(("rank", "elements", "rate"), [(1, 45_935, 243), (2, 82_260, 136), (4, 154_910, 72)])
def test_a_resnet18_sends_what_the_paper_prints(rank, elements, rate):
    assert sum(math.prod(shape) for shape in RESNET18.values()) == 11_173_962
    trace = gl.dry_run(gl.ErrorFeedback(gl.PowerSGD(rank)), RESNET18, world=16)
    assert sum(event.payload_elements for event in trace.events) == elements
    assert round(11_173_962 / elements) == rate
    half = [gl.dry_run(gl.AcpSGD(rank), RESNET18, world=16, step=step) for step in (0, 1)]
    assert sum(e.payload_elements for trace in half for e in trace.events) == elements + 9610
    assert all(trace.collectives == 1 for trace in half)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: gl.PowerSGD(0), gl.InvalidValue, "rank=0; use a whole number from 1 up"),
        (lambda: gl.PowerSGD(-1), gl.InvalidValue, "rank=-1"),
        (lambda: gl.PowerSGD("4"), gl.WrongType, "rank='4'; use a whole number, a dict"),
        (lambda: gl.PowerSGD({"a": -1}), gl.InvalidValue, r"rank\['a'\]=-1"),
        (lambda: gl.PowerSGD({1: 1}), gl.WrongType, "has the key 1"),
        (lambda: gl.PowerSGD(min_compression_rate=-2), gl.InvalidValue, "min_compression_rate=-2"),
        (lambda: gl.PowerSGD(iterations=0), gl.InvalidValue, "iterations=0; use a whole number from 1 up"),
        (lambda: gl.PowerSGD(iterations=1.5), gl.InvalidValue, r"iterations=1\.5; use a whole number"),
        (lambda: gl.PowerSGD(seed="x"), gl.InvalidValue, "PowerSGD seed='x'; use a whole number from 0 up"),
        (lambda: gl.AcpSGD(seed=1.5), gl.InvalidValue, r"AcpSGD seed=1\.5"),
        (lambda: gl.PowerSGD(min_compression_rate="2"), gl.InvalidValue, "min_compression_rate='2'; use a n"),
        (lambda: gl.PowerSGD(view="square"), gl.InvalidValue, "view='square'; use one of tensor, bucket"),
        (lambda: gl.AcpSGD(0), gl.InvalidValue, "AcpSGD rank=0"),
    ],
)
def test_options_are_refused_at_once(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_rule_that_answers_nonsense_is_told():
    ranks = gl.Simulation(gl.PowerSGD(lambda name, shape: -1), world=2)
    with pytest.raises(gl.InvalidValue, match="gave -1 for 'w'; return a whole number"):
        ranks.step(given(2, 0, {"w": (4, 4)}))
