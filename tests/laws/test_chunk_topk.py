"""Top-k in chunks: what it takes, its two levels, and a round of SparseLoCo."""

import math

import pytest
import torch

import gradlane as gl
from gradlane.codecs.chunk_topk import two_levels
from gradlane.codecs.packing import pack_places, unpack_places

from ..reference import codecs as reference
from ..reference.outer import sparseloco
from ..support.codecs import gaussian

VALUES = ("int2", "float32", "bfloat16")


def decoded(codec, x):
    return codec.decode(codec.encode(x, 0), torch.empty_like(x))


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("numel", [4095, 4096, 4097, 9000, 12_288])
@pytest.mark.parametrize("ratio", [1e-6, 0.02, 0.3])
def test_it_is_the_slow_one_over_several_chunks(value, numel, ratio):
    for x in (gaussian(numel), gaussian(numel).round(), gaussian(numel) * (torch.arange(numel) % 700 == 3)):
        found = decoded(gl.ChunkTopK(ratio, value), x)
        wanted = reference.chunk_topk_decoded(x.numpy(), ratio, value)
        assert torch.equal(found, torch.from_numpy(wanted))


@pytest.mark.parametrize("numel", [4096, 3 * 4096 + 5, 70_000])
@pytest.mark.parametrize("ratio", [0.001, 0.02, 0.06, 0.07, 0.5, 1.0])
def test_each_chunk_sends_exactly_its_largest(numel, ratio):
    codec, x = gl.ChunkTopK(ratio, "float32"), gaussian(numel)
    x[:4096] *= 1000.0
    out = decoded(codec, x)
    for start in range(0, numel, 4096):
        chunk = x[start : start + 4096]
        wanted = chunk.abs().topk(math.ceil(ratio * chunk.numel())).indices.sort().values
        assert torch.equal(out[start : start + 4096].nonzero().view(-1), wanted)
        assert torch.equal(out[start : start + 4096][wanted], chunk[wanted])


def test_of_equal_magnitudes_the_first_are_taken():
    x = torch.full((4096,), -0.5)
    assert decoded(gl.ChunkTopK(0.02), x).nonzero().view(-1).tolist() == list(range(82))


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 81, 82])
def test_two_places_in_three_bytes(count):
    places = torch.arange(4095, 4095 - 50 * count, -50)
    packed = pack_places(places)
    assert packed.dtype == torch.uint8
    assert packed.numel() == math.ceil(12 * count / 8)
    assert torch.equal(unpack_places(packed, count), places)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "two", "equal", "one large", "one"])
def test_the_levels_have_the_smallest_squared_error(kind):
    """Of all cuts into two parts, tried one by one; but for the rounding of the levels to bfloat16."""
    x = gaussian(40)
    numbers = {
        "gaussian": x,
        "heavy": x.pow(5),
        "two": torch.where(x > 0.5, 3.0, -1.0),
        "equal": torch.full((40,), -0.3),
        "one large": torch.where(torch.arange(40) == 7, 1e6, x),
        "one": x[:1],
    }[kind]
    sizes = numbers.abs().double().sort().values
    cuts = [(sizes[:cut], sizes[cut:]) for cut in range(len(sizes))]
    least = min(sum(float((part - part.mean()).square().sum()) for part in cut if len(part)) for cut in cuts)
    high, levels = two_levels(numbers.abs()[None])
    out = torch.where(high[0], *levels[0].double())
    assert float((numbers.abs() - out).square().sum()) <= least + 2.0**-17 * float(sizes.square().sum())


def test_two_bits_lose_little_of_what_is_sent():
    """Half a hundredth on Gaussian data, against the same elements in fp32."""
    x = gaussian(1 << 20)
    square = float(x.double().square().sum())
    two_bits, exact = (
        float((x - decoded(gl.ChunkTopK(0.02, v), x)).double().square().sum()) for v in VALUES[:2]
    )
    assert exact / square == pytest.approx(0.856, abs=0.002)
    assert 0 < (two_bits - exact) / (square - exact) < 0.005


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", ["gaussian", "equal", "one element", "outliers", "all magnitudes"])
def test_it_is_a_contraction_whatever_the_gradient_is_like(value, kind):
    """At worst one part in 4096 of the squared norm is sent; two means never add to it."""
    x = gaussian(10_000)
    x = {
        "gaussian": x,
        "equal": x.sign(),
        "one element": torch.zeros(10_000).index_fill_(0, torch.tensor([9999]), -2.0),
        "outliers": x + 1000.0 * (torch.arange(10_000) % 997 == 0),
        "all magnitudes": torch.pow(10.0, torch.linspace(-15, 15, 10_000)) * x.sign(),
    }[kind]
    lost = (x - decoded(gl.ChunkTopK(0.02, value), x)).double().square().sum() / x.double().square().sum()
    assert lost <= 1 - 1 / 4096


@pytest.mark.parametrize("value", VALUES)
def test_a_chunk_with_a_bad_number_does_not_disturb_the_others(value):
    codec, x, residual = gl.ChunkTopK(0.02, value), gaussian(3 * 4096), gaussian(3 * 4096, 1)
    clean, whole = decoded(codec, x + residual), x + residual
    x[5000] = torch.inf
    payload = codec.encode_with_feedback(x, residual, 0)
    out = codec.decode(payload, torch.empty_like(x))
    others = torch.arange(3) != 1
    assert torch.equal(out.view(3, -1)[others], clean.view(3, -1)[others])
    assert out[5000].isnan()
    assert residual[5000] == 0
    left = torch.where(out.isnan(), whole, whole - out)  # what came out as NaN was not sent
    left[5000] = 0
    assert torch.equal(residual, left)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("value", VALUES)
def test_the_mean_is_over_all_ranks_also_those_that_did_not_send_an_entry(world, value):
    """Over the senders alone each of these would be ``world`` times as large."""
    mine = [torch.zeros(4096 + 100) for _ in range(world)]
    for rank, own in enumerate(mine):
        own[rank * 100 : rank * 100 + 10] = 8.0
    ranks = gl.Simulation(gl.Gathered(gl.ChunkTopK(10 / 4096, value)), world=world)
    answer = ranks.step([{"w": own} for own in mine])[0]["w"]
    torch.testing.assert_close(answer, torch.stack(mine).mean(0), rtol=1e-6, atol=0)
    assert answer.max() == pytest.approx(8.0 / world)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("shapes", [{"a": (50, 100), "b": (333,)}, {"a": (4096,)}, {"a": (3,)}])
def test_a_round_of_sparseloco(world, value, shapes):
    """Decay, top-k in chunks, the mean of all ranks and plain outer SGD, over several rounds."""
    lr, decay, ratio = 0.7, 0.95, 0.02
    strategy = gl.Nesterov(
        gl.ErrorFeedback(gl.Gathered(gl.ChunkTopK(ratio, value)), decay=decay), lr=lr, momentum=0.0
    )
    ranks = gl.Simulation(strategy, world=world)
    generator = torch.Generator().manual_seed(world)
    rounds = [
        [{name: torch.randn(s, generator=generator) for name, s in shapes.items()} for _ in range(world)]
        for _ in range(5)
    ]
    rows = [[flat(own, shapes).numpy() for own in given] for given in rounds]
    for given, wanted in zip(rounds, sparseloco(rows, lr, decay, ratio, value), strict=True):
        found = flat(ranks.step(given)[0], shapes)
        torch.testing.assert_close(found.double(), torch.from_numpy(wanted), rtol=1e-5, atol=1e-7)


def flat(tensors, shapes):
    """As the simulator's bucket has them: parameters in their order, side by side."""
    return torch.cat([tensors[name].reshape(-1) for name in shapes])
