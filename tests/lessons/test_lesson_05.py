"""The functions that lesson 5 defines, and the effect it rests on."""

import math

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

CPU = torch.device("cpu")
XY = models.pixel_grid(32)


@pytest.fixture
def lesson():
    unit = 1e-3
    return load(
        "05", device=CPU, xy=XY, target=unit * torch.sin(torch.pi * XY[:, :1]), unit=unit, steps=60
    )


def test_output_gradients_are_those_of_autograd(lesson):
    model = lesson.new_skin(0)
    got = lesson.output_gradients(model)
    hidden = model[:-1](XY).detach().requires_grad_()
    loss = torch.nn.functional.mse_loss(lesson.unit * model[-1](hidden), lesson.target)
    (expected,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(got[-2], expected)
    assert [g.shape for g in got] == [(1024, 32)] * 4 + [(1024, 1)]


def test_scaling_by_a_power_of_two_is_exact(lesson):
    plain, scaled = (lesson.gradients_of(lesson.new_skin(1), scale) for scale in (1, 2**16))
    assert all(torch.equal(a, b) for a, b in zip(plain, scaled, strict=True))


def test_distance_is_the_relative_length_of_the_difference(lesson):
    a, b = (
        [torch.tensor([3.0]), torch.tensor([[4.0]])],
        [torch.tensor([3.0]), torch.tensor([[0.0]])],
    )
    assert lesson.distance(b, a) == pytest.approx(0.8)


@each("seed", range(2))
def test_unscaled_fp16_never_moves_and_scaled_fp16_follows_float32(lesson, seed):
    _, unscaled = lesson.train(torch.float16, 1, seed)
    _, scaled = lesson.train(torch.float16, 2**16, seed)
    _, reference = lesson.train(torch.float32, 1, seed)
    assert len(unscaled) == 60
    assert unscaled[-1] == unscaled[0]
    assert scaled[-1] == pytest.approx(reference[-1], rel=0.05)
    assert reference[-1] < 0.9 * reference[0]


@each("exponent", [-40, -30, -24, -3, 0, 5])
def test_the_solutions_agree_with_torch(lesson, exponent):
    value = torch.tensor([2.0**exponent])
    scale = lesson.safe_scale(value, 0.5)
    assert (value * scale).half() > 0 and (scale == 1 or (value * scale / 2).half() == 0)
    largest = lesson.largest_scale(value)
    assert math.isfinite((value * largest).half()) and math.isinf((value * largest * 2).half())


def test_moves_is_what_fp16_arithmetic_does(lesson):
    weight = torch.randn(1000, generator=torch.Generator().manual_seed(0)).half()
    update = (
        weight.float() * 2.0**-11 * torch.rand(1000, generator=torch.Generator().manual_seed(1))
    ).half()
    expected = (weight.numpy() - update.numpy()) != weight.numpy()
    assert lesson.moves(weight, update).tolist() == expected.tolist()
    assert 0 < expected.sum() < 1000
