"""R12: what was sent, the residual and what decayed of it are what was given: any shape, dtype and stride."""

import math

import pytest
import torch

import gradlane as gl

from ..support.catalogue import STRATEGIES, WITH_FEEDBACK, decayed
from ..support.codecs import CODECS
from .harness import drawing

SLACK = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1e-2}
LARGEST = 10**6
FEEDBACK = [name for name in WITH_FEEDBACK if name != "1-bit"]
"""At two ranks nothing is encoded a second time, so the answer is what the ranks have sent. The server of
"1-bit" keeps a residual too."""


def random_shape(chance):
    """0-d to 4-d, 0 to a million elements, the small ones as likely as the large."""
    dimensions = chance.randrange(5)
    if dimensions and chance.random() < 0.05:
        return tuple(chance.choice([0, 3]) for _ in range(dimensions))
    left = LARGEST
    sides = []
    for remaining in range(dimensions, 0, -1):
        most = left ** (1 / remaining)
        side = max(1, min(left, int(math.exp(chance.uniform(0, 1.3 * math.log(most + 1))))))
        sides.append(side)
        left //= side
    chance.shuffle(sides)
    return tuple(sides)


def strided(shape, chance, generator, dtype):
    """Random numbers of this shape: contiguous, transposed, or every second of a larger tensor."""
    how = chance.choice(["plain", "transposed", "sliced"]) if shape else "plain"
    scale = 10.0 ** chance.randrange(-4, 5)
    if how == "transposed":
        made = torch.randn(shape[::-1], generator=generator, dtype=torch.float64).permute(
            *range(len(shape))[::-1]
        )
    elif how == "sliced":
        made = torch.randn(*shape[:-1], 2 * shape[-1], generator=generator, dtype=torch.float64)[..., ::2]
    else:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
    return torch.empty_strided(made.shape, made.stride(), dtype=dtype).copy_(made * scale)


def check_strategies(cases):
    """Of one rank alone, whose answer is what it has sent; and of two, whose answers are summed in fp32."""
    chance = drawing(f"conservation, {cases} shapes")
    worst = dict.fromkeys(SLACK, 0.0)
    for case in range(cases):
        name, shape = FEEDBACK[case % len(FEEDBACK)], random_shape(chance)
        dtype = chance.choice(list(SLACK))
        slack = max(SLACK[dtype], 1e-2 if "bf16" in name else 0.0)
        for world, least in ((1, 0.0), (2, 1e-6)):
            error, largest = off_by(name, shape, dtype, world, chance, torch.Generator().manual_seed(case))
            told = f"{name} {shape} {dtype}, {world} ranks: off by {error:g}, largest {largest:g}"
            assert error <= max(slack, least) * largest, told
            if world == 1 and slack == SLACK[dtype] and largest:
                worst[dtype] = max(worst[dtype], error / largest)
    print(f"{cases} shapes, of the largest number at most: {worst}")


def off_by(name, shape, dtype, world, chance, generator):
    """How far two steps are from being conserved, and the largest number in them."""
    simulation = gl.Simulation(STRATEGIES[name](), world=world)
    given, sent = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    largest = 0.0
    for _ in range(2):
        mine = [{"w": strided(shape, chance, generator, dtype)} for _ in range(world)]
        given += sum(own["w"].double() for own in mine)
        largest = max(largest, *(greatest(own["w"]) for own in mine))
        sent += world * simulation.step(mine)[0]["w"].double()
        sent += sum(decayed(own, "w") for own in simulation.strategies)
    residual = sum(own.memory.state_dict()["w"].double() for own in simulation.strategies)
    return greatest(sent + residual - given), largest


def greatest(tensor):
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_codecs(cases):
    chance = drawing(f"conservation of codecs, {cases} shapes")
    worst = {}
    for case in range(cases):
        name = list(CODECS)[case % len(CODECS)]
        codec, dtype = CODECS[name], chance.choice(list(SLACK))
        generator = torch.Generator().manual_seed(case)
        gradient = strided((math.prod(random_shape(chance)),), chance, generator, dtype)
        memory = torch.float64 if dtype == torch.float64 else torch.float32
        residual = torch.randn(gradient.shape, generator=generator).to(memory)
        whole = gradient.double() + residual.double()
        payload = codec.encode_with_feedback(gradient, residual, seed=case)
        sent = codec.decode(payload, torch.empty_like(residual), seed=case)
        if not whole.numel():
            continue
        error = float((sent.double() + residual.double() - whole).abs().max())
        largest = float(whole.abs().max())
        slack = SLACK[memory]
        if codec == CODECS["randomk unbiased"]:
            slack *= 10  # it sends ten times what it holds
        assert error <= slack * largest, f"{name} {list(gradient.shape)} {dtype}: off by {error:g}"
        worst[memory] = max(worst.get(memory, 0.0), error / largest)
    print(f"{cases} shapes of codecs, of the largest number at most: {worst}")


def test_sixty_shapes():
    check_strategies(60)


def test_sixty_shapes_of_codecs():
    check_codecs(60)


@pytest.mark.slow
def test_five_hundred_shapes():
    check_strategies(500)


@pytest.mark.slow
def test_five_hundred_shapes_of_codecs():
    check_codecs(500)


def test_the_shapes_are_what_they_should_be():
    chance = drawing("shapes")
    shapes = [random_shape(chance) for _ in range(500)]
    sizes = [math.prod(shape) for shape in shapes]
    assert {len(shape) for shape in shapes} == set(range(5))
    assert min(sizes) == 0
    assert 10**5 < max(sizes) <= LARGEST
