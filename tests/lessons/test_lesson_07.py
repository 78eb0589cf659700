"""The functions that lesson 7 defines, and the effects it rests on."""

import math

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

XY = models.pixel_grid(16)


@pytest.fixture
def lesson():
    wave = torch.sin(torch.pi * XY[:, :1]) * XY[:, 1:]
    given = {"seed": 0, "steps": 70, "max_norm": 0.1, "steep_step": 20}
    return load("07", device=torch.device("cpu"), xy=XY, wave=wave, **given)


def test_the_right_order_leaves_max_norm_and_the_wrong_one_next_to_nothing(lesson):
    assert lesson.update_length(unscale_first=True) == pytest.approx(0.1, rel=1e-3)
    assert lesson.update_length(unscale_first=False) == pytest.approx(0.1 / 65536, rel=1e-3)


@each("seed", [0, 1])
def test_the_right_order_survives_a_steep_batch_as_float32_does(lesson, seed):
    lesson.seed = seed
    reference, _ = lesson.train("right", max_norm=1.0, dtype=torch.float32)
    right, _ = lesson.train("right", max_norm=1.0)
    assert right == pytest.approx(reference, rel=0.01) and right[-1] < 0.8 * right[0]
    assert not lesson.train("no clip")[0][-1] < 100
    assert lesson.train("wrong", max_norm=1.0)[0][-1] > 0.9 * right[0]


def test_a_doubled_scale_halves_the_update_in_the_wrong_order_only(lesson):
    tight = {"steep": 0, "growth_interval": 60}
    _, right = lesson.train("right", max_norm=0.05, **tight)
    _, wrong = lesson.train("wrong", max_norm=0.05 * 256, **tight)
    assert right == pytest.approx([0.005] * 70, rel=1e-2)
    assert wrong == pytest.approx([0.005] * 60 + [0.0025] * 10, rel=1e-2)


def test_adams_updates_sink_after_the_doubling_and_recover_as_its_averages_forget(lesson):
    lengths = lesson.adam_lengths()
    assert lengths[:2000] == pytest.approx([0.01] * 2000, rel=1e-2)
    for n in (1, 5, 20, 2000):  # gradients: 2000 times 1, then n times a half
        mean = 0.9**n + 0.5 * (1 - 0.9**n)
        squares = 0.999**n * (1 - 0.999**2000) + 0.25 * (1 - 0.999**n)
        worked_out = 0.01 * mean / math.sqrt(squares / (1 - 0.999 ** (2000 + n)))
        assert lengths[1999 + n] == pytest.approx(worked_out, rel=1e-2)


@each("seed", [0, 1])
def test_with_adam_the_wrong_order_ends_best_and_no_clip_worst(lesson, seed):
    lesson.seed, lesson.steps = seed, 150
    last = {
        clip: lesson.train(clip, adam=True, max_norm=1.0, steep=50)[0][-1]
        for clip in ("no clip", "right", "wrong")
    }
    assert last["wrong"] < last["right"] < last["no clip"]
    low, _ = lesson.train("right", adam=True, max_norm=0.03, steep=50)
    assert low[-1] < 0.5 * last["right"]


@each("kind", ["SGD", "Adam"])
def test_in_the_wrong_order_the_clip_finds_the_scale_times_the_length(lesson, kind):
    right, wrong = (lesson.lengths_found(kind, order) for order in ("right", "wrong"))
    assert wrong[0] == pytest.approx(4096 * right[0], rel=1e-2)
    assert max(right) < 1 and min(wrong) > 500
    assert kind == "Adam" or wrong[2] == pytest.approx(2 * wrong[1], rel=1e-2)


def test_from_a_scale_of_65536_the_steep_batch_alone_is_skipped(lesson):
    errors, lengths = lesson.train("no clip", init_scale=65536.0)
    assert [i for i, length in enumerate(lengths, 1) if length == 0] == [20]
    assert errors[-1] < 0.8 * errors[0]


@each("max_norm", [0.1, 100.0])
def test_clip_is_torchs_clip(lesson, max_norm):
    ours = [torch.randn(3, 2), torch.randn(5)]
    theirs = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    assert lesson.clip(ours, max_norm) == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(theirs, ours, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_the_lessons_scaler_is_that_of_lesson_6(lesson):
    fly = load("06", device=torch.device("cpu"), seed=0).fly
    schedule = [None, math.inf, None, None, math.nan, None] * 5
    theirs = fly(torch.amp.GradScaler("cpu", growth_interval=2), schedule)
    assert fly(lesson.MyScaler(growth_interval=2), schedule) == theirs


def test_attempts_report_torchs_errors(lesson):
    assert lesson.attempt("unscale_", "step", "update") == "no error, a gradient of 0.66"
    trap = ("unscale_", "update", "step")
    assert lesson.attempt(*trap).startswith("batch 2: RuntimeError: unscale_() is being called")
    assert lesson.attempt(*trap, "update") == "no error, a gradient of 1e-05"
    assert "has already been called" in lesson.attempt("unscale_", "unscale_")
    assert "unscale_() is being called after step()" in lesson.attempt("step", "unscale_")
