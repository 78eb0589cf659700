"""The functions that lesson 8 defines."""

import math

import pytest
import torch
from support.each import each
from torch.nn.functional import mse_loss

from amp_utils import models
from amp_utils.course.notebook import load

CPU, F32 = torch.device("cpu"), torch.float32
XY = models.pixel_grid(16)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
WAVE = torch.sin(torch.pi * XY[:, :1]) * XY[:, 1:]


@pytest.fixture
def lesson():
    return load("08", device=CPU, seed=0, epochs=3, xy=XY, wave=WAVE, mse_loss=mse_loss)


@each("seed", [0, 42])  # with seed 42 an element of the gradient is above 1
@each("pieces", [1, 4, 16])
def test_bites_have_the_gradient_of_the_big_batch(lesson, pieces, seed):
    lesson.seed = seed
    net = lesson.new_net()
    grads = torch.autograd.grad(mse_loss(net(XY), WAVE), list(net.parameters()))
    expected = torch.cat([grad.flatten() for grad in grads])
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        bites = lesson.gradient_in(pieces, pieces, lesson.new_net(), dtype)
        assert lesson.distance(bites, expected) < tolerance
    assert lesson.integer_gradient(pieces) == lesson.integer_gradient(1)


def test_batch_norm_ends_the_equality(lesson):
    norm = torch.nn.BatchNorm1d
    whole, bites = (lesson.gradient_in(n, n, lesson.new_net(norm(32))) for n in (1, 4))
    assert lesson.distance(bites, whole) > 0.01


@each("batches, k", [(10, 4), (8, 4), (3, 4), (7, 3), (1, 1)])
def test_every_micro_batch_is_in_one_step_an_epoch_and_each_step_is_a_mean(lesson, batches, k):
    steps = lesson.steps_with_tail(batches, k, epochs=2)
    groups = [list(range(batches))[first : first + k] for first in range(0, batches, k)]
    assert [step.nonzero().flatten().tolist() for step in steps] == groups * 2
    for step, group in zip(steps, groups * 2, strict=True):
        torch.testing.assert_close(step[group], torch.full((len(group),), 1 / len(group)))


@each("batches, k", [(10, 4), (7, 3), (3, 4)])
def test_the_page_drops_or_leaks_the_tail(lesson, batches, k):
    steps = lesson.steps_of_the_page(batches, k, epochs=2)
    assert len(steps) == 2 * (batches // k)
    if batches > k:  # the first step of the second epoch has the tail of the first
        assert steps[batches // k].sum() == pytest.approx(1 + batches % k / k)


def test_hands_off_in_the_middle(lesson):
    assert lesson.two_micro_batches() == 2
    assert lesson.two_micro_batches(lesson.look) == 1025
    assert lesson.two_micro_batches(second=math.inf) == 0
    assert lesson.two_micro_batches(lesson.look, second=math.inf) == math.inf
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        lesson.two_micro_batches(lambda scaler, opt: scaler.update())
    with pytest.raises(RuntimeError, match="already been called"):
        lesson.two_micro_batches(lambda scaler, opt: [scaler.unscale_(opt) for _ in range(2)])


def test_training_in_bites_stays_near_the_big_batch_and_an_early_unscale_does_not(lesson):
    big, bites, early = (
        lesson.train(*how) for how in ((1, F32), (8, torch.float16), (8, torch.float16, True))
    )
    assert len(big["path"]) == len(bites["path"]) == 12

    def apart(run):
        return max(map(lesson.distance, run["path"], big["path"]))

    assert apart(bites) < 0.003 < apart(early)
    assert max(bites["lengths"]) < 1 < min(early["lengths"])
    unclipped = lesson.train(8, torch.float16, True, max_norm=math.inf)
    net = lesson.new_net()
    torch.nn.utils.vector_to_parameters(unclipped["path"][0], net.parameters())
    assert not mse_loss(net(XY), WAVE) < 1000


def test_the_penalty_on_inputs_survives_torchs_first_scale(lesson):
    scaler = torch.amp.GradScaler("cpu")
    penalty = lesson.input_penalty(lesson.new_net(), XY, scaler)
    exact, x = lesson.new_net().double(), XY.double().requires_grad_()
    (slope,) = torch.autograd.grad(exact(x).sum(), x)
    assert penalty.item() == pytest.approx((slope.norm(dim=1) - 1).square().mean().item(), rel=0.02)


def by_hand(lesson, unit=1.0, plain=1.0):
    """Length of the gradient of unit² · mse, and the gradient of plain · mse + weight · length,

    by torch.func in float64.
    """
    net = lesson.new_net().double()
    names = [name for name, _ in net.named_parameters()]

    def loss(*values):
        weights = dict(zip(names, values, strict=True))
        output = torch.func.functional_call(net, weights, (XY.double(),))
        return unit**2 * mse_loss(output, WAVE.double())

    def total(*values):
        grads = torch.func.grad(loss, argnums=tuple(range(len(values))))(*values)
        norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
        return plain * loss(*values) + (lesson.penalty_weight if plain else 1) * norm, norm

    values = tuple(p.detach() for p in net.parameters())
    grads, norm = torch.func.grad(total, argnums=tuple(range(len(values))), has_aux=True)(*values)
    return norm.item(), grads


@each("seed", range(2))
def test_the_amp_penalty_is_the_plain_penalty_is_the_true_one(lesson, seed):
    lesson.seed = seed
    true_norm, grads = by_hand(lesson)
    true_gradient = torch.cat([grad.flatten() for grad in grads])
    norm, gradient = lesson.plain_penalty(lesson.new_net())
    assert norm == pytest.approx(true_norm, rel=1e-5)
    assert lesson.distance(gradient.double(), true_gradient) < 1e-5

    norm_32, gradient_32 = lesson.amp_penalty(lesson.new_net(), torch.float32)
    assert norm_32 == norm and torch.equal(gradient_32, gradient)
    norm_16, gradient_16 = lesson.amp_penalty(lesson.new_net(), torch.float16)
    assert norm_16 == pytest.approx(true_norm, rel=0.01)
    assert lesson.distance(gradient_16.double(), true_gradient) < 0.01
    wrong, _ = lesson.amp_penalty(lesson.new_net(), torch.float16, divide=False)
    assert wrong == 4096 * norm_16


def test_an_inner_loss_that_is_not_scaled_is_lost_in_fp16_and_eps_does_not_bring_it_back(lesson):
    norm, gradient = lesson.skin_penalty(1.0)
    assert norm == 0 and gradient.isnan().all()
    for length in (lambda grads: lesson.root(grads, eps=1e-12), torch.Tensor.norm):
        norm, gradient = lesson.skin_penalty(1.0, length)
        assert gradient.isfinite().all() and not gradient.any()
    true_norm, grads = by_hand(lesson, unit=1e-3, plain=0.0)
    scaled, in_bf16 = {"scale": 2.0**20}, {"scale": 1.0, "dtype": torch.bfloat16}
    for how in (scaled, in_bf16):
        norm, gradient = lesson.skin_penalty(**how)
        assert norm == pytest.approx(true_norm, rel=0.02)
        assert lesson.distance(gradient.double(), grads[0]) < 0.05
