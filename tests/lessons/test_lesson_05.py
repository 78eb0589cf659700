"""The functions that lesson 5 defines, and the effects it rests on."""

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

XY = models.pixel_grid(16)
SHAPE = torch.sin(torch.pi * XY[:, :1])


@pytest.fixture
def lesson():
    return load("05", device=torch.device("cpu"), xy=XY, shape=SHAPE, unit=1e-3, steps=40, seed=0)


def test_output_gradients_are_those_of_autograd(lesson):
    model = lesson.new_skin(0)
    got = lesson.output_gradients(model, torch.float32, 1)
    hidden = model[:-1](XY).detach().requires_grad_()
    loss = torch.nn.functional.mse_loss(1e-3 * model[-1](hidden), 1e-3 * SHAPE)
    (expected,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(got[-2], expected)
    assert [g.shape for g in got] == [(256, 32)] * 4 + [(256, 1)]


def test_gradients_are_fp16_and_those_of_the_weights_were(lesson):
    model = lesson.new_skin(0)
    got = lesson.output_gradients(model, torch.float16, 2**16)
    assert {g.dtype for g in got} == {torch.float16}
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, parameter.grad.half().float())


@each("seed", range(2))
def test_unscaled_fp16_never_moves_and_scaled_fp16_follows_float32(lesson, seed):
    unscaled = lesson.train(lesson.new_skin(seed), torch.float16, 1)
    scaled = lesson.train(lesson.new_skin(seed), torch.float16, 2**16)
    reference = lesson.train(lesson.new_skin(seed), torch.float32, 1)
    assert len(unscaled) == 40 and unscaled[-1] == unscaled[0]
    assert scaled[-1] == pytest.approx(reference[-1], rel=0.05)
    assert reference[-1] < 0.9 * reference[0]


def test_a_small_eps_makes_metres_as_good_as_millimetres(lesson):
    metres = lesson.train(lesson.new_skin(0), torch.float32, 1, eps=1e-14)
    millimetres = lesson.train(lesson.new_skin(0), torch.float32, 1, unit=1.0)
    assert metres == pytest.approx(millimetres, rel=1e-2)
    assert metres[-1] < 0.9 * lesson.train(lesson.new_skin(0), torch.float32, 1)[-1]


# One gradient of each of three layers in float32, and what diagnose should find.
CASES = {
    "none is too small": ([1.0, 2.0**-24, -1.0], [], 1),
    "one is too small": ([1.0, -(2.0**-25), 1.0], [1], 2),
    "two of different sizes": ([2.0**-40, 1.0, 2.0**-26], [0, 2], 2**16),
    "zero in float32, too": ([0.0, 0.0, 2.0**-26], [2], 4),
    "all zero": ([0.0, 0.0, 0.0], [], 1),
}


@each("case", CASES)
def test_a_diagnosis_names_the_layers_and_the_scale_that_revives_them(lesson, case):
    values, layers, scale = CASES[case]

    def make_gradients(dtype, S):
        return [(torch.tensor([0.0, value]) * S).to(dtype).float() for value in values]

    assert lesson.diagnose(make_gradients) == (layers, scale)


def test_the_diagnosis_of_the_drum_skin(lesson):
    def make_gradients(dtype, S):
        gradients = lesson.gradients_of(lesson.new_skin(0), dtype, S)
        return [gradient * S for gradient in gradients[::2]]

    layers, scale = lesson.diagnose(make_gradients)
    assert layers == [0, 1, 2]
    assert all(gradient.any() for gradient in make_gradients(torch.float16, scale))
    assert not all(gradient.any() for gradient in make_gradients(torch.float16, scale / 2))
