"""The functions that lesson 7 defines, and the effects it rests on."""

import math
from itertools import product

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


@each("seed", [0, 1])
def test_the_right_order_survives_a_corrupt_batch_as_float32_does(lesson, seed):
    lesson.seed = seed
    reference = lesson.train("right", max_norm=1.0, amp=False).errors
    right = lesson.train("right", max_norm=1.0).errors
    assert right == pytest.approx(reference, rel=0.01) and right[-1] < 0.8 * right[0]
    assert not lesson.train("no clip").errors[-1] < 100
    assert lesson.train("wrong", max_norm=1.0).errors[-1] > 0.9 * right[0]


def test_the_corrupt_batch_is_not_skipped_and_the_clip_limits_its_update(lesson):
    assert lesson.train("no clip").updates[19] > 10
    assert lesson.train("right", max_norm=1.0).updates[19] == pytest.approx(0.1, rel=1e-3)


def test_the_wrong_order_is_a_clip_at_a_256th(lesson):
    wrong = lesson.train("wrong", max_norm=1.0).errors
    assert wrong == pytest.approx(lesson.train("right", max_norm=1 / 256).errors, rel=1e-4)


def test_a_doubled_scale_halves_the_update_in_the_wrong_order_only(lesson):
    right = lesson.train("right", max_norm=0.05, growth_interval=60).updates
    wrong = lesson.train("wrong", max_norm=0.05 * 256, growth_interval=60).updates
    assert right == pytest.approx([0.005] * 70, rel=1e-2)
    assert wrong == pytest.approx([0.005] * 60 + [0.0025] * 10, rel=1e-2)


@each("seed", [0, 1])
def test_with_adam_the_wrong_order_ends_best_and_no_clip_worst(lesson, seed):
    lesson.seed, lesson.steps, lesson.steep_step = seed, 150, 50
    last = {
        clip: lesson.train(clip, lesson.ADAM, max_norm=1.0).errors[-1]
        for clip in ("no clip", "right", "wrong")
    }
    assert last["wrong"] < last["right"] < last["no clip"]
    low = lesson.train("right", lesson.ADAM, max_norm=1 / 256).errors
    assert low[-1] < 0.5 * last["right"]


@each("optimizer", ["SGD", "ADAM"])
def test_in_the_wrong_order_the_clip_finds_the_scale_times_the_length(lesson, optimizer):
    right, wrong = (
        lesson.train(order, getattr(lesson, optimizer), max_norm=1.0, growth_interval=35).found
        for order in ("right", "wrong")
    )
    assert wrong[0] == pytest.approx(256 * right[0], rel=1e-2)
    assert wrong[35] > 1.2 * wrong[34]
    assert optimizer == "ADAM" or wrong[35] == pytest.approx(2 * wrong[34], rel=2e-2)


@each(
    "loop", product(["norm", "value"], ["unscale_, clip", "clip, unscale_"], [math.inf, math.nan])
)
def test_only_a_value_clip_before_unscale_hides_an_inf_and_nothing_hides_a_nan(lesson, loop):
    _, scale, moved = lesson.bad_step(*loop)
    hidden = loop == ("value", "clip, unscale_", math.inf)
    assert (scale, moved) == ((65536, 2) if hidden else (32768, 0))


@each("max_norm", [0.1, 100.0])
@each("bad", [1.0, math.inf, math.nan])
def test_one_multiplication_unscales_and_clips_as_torch_does(lesson, max_norm, bad):
    steps = {}
    for kind, scaler in {"ours": lesson.MyScaler(), "torchs": torch.amp.GradScaler("cpu")}.items():
        weights = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(5))]
        optimizer = torch.optim.SGD([*weights, torch.nn.Parameter(torch.ones(1))], lr=1.0)
        rows = torch.Generator().manual_seed(0)
        truths = [torch.randn(weight.shape, generator=rows) for weight in weights]
        truths[1][0] *= bad
        scaler.scale(sum((w * t).sum() for w, t in zip(weights, truths, strict=True))).backward()
        if kind == "ours":
            length = lesson.unscale_and_clip_(scaler, optimizer, max_norm)
        else:
            scaler.unscale_(optimizer)
            length = torch.nn.utils.clip_grad_norm_(weights, max_norm)
        scaler.step(optimizer)
        scaler.update()
        steps[kind] = length, [weight.detach() for weight in weights], scaler.get_scale()
    (ours, mine, scale), (torchs, theirs, theirscale) = steps.values()
    torch.testing.assert_close(ours, torchs, equal_nan=True)
    assert scale == theirscale == (65536 if bad == 1.0 else 32768)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert mine[0].any() == (bad == 1.0)


@each("early", [True, False])
def test_a_log_tells_where_the_clip_stands_whatever_the_length_of_a_true_gradient(lesson, early):
    for true in (1e-3, 1.0, 1e4):
        scales = [2.0 ** (step // 5) for step in range(20)]
        lengths = [true * 0.95**step * (scales[step] if early else 1) for step in range(20)]
        assert lesson.clips_too_early(scales, lengths) == early


def test_the_lessons_scaler_is_that_of_lesson_6(lesson):
    fly = load("06", device=torch.device("cpu"), seed=0).fly
    schedule = [None, math.inf, None, None, math.nan, None] * 5
    theirs = fly(torch.amp.GradScaler("cpu", growth_interval=2), schedule)
    assert fly(lesson.MyScaler(growth_interval=2), schedule) == theirs


def test_attempts_report_torchs_errors(lesson):
    assert lesson.attempt("unscale_", "step", "update").startswith("no error")
    assert lesson.attempt("unscale_", "step").endswith("0.66")
    assert lesson.attempt("unscale_", "update", "step").endswith("1e-05")
    assert "has already been called" in lesson.attempt("unscale_", "unscale_")
    assert "unscale_() is being called after step()" in lesson.attempt("step", "unscale_")
