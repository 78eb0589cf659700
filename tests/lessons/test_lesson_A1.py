"""The functions that appendix A1 defines, against least squares, NumPy and algebra."""

import math

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load


@pytest.fixture(scope="module")
def lesson():
    return load("A1", device=torch.device("cpu"), seed=0, steps=1000)


def adam(lesson, lr, **options):
    """The history of a fit with Adam, from the lesson's start and in the lesson's old units."""
    w = lesson.start()
    return lesson.train(w, torch.optim.Adam(w, lr=lr, **options), lesson.points)


def test_points_lie_on_the_curve(lesson):
    x, y = lesson.points()
    assert x.shape == (100,) and x.abs().max() <= 10 and x.min() < 0 < x.max()
    np.testing.assert_allclose(np.polyfit(x.double(), y.double(), 2), lesson.TRUTH, atol=1e-4)


def test_new_units_are_the_same_curve_and_the_same_points(lesson):
    for old, new, unit in zip(lesson.start(), lesson.new_start(), lesson.UNITS, strict=True):
        assert new.is_leaf and new.requires_grad
        torch.testing.assert_close(new * unit, old)
    lesson.set_seed(7)
    x, y = lesson.points()
    lesson.set_seed(7)
    new_x, new_y = lesson.new_points()
    assert new_x.abs().max() <= 1 and new_y.max() < 1.01
    torch.testing.assert_close((new_x * 10, new_y * 500), (x, y))
    powers = torch.stack([new_x * new_x, new_x, torch.ones_like(new_x)], dim=1)
    torch.testing.assert_close(powers @ (lesson.TRUTH / lesson.UNITS), new_y)


def test_at_the_guides_learning_rate_only_the_intercept_is_late(lesson):
    history = adam(lesson, 0.1)
    torch.testing.assert_close(history[0], torch.cat(lesson.start()).detach())
    error = (history[-1] - lesson.TRUTH).abs()
    assert history.shape == (1001, 3) and len(history.unique(dim=0)) == 1001
    assert error[0] < 0.01 and error[1] < 0.01 and error[2] > 0.1


def test_ten_times_the_learning_rate_arrives_from_any_start(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "steps", 400)
    for seed in (1, 2):
        monkeypatch.setattr(lesson, "seed", seed)
        assert (adam(lesson, 1.0)[-1] - lesson.TRUTH).abs().max() < 1e-3


def test_it_is_adams_memory_that_holds_the_intercept_back(lesson):
    late, soon = adam(lesson, 0.1), adam(lesson, 0.1, betas=(0.9, 0.99))
    assert (late - lesson.TRUTH)[-1, 2].abs() > 0.1 > 1e-4 > (soon - lesson.TRUTH)[-1, 2].abs()


def test_a_unit_is_a_learning_rate_to_adam(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "steps", 200)
    for seed in (0, 1):
        monkeypatch.setattr(lesson, "seed", seed)
        w = lesson.new_start()
        by_units = lesson.train(w, torch.optim.Adam(w, lr=0.1), lesson.new_points) * lesson.UNITS
        moved = (by_units[1] - by_units[0]).abs().tolist()
        assert moved == pytest.approx([0.5, 5.0, 50.0], rel=1e-3)
        w = lesson.start()
        rates = [{"params": v, "lr": lr} for v, lr in zip(w, (0.5, 5.0, 50.0), strict=True)]
        by_rates = lesson.train(w, torch.optim.Adam(rates), lesson.points)
        torch.testing.assert_close(by_rates, by_units, rtol=1e-2, atol=2e-3)
        assert (by_units[-1, 2] - 3).abs() < 0.1 < (adam(lesson, 0.1)[-1, 2] - 3).abs()


def test_sgd_has_no_single_rate_in_the_old_units_and_one_in_the_new(lesson):
    def sgd(w, lr, points):
        return (lesson.train(w, torch.optim.SGD(w, lr=lr), points)[-1]).tolist()

    assert math.isnan(sgd(lesson.start(), 0.0006, lesson.points)[2])
    w0, _, intercept = sgd(lesson.start(), 0.0004, lesson.points)
    assert abs(w0 - 5) < 0.1 and abs(intercept - 3) > 2
    assert abs(500 * sgd(lesson.new_start(), 0.5, lesson.new_points)[2] - 3) < 1e-3


def in_units(lesson, x_unit, y_unit, optimizer, lr):
    """The weights, in the old units, that a fit with these two units ends at."""
    units = torch.tensor([y_unit / x_unit**power for power in (2, 1, 0)])
    old = lesson.start()
    w = [(one / unit).detach().requires_grad_() for one, unit in zip(old, units, strict=True)]

    def draw():
        x, y = lesson.points()
        return x / x_unit, y / y_unit

    return lesson.train(w, optimizer(w, lr=lr), draw)[-1] * units


def test_to_sgd_only_the_unit_of_the_inputs_matters(lesson):
    sgd = torch.optim.SGD
    torch.testing.assert_close(in_units(lesson, 10, 1, sgd, 0.5), lesson.TRUTH, rtol=0, atol=1e-3)
    old, new_targets = (in_units(lesson, 1, y_unit, sgd, 0.0004) for y_unit in (1, 500))
    torch.testing.assert_close(new_targets, old, rtol=1e-3, atol=1e-3)


def test_to_adam_the_unit_of_the_targets_makes_a_small_rate_enough(lesson):
    adam = torch.optim.Adam
    assert (in_units(lesson, 1, 500, adam, 0.1) - lesson.TRUTH).abs().max() < 0.1
    assert (in_units(lesson, 10, 1, adam, 0.1) - lesson.TRUTH).abs().max() > 0.1


def test_outcome_of_a_product_under_autocast(lesson):
    single, double = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.float64)
    assert lesson.outcome(single, single) == "torch.bfloat16"
    assert lesson.outcome(double, double) == "torch.float64"
    assert lesson.outcome(double, single) == lesson.outcome(single, double) == "error"


def test_refused_gives_the_reason_and_fails_where_there_is_none(lesson):
    assert "floating point" in lesson.refused(lambda: torch.tensor(1, requires_grad=True))
    with pytest.raises(AssertionError, match="did not refuse"):
        lesson.refused(lambda: None)


@each(
    "f, truth",
    [
        (torch.exp, math.exp),
        (torch.cos, lambda x: -math.sin(x)),
        (lambda x: -(x * x), lambda x: -2 * x),
    ],
)
def test_derivative_of_agrees_with_algebra(lesson, f, truth):
    for array in (np.array([-1.5, 0.0, 2.0]), np.arange(3), np.arange(3.0)[::-1]):
        got = lesson.derivative_of(f, array)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, [truth(x) for x in array], atol=1e-5)


def test_my_adam_goes_the_way_of_torchs(lesson):
    mine, theirs = (torch.tensor([3.0, -0.5]).requires_grad_() for _ in range(2))
    my_adam, adam = lesson.MyAdam(mine, 0.03), torch.optim.Adam([theirs], lr=0.03)
    for step in range(50):
        for w, optimizer in ((mine, my_adam), (theirs, adam)):
            w.grad = torch.sin(w.detach() * step) * torch.tensor([1e3, 1e-3])
            optimizer.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
