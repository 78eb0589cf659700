"""The functions that lesson 12 defines."""

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load


@pytest.fixture
def lesson():
    given = {
        "device": torch.device("cpu"),
        "on_cpu": True,
        "size": 16,
        "width": 16,
        "lr": 0.01,
        "seed": 0,
    }
    pixels, target = models.pixel_grid(16), models.checkerboard(16)
    return load("12", **given, pixels=pixels, target=target, steps=3)


@each("precision", ["fp32", "bf16", "fp16"])
def test_painting_learns_in_every_precision(lesson, precision):
    result = lesson.paint(precision, 40)
    assert len(result["losses"]) == 40 and result["losses"][-1] < 0.7 * result["losses"][0]
    assert result["seconds"] > 0 and len(result["log"]) == 40
    assert all(parameter.dtype == torch.float32 for parameter in result["net"].parameters())


def test_every_precision_starts_from_the_same_weights(lesson):
    (one, _), (two, _) = lesson.new_painter(), lesson.new_painter()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def test_accuracy_counts_pixels_on_the_right_side_of_grey(lesson):
    assert lesson.pixel_accuracy(lesson.target * 0.2 + 0.4) == 1
    assert lesson.pixel_accuracy(1 - lesson.target) == 0
    half = lesson.target.clone()
    half[:128] = 1 - half[:128]
    assert lesson.pixel_accuracy(half) == 0.5


def test_a_picture_is_square_float32_and_on_the_cpu(lesson):
    picture = lesson.as_picture(lesson.target.bfloat16())
    assert picture.shape == (16, 16) and picture.dtype == torch.float32


def test_the_amp_step_solution_clips_what_a_float32_step_clips(lesson):
    inputs, targets = torch.randn(8, 2), torch.full((8, 1), 10.0)
    nets = [torch.nn.Linear(2, 1) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5) for net in nets]
    lesson.amp_step(
        nets[0], optimizers[0], torch.amp.GradScaler("cpu", init_scale=64.0), inputs, targets
    )
    torch.nn.functional.mse_loss(nets[1](inputs), targets).backward()
    torch.nn.utils.clip_grad_norm_(nets[1].parameters(), 1.0)
    optimizers[1].step()
    torch.testing.assert_close(nets[0].weight, nets[1].weight, atol=2e-3, rtol=2e-3)
