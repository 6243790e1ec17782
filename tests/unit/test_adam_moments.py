"""Adam's frozen second moment, on torch's own optimizers."""

import copy
import io
import math

import pytest
import torch
from torch.optim import Adam, AdamW

import gradlane as gl
from gradlane.feed.adam_moments import BETA2, MARK, STEP, freeze, moments, momentum, thaw

MODES = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"foreach": False, "amsgrad": True},
    "amsgrad, fused": {"fused": True, "amsgrad": True},
    "maximize": {"foreach": True, "maximize": True},
    "maximize, fused": {"fused": True, "maximize": True},
    "amsgrad, foreach, maximize": {"foreach": True, "amsgrad": True, "maximize": True},
}
LR, EPS = 0.01, 1e-6
KINDS = {"adam": (Adam, {}), "adamw": (AdamW, {"weight_decay": 0.1})}


def warm(kind, dtype=torch.float32, steps=20, eps=EPS, **mode):
    """After some steps. Of one parameter some elements never had a gradient; another one never had any."""
    make, options = KINDS[kind]
    torch.manual_seed(0)
    weight, spare = (
        torch.randn(500, dtype=dtype).requires_grad_(),
        torch.randn(3, dtype=dtype).requires_grad_(),
    )
    optimizer = make([{"params": [weight]}, {"params": [spare]}], lr=LR, eps=eps, **options, **mode)
    for _ in range(steps):
        weight.grad = torch.randn_like(weight)
        weight.grad[:10] = 0
        optimizer.step()
    return optimizer, weight, spare


def reloaded(optimizer):
    """The same optimizer from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = type(optimizer)([{"params": group["params"]} for group in optimizer.param_groups])
    again.load_state_dict(torch.load(file, weights_only=True))
    return again


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_follows_the_formula_and_the_second_moment_keeps_its_bits(kind, mode):
    optimizer, weight, spare = warm(kind, **MODES[mode])
    freeze(optimizer, move=True)
    optimizer = reloaded(optimizer)
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    v = optimizer.state[weight].get("max_exp_avg_sq", before).double().clone()
    decay = KINDS[kind][1].get("weight_decay", 0.0)
    sign = 1 if MODES[mode].get("maximize") else -1
    expected, start, start_of_spare = (
        weight.detach().double(),
        weight.detach().clone(),
        spare.detach().clone(),
    )
    for _ in range(50):
        m = 30 * torch.randn_like(weight)  # far above sqrt(v): a beta2 of 1 - 1e-9 would let v grow
        weight.grad, spare.grad = m, torch.randn_like(spare)
        optimizer.step()
        expected = expected * (1 - LR * decay) + sign * LR * m.double() / (v.sqrt() + EPS)
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"], before)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-5)
    kept = (1 - LR * decay) ** 50
    torch.testing.assert_close(weight[:10], start[:10] * kept, rtol=1e-5, atol=0)
    torch.testing.assert_close(spare, start_of_spare * kept, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["plain", "foreach", "fused"])
def test_other_widths(mode, dtype):
    optimizer, weight, _ = warm("adam", dtype, eps=1e-4, **MODES[mode])  # 1e-6 is 0 in float16
    freeze(optimizer, move=True)
    before = optimizer.state[weight]["exp_avg_sq"].clone()
    start = weight.detach().clone()
    for _ in range(20):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    after = optimizer.state[weight]["exp_avg_sq"]
    torch.testing.assert_close(after, before, rtol=1e-12 if dtype == torch.float64 else 0, atol=0)
    assert torch.equal(weight[:10], start[:10])
    assert not torch.equal(weight[10:], start[10:])


@pytest.mark.parametrize("mode", MODES)
def test_frozen_with_its_own_momentum_it_is_adam_with_a_constant_second_moment(mode):
    optimizer, weight, _ = warm("adamw", **MODES[mode])
    state = optimizer.state[weight]
    n, (b1, b2) = float(state["step"]), optimizer.param_groups[0]["betas"]
    m = state["exp_avg"].double() / (1 - b1**n)
    v = state.get("max_exp_avg_sq", state["exp_avg_sq"]).double() / (1 - b2**n)
    v[v == 0] = math.inf
    gl.freeze_moments(optimizer)
    assert optimizer.param_groups[0]["betas"] == (b1, BETA2)
    expected = weight.detach().double()
    sign = -1 if MODES[mode].get("maximize") else 1
    for _ in range(10):
        weight.grad = torch.randn_like(weight)
        m = b1 * m + (1 - b1) * sign * weight.grad.double()
        expected = expected * (1 - LR * 0.1) - LR * m / (v.sqrt() + EPS)
        optimizer.step()
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_a_second_call_changes_nothing():
    optimizer, weight, _ = warm("adamw")
    gl.freeze_moments(optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    gl.freeze_moments(reloaded(optimizer))
    gl.freeze_moments(optimizer)
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg_sq"], before["state"][0]["exp_avg_sq"])
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert float(optimizer.state[weight]["step"]) == pytest.approx(STEP)


@pytest.mark.parametrize("mode", MODES)
def test_thawed_it_goes_on_as_if_it_had_not_been_frozen(mode):
    optimizer, weight, spare = warm("adamw", **MODES[mode])
    other = copy.deepcopy(optimizer)
    twin, twin_spare = other.param_groups[0]["params"][0], other.param_groups[1]["params"][0]
    freeze(optimizer, move=True)
    state = {p: momentum(group, own).clone() for group, p, own in moments(optimizer)}
    thaw(optimizer, state.get)
    assert optimizer.param_groups[0]["betas"] == other.param_groups[0]["betas"]
    assert MARK not in optimizer.param_groups[0]
    for _ in range(5):
        weight.grad = torch.randn_like(weight)
        spare.grad = torch.randn_like(spare)  # its first steps
        twin.grad, twin_spare.grad = weight.grad.clone(), spare.grad.clone()
        optimizer.step()
        other.step()
    torch.testing.assert_close(weight, twin, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(spare, twin_spare, rtol=1e-5, atol=1e-6)


def test_momentum_has_the_sign_of_the_gradient_and_complex_numbers_are_pairs():
    weight = torch.randn(4, 3, dtype=torch.complex64).requires_grad_()
    optimizer = Adam([weight], maximize=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    freeze(optimizer, move=True)
    ((group, _, state),) = moments(optimizer)
    assert momentum(group, state).shape == (4, 3, 2)
    torch.testing.assert_close(momentum(group, state)[..., 0], torch.ones(4, 3))
    assert state["exp_avg_sq"].imag.isinf().all()  # the imaginary parts never had a gradient


REFUSED = {
    "another optimizer": (lambda p: torch.optim.SGD(p, lr=1.0), "Adam and AdamW, got SGD; make it one of"),
    "a kind of adam": (lambda p: torch.optim.NAdam(p), "Adam and AdamW, got NAdam"),
    "capturable": (lambda p: Adam(p, capturable=True), "capturable=False"),
    "differentiable": (lambda p: Adam(p, differentiable=True), "differentiable=False"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_way_out(case):
    make, words = REFUSED[case]
    with pytest.raises((gl.WrongType, gl.InvalidValue), match=words):
        gl.freeze_moments(make([torch.zeros(2, requires_grad=True)]))


def test_an_optimizer_in_a_wrapper_is_named():
    class Wrapper:
        optimizer = Adam([torch.zeros(2, requires_grad=True)])

    with pytest.raises(
        gl.WrongType, match=r"got Wrapper; pass the one inside of this Wrapper: optimizer\.opt"
    ):
        gl.freeze_moments(Wrapper())


def test_options_without_an_attachment_are_refused():
    with pytest.raises(
        gl.InvalidValue, match=r"need the attachment .* freeze_moments\(optimizer\) to freeze now"
    ):
        gl.freeze_moments(Adam([torch.zeros(2, requires_grad=True)]), after=10)
    with pytest.raises(gl.WrongType, match="got a int as attachment"):
        gl.freeze_moments(Adam([torch.zeros(2, requires_grad=True)]), 60)


def test_a_second_moment_that_float16_cannot_hold_is_refused():
    weight = torch.zeros(2, dtype=torch.float16, requires_grad=True)
    optimizer = Adam([weight], fused=True)
    weight.grad = torch.full_like(weight, 250.0)
    optimizer.step()
    optimizer.state[weight]["exp_avg_sq"].fill_(1000.0)  # 1e6 without its bias correction
    with pytest.raises(gl.InvalidValue, match=r"larger than torch\.float16 can hold"):
        gl.freeze_moments(optimizer)


def test_noise_in_the_momentum_of_an_element_without_gradient_does_not_move_it_in_a_refresh():
    """One bit gives such an element the magnitude of its block; divided by eps it was a step of 1e5."""
    weights = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.Adam([weights], lr=0.01)
    for _ in range(3):
        weights.grad = torch.tensor([1.0, -2.0, 3.0, 0.0])
        optimizer.step()
    freeze(optimizer, move=True)
    thaw(optimizer, lambda p: torch.full((4,), 0.1))
    before = weights.detach().clone()
    optimizer.step()
    moved = (weights.detach() - before).abs()
    assert moved[3] == 0
    assert 0 < moved[:3].min() <= moved[:3].max() < 0.02
    freeze(optimizer, move=True)
    assert momentum(optimizer.param_groups[0], optimizer.state[weights])[3] == 0
