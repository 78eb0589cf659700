"""The functions that appendix A1 defines, against least squares, NumPy and algebra."""

import math

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils.course import ROOT
from amp_utils.course.notebook import cells, choose, load


@pytest.fixture(scope="module")
def lesson():
    return load("A1", device=torch.device("cpu"), seed=0, steps=1000)


def adam(lesson, lr, **options):
    """The history of a fit with Adam, from the lesson's start and in the lesson's old units."""
    w = lesson.start()
    return lesson.train(w, torch.optim.Adam([w], lr=lr, **options), lesson.points)


def test_points_lie_on_the_curve(lesson):
    x, y = lesson.points()
    assert x.shape == (100,) and x.abs().max() <= 10 and x.min() < 0 < x.max()
    np.testing.assert_allclose(np.polyfit(x.double(), y.double(), 2), lesson.TRUTH, atol=1e-4)


def test_the_new_unit_is_the_same_curve_and_the_same_points(lesson):
    old, new = lesson.start(), lesson.new_start()
    assert new.is_leaf and new.requires_grad
    torch.testing.assert_close(new * lesson.UNIT, old)
    lesson.set_seed(7)
    x, y = lesson.points()
    lesson.set_seed(7)
    new_x, new_y = lesson.new_points()
    assert new_y.max() < 1.01
    torch.testing.assert_close((new_x, new_y * 500), (x, y))


def test_at_the_guides_learning_rate_only_the_intercept_is_late(lesson):
    history = adam(lesson, 0.1)
    torch.testing.assert_close(history[0], lesson.start().detach())
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


def test_a_larger_unit_is_a_larger_learning_rate_to_adam(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "steps", 400)
    for seed in (0, 1):
        monkeypatch.setattr(lesson, "seed", seed)
        w = lesson.new_start()
        adams = torch.optim.Adam([w], lr=0.1)
        in_new_unit = lesson.train(w, adams, lesson.new_points) * lesson.UNIT
        moved = (in_new_unit[1] - in_new_unit[0]).abs()
        torch.testing.assert_close(moved, torch.full([3], 50.0), rtol=1e-3, atol=0)
        torch.testing.assert_close(adam(lesson, 50.0), in_new_unit, rtol=1e-4, atol=1e-3)
        assert (in_new_unit[-1, 2] - 3).abs() < 0.01 < (adam(lesson, 0.1)[-1, 2] - 3).abs()


def test_after_the_first_steps_they_are_short_for_the_intercept(lesson):
    steps = adam(lesson, 0.1).diff(dim=0).abs()[:, 2]
    assert abs(steps[0] - 0.1) < 1e-4 and steps[199] < 0.01 and steps[499] < 0.01


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


def test_fit_line_goes_the_way_of_torchs_sgd(lesson):
    lesson.set_seed(2)
    x = torch.rand(30)
    y = 1 - 3 * x + 0.1 * torch.randn(30)
    w = torch.zeros(2, requires_grad=True)
    sgd = torch.optim.SGD([w], lr=0.3)
    for step in range(1, 6):
        sgd.zero_grad()
        ((w[0] * x + w[1] - y) ** 2).mean().backward()
        sgd.step()
        torch.testing.assert_close(lesson.fit_line(x, y, 0.3, step), w.detach())
    w0, w1 = lesson.fit_line(x, y, 0.3, 2000).tolist()
    np.testing.assert_allclose(np.polyfit(x.double(), y.double(), 1), (w0, w1), atol=1e-4)


def uphill(x, y, lr, steps):
    w = torch.zeros(2, requires_grad=True)
    for _ in range(steps):
        ((w[0] * x + w[1] - y) ** 2).mean().backward()
        w = (w + lr * w.grad).detach().requires_grad_()
    return w.detach()


def never_cleared(x, y, lr, steps):
    w = torch.zeros(2, requires_grad=True)
    for _ in range(steps):
        ((w[0] * x + w[1] - y) ** 2).mean().backward()
        w.data -= lr * w.grad
    return w.detach()


def summed(x, y, lr, steps):
    w = torch.zeros(2, requires_grad=True)
    for _ in range(steps):
        ((w[0] * x + w[1] - y) ** 2).sum().backward()
        w = (w - lr * w.grad).detach().requires_grad_()
    return w.detach()


@each(
    "wrong, said",
    [
        (uphill, "you walk uphill"),
        (never_cleared, "you never clear the gradients"),
        (summed, "is right, not"),
        (lambda x, y, lr, steps: torch.zeros(2, requires_grad=True), "still watched"),
        (lambda x, y, lr, steps: [0.0, 0.0], "a tensor of two"),
    ],
)
def test_the_check_of_fit_line_names_the_mistake(lesson, capsys, wrong, said):
    there = cells(*choose(["A1"], ROOT / "notebooks"))
    (check,) = (c for c in there if "check" in c.tags and "fit_line" in c.source)
    exec(check.source, vars(lesson) | {"fit_line": wrong})
    out = capsys.readouterr().out
    assert out.startswith("✗ not yet") and said in out
