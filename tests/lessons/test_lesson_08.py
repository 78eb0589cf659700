"""The functions that lesson 8 defines."""

import math
from contextlib import nullcontext

import pytest
import torch
from support.each import each
from torch.nn.functional import mse_loss

from amp_utils import models
from amp_utils.course.notebook import load

CPU = torch.device("cpu")
XY = models.pixel_grid(16)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
WAVE = torch.sin(torch.pi * XY[:, :1]) * XY[:, 1:]


@pytest.fixture
def lesson():
    return load("08", device=CPU, seed=0, xy=XY, wave=WAVE, mse_loss=mse_loss)


def float32(*device, **dtype):
    """In place of torch.autocast: nothing is rounded to 16 bits."""
    return nullcontext()


@each("seed", [0, 42])  # with seed 42 the gradient is clipped
@each("pieces", [1, 4, 16])
def test_bites_make_the_step_of_the_big_batch(lesson, pieces, seed, monkeypatch):
    lesson.seed = seed
    net = lesson.new_net()
    grads = torch.autograd.grad(mse_loss(net(XY), WAVE), list(net.parameters()))
    grad = lesson.flat(grads)
    expected = -0.1 * grad / max(1, grad.norm().item())
    assert lesson.distance(lesson.first_step(pieces), expected) < 1e-2
    monkeypatch.setattr(torch, "autocast", float32)
    assert lesson.distance(lesson.first_step(pieces), expected) < 1e-5


def test_batch_norm_ends_the_equality(lesson):
    norm = torch.nn.BatchNorm1d
    whole, bites = (lesson.first_step(pieces, norm(32)) for pieces in (1, 4))
    assert lesson.distance(bites, whole) > 0.01


class Shares(torch.nn.Module):
    """A network with a weight of its own for each micro-batch, whose loss has the slope 1 there."""

    def __init__(self, batches):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(batches))

    def forward(self, number):
        return self.weight[number]


@each("batches, k", [(10, 4), (8, 4), (3, 4), (7, 3), (1, 1)])
def test_the_loop_steps_every_micro_batch_once_and_each_step_is_a_mean(lesson, batches, k):
    net = Shares(batches)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    lesson.train(net, optimizer, scaler, [(i, torch.tensor(-0.5)) for i in range(batches)], k)
    sizes = [min(k, batches - first) for first in range(0, batches, k)]
    shares = torch.tensor([1 / size for size in sizes for _ in range(size)])
    torch.testing.assert_close(net.weight, -0.1 * shares)


@each("batches, k", [(10, 4), (7, 3), (3, 4)])
def test_the_page_drops_or_leaks_the_tail(lesson, batches, k):
    steps = lesson.steps_of_the_page(batches, k, epochs=2)
    assert len(steps) == 2 * (batches // k)
    if batches > k:  # the first step of the second epoch has the tail of the first
        assert steps[batches // k].sum() == pytest.approx(1 + batches % k / k)


def gradient_of(optimizer):
    return optimizer.param_groups[0]["params"][0].grad


def test_hands_off_in_the_middle(lesson):
    assert lesson.two_micro_batches() == 2
    assert lesson.two_micro_batches(lambda scaler, opt: scaler.unscale_(opt)) == 1025
    assert lesson.two_micro_batches(lambda scaler, opt: scaler.update(2048.0)) == 1.5
    assert lesson.two_micro_batches(lambda scaler, opt: gradient_of(opt).fill_(math.inf)) == 0
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        lesson.two_micro_batches(lambda scaler, opt: scaler.update())
    with pytest.raises(RuntimeError, match="already been called"):
        lesson.two_micro_batches(lambda scaler, opt: [scaler.unscale_(opt) for _ in range(2)])


@each("growth_interval, length", [(1, 1.5), (2000, 2)])
def test_the_update_of_a_second_optimizer_may_double_the_scale_in_mid_group(
    lesson, growth_interval, length
):
    def step_another(scaler, _):
        scaler.set_growth_interval(growth_interval)
        weight = torch.nn.Parameter(torch.zeros(()))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scaler.scale(weight * 1).backward()
        scaler.step(optimizer)
        scaler.update()

    assert lesson.two_micro_batches(step_another) == length


def steps_of(pressed):
    """The gradient at each step on the board; `pressed[i]` are the calls after micro-batch i."""
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer, steps = torch.optim.SGD([weight], lr=1.0), []
    optimizer.register_step_pre_hook(lambda *_: steps.append(weight.grad.item()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    calls = {
        "unscale_": lambda: scaler.unscale_(optimizer),
        "step": lambda: scaler.step(optimizer),
        "update": scaler.update,
        "zero_grad": optimizer.zero_grad,
    }
    for names in pressed:
        scaler.scale(weight * 1).backward()
        for name in names:
            calls[name]()
    return steps


def test_six_buttons_make_two_groups_ready_for_a_third_and_none_can_be_spared():
    closed, third = ("step", "update", "zero_grad"), [(), ("step",)]
    assert steps_of([(), closed, (), closed, *third]) == [2, 2, 2]
    for place in (1, 3):
        for spared in closed:
            pressed = [(), closed, (), closed, *third]
            pressed[place] = tuple(name for name in closed if name != spared)
            if spared == "update":
                with pytest.raises(RuntimeError, match="already been called"):
                    steps_of(pressed)
            elif spared == "step":
                with pytest.raises(AssertionError, match="No inf checks were recorded"):
                    steps_of(pressed)
            else:
                assert steps_of(pressed) != [2, 2, 2]


def test_the_penalty_on_inputs_survives_torchs_first_scale(lesson):
    scaler = torch.amp.GradScaler("cpu")
    penalty = lesson.input_penalty(lesson.new_net(), XY, scaler)
    exact, x = lesson.new_net().double(), XY.double().requires_grad_()
    (slope,) = torch.autograd.grad(exact(x).sum(), x)
    assert penalty.item() == pytest.approx((slope.norm(dim=1) - 1).square().mean().item(), rel=0.02)


def by_hand(lesson):
    """Length of the gradient of mse, and the gradient of mse + weight · length, in float64."""
    net = lesson.new_net().double()
    names = [name for name, _ in net.named_parameters()]

    def loss(*values):
        weights = dict(zip(names, values, strict=True))
        output = torch.func.functional_call(net, weights, (XY.double(),))
        return mse_loss(output, WAVE.double())

    def total(*values):
        grads = torch.func.grad(loss, argnums=tuple(range(len(values))))(*values)
        norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
        return loss(*values) + lesson.penalty_weight * norm, norm

    values = tuple(p.detach() for p in net.parameters())
    grads, norm = torch.func.grad(total, argnums=tuple(range(len(values))), has_aux=True)(*values)
    return norm.item(), grads


@each("seed", range(2))
def test_the_amp_penalty_is_the_plain_penalty_is_the_true_one(lesson, seed, monkeypatch):
    lesson.seed = seed
    true_length, grads = by_hand(lesson)
    true_gradient = lesson.flat(grads)
    length, gradient = lesson.plain_penalty(lesson.new_net())
    assert length == pytest.approx(true_length, rel=1e-5)
    assert lesson.distance(gradient.double(), true_gradient) < 1e-5

    length_amp, gradient_amp = lesson.amp_penalty(lesson.new_net())
    assert length_amp == pytest.approx(true_length, rel=0.01)
    assert lesson.distance(gradient_amp.double(), true_gradient) < 0.01
    wrong, _ = lesson.amp_penalty(lesson.new_net(), divide=False)
    assert wrong == 4096 * length_amp
    monkeypatch.setattr(torch, "autocast", float32)
    length_32, gradient_32 = lesson.amp_penalty(lesson.new_net())
    assert length_32 == length and torch.equal(gradient_32, gradient)


def small_loss_and_length(lesson, net, scale, eps=0.0):
    """A loss a million times too small for fp16, and the length of its inner gradient."""
    with torch.autocast("cpu", dtype=torch.float16):
        loss = 1e-6 * mse_loss(net(XY), WAVE)
    inner = torch.autograd.grad(scale * loss, net.parameters(), create_graph=True)
    return loss, ((lesson.flat(inner) / scale).square().sum() + eps).sqrt()


@each("scale, eps, slope", [(1.0, 0.0, "nan"), (1.0, 1e-12, "zero"), (2.0**16, 0.0, "fine")])
def test_eps_under_the_root_avoids_the_nan_but_not_the_underflow(lesson, scale, eps, slope):
    net = lesson.new_net()
    _, length = small_loss_and_length(lesson, net, scale, eps)
    (outer,) = torch.autograd.grad(2.0**16 * length, net[0].weight)
    got = "nan" if outer.isnan().all() else "fine" if outer.any() else "zero"
    assert (got, bool(outer.isinf().any())) == (slope, False)


@each("scaled", [True, False])
def test_no_loss_scale_helps_an_inner_pass_that_is_not_scaled(lesson, scaled):
    net = lesson.new_net()
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    before, steps = lesson.flat(net.parameters()).detach(), 20
    for _ in range(steps):
        scale = scaler.scale(torch.ones(())) if scaled else 1.0
        loss, length = small_loss_and_length(lesson, net, scale)
        scaler.scale(loss + 0.1 * length).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == (2.0**16 if scaled else 2.0 ** (16 - steps))
    assert torch.equal(before, lesson.flat(net.parameters())) != scaled
