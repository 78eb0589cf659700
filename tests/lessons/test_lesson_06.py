"""The functions that lesson 6 defines."""

import math

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

XY = models.pixel_grid(16)


@pytest.fixture
def lesson():
    skin = 1e-3 * torch.sin(torch.pi * XY[:, :1])
    return load("06", device=torch.device("cpu"), seed=0, steps=30, xy=XY, skin=skin)


@each("seed", range(4))
def test_the_scaler_built_in_the_lesson_is_torchs(lesson, seed):
    draws = torch.rand(60, generator=torch.Generator().manual_seed(seed)).tolist()
    schedule = [math.inf if draw < 0.15 else math.nan if draw < 0.25 else None for draw in draws]
    settings = {"init_scale": 3.0 ** (seed - 2), "growth_factor": 1.9, "backoff_factor": 0.3}
    settings["growth_interval"] = 1 + seed
    theirs = lesson.fly(torch.amp.GradScaler("cpu", **settings), schedule)
    assert lesson.fly(lesson.MyScaler(**settings), schedule) == theirs


def test_good_batches_kill_the_weight_once_the_inverse_of_the_scale_is_inf(lesson):
    ends = {bad: lesson.good_after_bad(bad)[2] for bad in (143, 144, 165, 166)}
    assert ends.pop(143) == pytest.approx(1.7) and math.isnan(ends.pop(166))
    assert set(ends.values()) == {-math.inf}


def test_it_dies_as_torchs_does(lesson):
    schedule = [math.inf] * 166 + [None]
    log = lesson.fly(lesson.MyScaler(), schedule)
    assert str(log) == str(lesson.fly(torch.amp.GradScaler("cpu"), schedule))  # nan == nan
    assert log[-2][0] == 0 and all(math.isfinite(value) for value in log[-2])
    assert all(math.isnan(value) for value in log[-1][1:])


def test_training_learns_and_survives_an_overflow(lesson):
    errors = lesson.train(torch.amp.GradScaler("cpu"), overflow_at=10)
    assert len(errors) == 30 and errors[-1] < 0.6 * errors[0]
    assert errors[10] == errors[9]  # step 10 was skipped, so step 11 starts from the same weights
    flat = lesson.train(torch.amp.GradScaler("cpu", enabled=False))
    assert flat[-1] == flat[0]


def test_who_is_called_and_who_is_warned(lesson):
    assert lesson.adam_step(3.0) == (1, pytest.approx(1.5), [])
    calls, weight, warnings = lesson.adam_step(math.inf)
    assert (calls, weight, len(warnings)) == (0, 2.0, 1)
    assert lesson.adam_step(3.0, fused=True) == (1, pytest.approx(1.5), [])
    assert lesson.adam_step(math.inf, fused=True) == (1, 2.0, [])


def test_one_scaler_finds_its_scale_a_new_one_each_step_never_does(lesson):
    skipped = [lesson.skipped_of(20, fresh=False), lesson.skipped_of(20, fresh=True)]
    assert skipped == [10, 20]


def test_the_alarm_hears_a_scale_that_sinks_one_skip_at_a_time(lesson):
    weight, optimizer, scaler = lesson.begin()
    with pytest.raises(RuntimeError, match="1 skip.* in a row, scale 0.5"):
        for i in range(1, 2000):
            optimizer.zero_grad()
            scaler.scale((weight * (1.0 if i % 8 else math.inf)).sum()).backward()
            scaler.step(optimizer)
            lesson.guarded_update(scaler, 0)
    assert weight.isfinite()
