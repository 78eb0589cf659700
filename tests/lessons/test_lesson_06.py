"""The functions that lesson 6 defines."""

import math

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course.notebook import load

CPU = torch.device("cpu")
XY = models.pixel_grid(16)


@pytest.fixture
def lesson():
    lesson = load(
        "06", device=CPU, seed=0, steps=40, xy=XY, skin=1e-3 * torch.sin(torch.pi * XY[:, :1])
    )
    for name in ("unscale_", "step", "update"):  # the notebook adds them to the class cell by cell
        setattr(lesson.MyScaler, name, getattr(lesson, name))
    return lesson


@each("seed", range(8))
def test_the_scaler_built_in_the_lesson_is_torchs(lesson, seed):
    draws = torch.rand(60, generator=torch.Generator().manual_seed(seed)).tolist()
    schedule = [math.inf if draw < 0.15 else math.nan if draw < 0.25 else None for draw in draws]
    settings = {"init_scale": 2.0 ** (seed - 5), "growth_interval": 1 + seed % 4}
    ours, theirs = lesson.MyScaler(**settings), torch.amp.GradScaler("cpu", **settings)
    assert lesson.fly(ours, schedule) == lesson.fly(theirs, schedule)


def test_training_learns_and_survives_an_overflow(lesson):
    errors = lesson.train(torch.amp.GradScaler("cpu"), overflow_at=10)
    assert len(errors) == 40 and errors[-1] < 0.6 * errors[0]
    assert errors[10] == errors[9]  # step 10 was skipped, so step 11 starts from the same weights


@each("scale", [0.0, 2.0**-15, 1.0])
def test_the_guard_stops_a_collapsed_scale(lesson, scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    if scale >= 2.0**-14:
        lesson.guard(scaler)
    else:
        with pytest.raises(RuntimeError, match="look for inf or NaN"):
            lesson.guard(scaler)


def test_the_scheduler_waits_for_a_real_step(lesson):
    assert lesson.first_step(None, ask_first=False) == []
    assert len(lesson.first_step(math.inf, ask_first=False)) == 1
    assert lesson.first_step(math.inf, ask_first=True) == []


@each("start, goal", [(1, 1), (1, 1000), (3, 100), (2.0**-5, 2.0**10)])
def test_the_climb_takes_the_logarithm(lesson, start, goal):
    assert lesson.steps_to_reach(start, goal, 7) == 7 * math.ceil(math.log2(goal / start))


def test_a_replay_is_the_flight(lesson):
    recorder = lesson.FlightRecorder(torch.amp.GradScaler("cpu", growth_interval=3))
    lesson.train(recorder, overflow_at=8)
    rows = recorder.rows
    assert lesson.replay([row.found_inf for row in rows], 65536.0, 3) == [row.scale for row in rows]
