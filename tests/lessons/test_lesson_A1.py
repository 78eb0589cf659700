"""The functions that appendix A1 defines, against least squares, NumPy and algebra."""

import math

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load

OLD, NEW = (1.0, 1.0), (10.0, 500.0)  # units of x and y


@pytest.fixture(scope="module")
def lesson():
    return load("A1", device=torch.device("cpu"), seed=0, steps=1000)


def test_points_lie_on_the_curve_and_features_are_its_columns(lesson):
    x, y = lesson.points()
    assert x.shape == (100,) and x.abs().max() <= 10 and x.min() < 0 < x.max()
    np.testing.assert_allclose(lesson.features(x).numpy(), np.vander(x.numpy(), 3), rtol=1e-6)
    np.testing.assert_allclose(np.polyfit(x.double(), y.double(), 2), lesson.TRUTH, atol=1e-4)


def test_at_the_guides_learning_rate_only_the_intercept_is_late(lesson):
    history = lesson.fit(0.1)
    error = (history[-1] - lesson.TRUTH).abs()
    assert history.shape == (1000, 3) and len(history.unique(dim=0)) == 1000
    assert error[0] < 0.01 and error[1] < 0.01 and error[2] > 0.1


def test_ten_times_the_learning_rate_arrives_from_any_start(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "steps", 400)
    for seed in (1, 2):
        monkeypatch.setattr(lesson, "seed", seed)
        assert (lesson.fit(1.0)[-1] - lesson.TRUTH).abs().max() < 1e-3


def test_it_is_adams_memory_that_holds_the_intercept_back(lesson, monkeypatch):
    monkeypatch.setattr(lesson, "steps", 401)
    kept, wiped = lesson.fit(0.1), lesson.fit(0.1, wipe_at=200)
    assert torch.equal(kept[:200], wiped[:200])
    late, soon = ((weights[400] - lesson.TRUTH).abs()[2] for weights in (kept, wiped))
    assert late > 0.5 > 0.01 > soon


def test_a_unit_is_a_learning_rate_to_adam_and_its_square_to_sgd(lesson):
    by_units = lesson.fit_in(*NEW, (0.1,) * 3, steps=200)
    assert lesson.fit_in(*OLD, (0.5, 5.0, 50.0), steps=200) == pytest.approx(
        by_units, rel=1e-2, abs=2e-3
    )
    sgd = torch.optim.SGD
    by_units = lesson.fit_in(*NEW, (0.5,) * 3, sgd, 200)
    by_rates = lesson.fit_in(*OLD, (5e-5, 5e-3, 0.5), sgd, 200)
    assert by_rates == pytest.approx(by_units, rel=1e-2, abs=2e-3)
    assert lesson.fit_in(*OLD, (4e-4,) * 3, sgd, 200)[-1] > 100 > 0.01 > by_units[-1]
    assert not math.isfinite(lesson.fit_in(*OLD, (6e-4,) * 3, sgd, 400)[-1])


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
    for x in (-1.5, 0, 2):
        assert lesson.derivative_of(f, x) == pytest.approx(truth(x), abs=1e-6)


def test_my_adam_goes_the_way_of_torchs(lesson):
    mine, theirs = (torch.tensor([3.0, -0.5]).requires_grad_() for _ in range(2))
    my_adam, adam = lesson.MyAdam(mine, 0.03), torch.optim.Adam([theirs], lr=0.03)
    for step in range(50):
        for w, optimizer in ((mine, my_adam), (theirs, adam)):
            w.grad = torch.sin(w.detach() * step) * torch.tensor([1e3, 1e-3])
            optimizer.step()
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
