"""The functions that lesson 9 defines."""

import itertools
import math

import pytest
import torch
from support.each import each
from torch.nn.functional import mse_loss

from amp_utils import models
from amp_utils.course.notebook import load
from amp_utils.scaler import LossScaler

XY = models.pixel_grid(16)
TARGET = torch.sin(torch.pi * XY[:, :1]) * XY[:, 1:]


@pytest.fixture
def lesson():
    return load(
        "09", device=torch.device("cpu"), seed=0, steps=120, xy=XY, target=TARGET, mse_loss=mse_loss
    )


def test_the_formulas_have_the_solution_that_the_lesson_names():
    a, b = torch.linalg.solve(torch.tensor([[2.0, 3.0], [3.0, -5.0]]), torch.ones(2)).tolist()
    assert (a, b) == pytest.approx((8 / 19, 1 / 19))


def test_both_models_learn_their_share_in_both_precisions(lesson):
    for dtype in (torch.float32, torch.float16):
        run = lesson.train(dtype)
        shares = [lesson.share(net) for net in run["nets"]]
        assert shares == pytest.approx([8 / 19, 1 / 19], abs=0.05)
        assert len(run["losses"]) == 120 and run["losses"][-1] < 0.1 * run["losses"][0]


@each("seed", range(2))
def test_the_first_fp16_steps_are_those_of_float32(lesson, seed):
    lesson.seed, lesson.steps = seed, 10
    plain, amp = lesson.train(torch.float32)["losses"], lesson.train(torch.float16)["losses"]
    assert amp == pytest.approx(plain, rel=0.02)


def test_share_is_the_least_squares_factor(lesson):
    net = models.mlp(2, 8, 1)
    with torch.no_grad():
        expected = torch.linalg.lstsq(TARGET, net(XY)).solution.item()
    assert lesson.share(net) == pytest.approx(expected, abs=1e-5)


def test_an_injected_inf_skips_one_optimizer_once_and_halves_the_scale_once(lesson):
    lesson.steps = 30
    rows = lesson.train(torch.float16, overflow_at=10)["rows"]
    assert [row.step for row in rows if row.skipped] == [10] and rows[9].skipped == 1
    assert [row.scale for row in rows] == [1024.0] * 10 + [512.0] * 20


def test_gradients_of_the_two_losses_are_autograds(lesson):
    weights, _, _ = lesson.pair()
    grads = torch.autograd.grad(sum(lesson.losses_of(weights)), weights)
    assert [grad.item() for grad in grads] == [5, -2]


def test_retain_graph_has_nothing_to_do_with_amp(lesson):
    scaler = torch.amp.GradScaler("cpu")
    for scale in (scaler.scale, lambda loss: loss):
        assert lesson.backward_twice(scale, retain=True) == "fine"
        assert lesson.backward_twice(scale, retain=False).startswith(
            "RuntimeError: Trying to backward"
        )


@each("unscale", [(), (0,), (1,), (0, 1), (1, 0)])
@each("step", [(0, 1), (1, 0), (0,), (1,)])
def test_unscaling_is_free_choice_and_stepping_is_not(lesson, unscale, step):
    assert lesson.weights_after(unscale, step) == [-5 * (0 in step), 2 * (1 in step)]


@each("bad", [(), (0,), (1,), (0, 1)])
def test_each_optimizer_decides_and_the_scale_backs_off_once(lesson, bad):
    weights, scale = lesson.iteration(bad)
    assert weights == [-5 * (0 not in bad), 2 * (1 not in bad)]
    assert scale == (512 if bad else 1024)


@each("growth_interval", [1, 3, 10])
def test_a_settled_scale_overflows_once_a_growth_interval(lesson, growth_interval):
    period = growth_interval + 1
    assert lesson.skipped_steps(5 * period, growth_interval) == [1 + period * n for n in range(5)]


def test_two_updates(lesson):
    assert lesson.two_updates(bad=False) == [5, -2]
    assert lesson.two_updates(bad=True) == [math.inf, -4]
    assert lesson.two_updates(bad=False, unscale_first=True) == [5, -2 / 1024]
    assert (lesson.good_steps(1), lesson.good_steps(2)) == (3, 6)


@each("scale0, scale1", list(itertools.product([2.0**8, 2.0**10, 2.0**12], repeat=2)))
def test_two_scalers_are_right_only_while_they_agree(lesson, scale0, scale1):
    right = [2 + 3 * scale1 / scale0, 3 * scale0 / scale1 - 5]
    assert lesson.two_scalers(scale0, scale1) == right
    assert (right == [5, -2]) == (scale0 == scale1)


@each("kind", [torch.amp.GradScaler, LossScaler])
@each("bad", [(), (0,), (1,), (0, 1)])
def test_step_together_is_all_or_none(lesson, kind, bad):
    weights, optimizers, _ = lesson.pair()
    scaler = kind("cpu", init_scale=1024.0)
    scaler.scale(sum(lesson.losses_of(weights))).backward()
    for i in bad:
        weights[i].grad.fill_(math.nan)
    assert lesson.step_together(scaler, optimizers) is (not bad)
    assert [weight.item() for weight in weights] == ([0, 0] if bad else [-5, 2])
    assert scaler.get_scale() == (512 if bad else 1024)


def test_is_right_agrees_with_what_the_scaler_does(lesson):
    """An order of calls is right where both weights end at -5 and 2 and nothing is raised."""
    calls = ["scale 0", "scale 1", "unscale 0", "step 0", "step 1", "update"]
    for size in (5, 6):
        for order in itertools.permutations(calls, size):
            assert lesson.is_right(list(order)) == really_right(lesson, order), order


def really_right(lesson, order) -> bool:
    weights, optimizers, scaler = lesson.pair()
    losses = lesson.losses_of(weights)
    try:
        for call in order:
            name, _, number = call.partition(" ")
            if name == "scale":
                scaler.scale(losses[int(number)]).backward()
            elif name == "update":
                scaler.update()
            else:
                getattr(scaler, {"unscale": "unscale_", "step": "step"}[name])(
                    optimizers[int(number)]
                )
    except (RuntimeError, AssertionError):
        return False
    done = scaler.state_dict()["_growth_tracker"] == 1 and order[-1] == "update"
    return done and [weight.item() for weight in weights] == [-5, 2]
