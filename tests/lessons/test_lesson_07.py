"""The functions that lesson 7 defines."""

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

XY = models.pixel_grid(16)


@pytest.fixture
def lesson():
    wave = torch.sin(torch.pi * XY[:, :1]) * XY[:, 1:]
    return load("07", device=torch.device("cpu"), seed=0, steps=40, max_norm=0.1, xy=XY, wave=wave)


def test_the_right_order_leaves_max_norm_and_the_wrong_one_next_to_nothing(lesson):
    assert lesson.update_length(unscale_first=True) == pytest.approx(0.1, rel=1e-3)
    assert lesson.update_length(unscale_first=False) == pytest.approx(0.1 / 65536, rel=1e-3)


@each("max_norm", [0.05, 0.1, 1.0])
@each("seed", [0, 1])
def test_amp_clipping_follows_float32_clipping_and_the_wrong_order_stands_still(
    lesson, max_norm, seed
):
    lesson.seed = seed
    reference = lesson.train(max_norm, "right", torch.float32)
    right, wrong = lesson.train(max_norm, "right"), lesson.train(max_norm, "wrong")
    assert right == pytest.approx(reference, rel=0.01)
    assert wrong[-1] > 0.98 * wrong[0]


@each("max_norm", [0.1, 1.0, 100.0])
def test_clip_is_torchs_clip(lesson, max_norm):
    ours = [torch.randn(3, 2), torch.randn(5)]
    theirs = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert lesson.clip(ours, max_norm) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(theirs, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-6)


def test_attempts_report_torchs_errors(lesson):
    assert lesson.attempt("unscale_", "step") == "fine"
    assert lesson.attempt("unscale_", "unscale_").startswith(
        "RuntimeError: unscale_() has already been called"
    )
    assert (
        lesson.attempt("step", "unscale_")
        == "RuntimeError: unscale_() is being called after step()."
    )
