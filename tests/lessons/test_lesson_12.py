"""The functions that lesson 12 defines."""

from types import SimpleNamespace

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

SIZE = 16


@pytest.fixture
def lesson():
    given = {"device": torch.device("cpu"), "on_cpu": True, "size": SIZE, "width": 16, "lr": 0.01}
    pixels = (models.pixel_grid(SIZE) + 1) / 2
    board = models.checkerboard(SIZE)
    return load("12", **given, seed=0, pixels=pixels, board=board, steps=3)


@each("precision", ["fp32", "bf16", "fp16"])
def test_a_run_learns_and_keeps_every_loss_and_no_buffer(lesson, precision):
    run = lesson.new_run(precision, 0)
    for steps in (15, 25):
        lesson.train(run, steps)
    assert len(run.losses) == 40 and run.losses[-1] < 0.7 * run.losses[0]
    assert all(type(loss) is float for loss in run.losses)
    assert run.picture.dtype == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in run.net.parameters())


def test_training_in_pieces_is_training_in_one(lesson):
    whole, pieces = lesson.new_run("fp16", 0), lesson.new_run("fp16", 0)
    lesson.train(whole, 6)
    lesson.train(pieces, 2)
    lesson.train(pieces, 4)
    assert whole.losses == pieces.losses


def test_reordered_pixels_are_the_same_function(lesson):
    straight, shuffled = lesson.start("fp32", 0), lesson.start("fp32 reordered", 0)
    assert not torch.equal(straight.inputs, shuffled.inputs)
    for run in (straight, shuffled):
        lesson.train(run, 1)
    assert straight.losses[0] == pytest.approx(shuffled.losses[0], rel=1e-5)


def test_the_final_error_is_the_mean_of_the_last_tenth(lesson):
    run = SimpleNamespace(losses=[float(step) for step in range(100)])
    lesson.steps = 100
    assert lesson.final_error(run) == 94.5
    lesson.steps = 5
    assert lesson.final_error(run) == 99


@each("init_scale", [2.0**16, 12_345.0, 2.0**30])
def test_your_own_amp_is_torchs_at_any_scale(lesson, init_scale):
    theirs, mine = lesson.new_run("fp16", 0), lesson.new_run("fp16", 0)
    theirs.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)
    mine.scaler = lesson.MyScaler(init_scale, growth_interval=3)
    lesson.train(theirs, 20)
    lesson.train(mine, 20, lesson.my_autocast)
    assert theirs.losses == mine.losses
    assert theirs.scaler.get_scale() == mine.scaler.loss_scale.item()


@each("n", [1, 5, 6])
def test_chance_of_equal_differences_is_two_ways_in_all(lesson, n):
    assert lesson.chance([0.1] * n) == lesson.chance([-0.1] * n) == 2 / 2**n
    assert lesson.chance([0.1, -0.1] * n) == 1


def test_accuracy_counts_pixels_on_the_right_side_of_grey(lesson):
    assert lesson.pixel_accuracy(lesson.board * 0.02 + 0.49) == 1
    half = lesson.board.clone()
    half[: SIZE * SIZE // 2] = 1 - half[: SIZE * SIZE // 2]
    assert lesson.pixel_accuracy(half) == 0.5
