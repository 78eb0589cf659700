"""The functions that lesson 12 defines."""

from functools import partial
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


def with_rules(lesson, **rules):
    """An autocast with these rules changed."""

    def region(*args, **kwargs):
        mine = lesson.my_autocast(*args, **kwargs)
        mine.rules = mine.rules | rules
        return mine

    return region


def test_a_fault_is_found_in_its_part(lesson):
    def hoarder(*args, kept={}, **kwargs):  # noqa: B006 (the fault)
        mine = lesson.my_autocast(*args, **kwargs)
        mine.copies = kept
        return mine

    class Stubborn(lesson.MyScaler):
        def update(self):
            """Never changes the scale."""

    find, fine = lesson.faulty_part, lesson.my_autocast
    assert find(fine, lesson.MyScaler) == "none"
    assert find(with_rules(lesson, mse_loss=lesson.LOW), lesson.MyScaler) == "rules"
    assert find(with_rules(lesson, linear=lesson.WIDE), lesson.MyScaler) == "rules"
    assert find(hoarder, lesson.MyScaler) == "cache"
    assert find(fine, Stubborn) == "scaler"
    assert find(torch.autocast, partial(torch.amp.GradScaler, "cpu")) == "none"


@each("start", [2.0**10, 2.0**24])
def test_skipped_steps_are_those_that_adam_did_not_take(lesson, start):
    run = lesson.trained("fp16", lesson.MyScaler(start), lesson.my_autocast, 20)
    assert (lesson.skipped(run) > 0) == (run.scaler.loss_scale < start) == (start > 2**20)
    assert len(run.losses) == 20 and lesson.skipped(lesson.new_run("fp16", 0)) == 0


@each("n", [1, 5, 6])
def test_chance_of_equal_differences_is_two_ways_in_all(lesson, n):
    assert lesson.chance([0.1] * n) == lesson.chance([-0.1] * n) == 2 / 2**n
    assert lesson.chance([0.1, -0.1] * n) == 1


def test_accuracy_counts_pixels_on_the_right_side_of_grey(lesson):
    assert lesson.pixel_accuracy(lesson.board * 0.02 + 0.49) == 1
    half = lesson.board.clone()
    half[: SIZE * SIZE // 2] = 1 - half[: SIZE * SIZE // 2]
    assert lesson.pixel_accuracy(half) == 0.5
