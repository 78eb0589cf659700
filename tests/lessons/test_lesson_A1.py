"""The functions that appendix A1 defines, against least squares, NumPy and algebra."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.each import each

from amp_utils.course.notebook import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return load("A1", device=CPU)


def test_points_lie_on_the_curve_and_features_are_its_columns(lesson):
    x, y = lesson.points()
    assert x.shape == (100,) and x.abs().max() <= 10 and x.min() < 0 < x.max()
    np.testing.assert_allclose(lesson.features(x).numpy(), np.vander(x.numpy(), 3), rtol=1e-6)
    np.testing.assert_allclose(np.polyfit(x.double(), y.double(), 2), lesson.TRUTH, atol=1e-4)


def test_a_thousand_steps_are_too_few_for_the_intercept_alone(lesson):
    error = (lesson.fit(0, 1000)[-1] - lesson.TRUTH).abs()
    assert error[0] < 0.01 and error[1] < 0.01 and error[2] > 0.1


def test_the_history_has_one_row_a_step_and_they_differ(lesson):
    history = lesson.fit(3, 20)
    assert history.shape == (20, 3) and len(history.unique(dim=0)) == 20


@each("seed", [0, 11, 12])
def test_good_units_reach_the_truth_in_a_thousand_steps(lesson, seed):
    assert (lesson.fit(seed, 1000, x_unit=10, y_unit=500)[-1] - lesson.TRUTH).abs().max() < 0.01


def test_four_thousand_steps_reach_it_without(lesson):
    assert (lesson.fit(7, 4000)[-1] - lesson.TRUTH).abs().max() < 0.01


@each("dtype, quadratic, intercept", [("float16", 0.005, 0.1), ("bfloat16", 0.04, 0.5)])
def test_autocast_reaches_it_within_its_digits(lesson, dtype, quadratic, intercept):
    fitted = lesson.fit_amp(9, 1000, getattr(torch, dtype)) * torch.tensor([5.0, 50.0, 500.0])
    error = (fitted - lesson.TRUTH).abs()
    assert error[0] < quadratic and error[2] < intercept
    assert error.max() > 1e-4  # the product did run in 16 bits


@each("x_unit", [1, 3, 10])
def test_curvatures_are_the_squared_singular_values(lesson, x_unit):
    columns = np.vander(np.linspace(-10, 10, 1001) / x_unit, 3)
    expected = 2 * np.linalg.svd(columns, compute_uv=False) ** 2 / len(columns)
    np.testing.assert_allclose(lesson.curvatures(x_unit).flip(0), expected, rtol=1e-9)


def test_refused_gives_the_reason_and_fails_where_there_is_none(lesson):
    assert "floating point" in lesson.refused(lambda: torch.tensor(1, requires_grad=True))
    with pytest.raises(AssertionError, match="did not refuse"):
        lesson.refused(lambda: None)


@each("array, yes", [(np.ones(2), True), (np.ones(2)[::-1], False), (np.array([None]), False)])
def test_crosses_says_what_torch_takes(lesson, array, yes, capsys):
    assert lesson.crosses(array) is yes
    assert bool(capsys.readouterr().out) is not yes


@each(
    "f, truth",
    [
        (torch.exp, math.exp),
        (torch.cos, lambda x: -math.sin(x)),
        (lambda x: -(x * x), lambda x: -2 * x),
    ],
)
@each("x", [-1.5, 0, 2])
def test_derivative_of_agrees_with_algebra(lesson, f, truth, x):
    assert lesson.derivative_of(f, x) == pytest.approx(truth(x), abs=1e-6)


@given(
    st.lists(st.integers(-1000, 1000), min_size=1),
    st.sampled_from(["int8", "int64", "float16", "float64", "bool"]),
)
def test_admit_keeps_the_values_and_shares_nothing(lesson, values, dtype):
    array = np.array(values).astype(dtype)[::-1]
    tensor = lesson.admit(array)
    assert tensor.dtype == torch.float32 and tensor.tolist() == array.astype(np.float32).tolist()
    array[:] = ~array if dtype == "bool" else array + 1
    assert tensor.tolist() != array.astype(np.float32).tolist()


@each("lr, steps", [(0.1, 1), (0.3, 5), (0.9, 12)])
def test_minimum_goes_the_way_of_the_formula(lesson, lr, steps):
    expected = 3 + (10 - 3) * (1 - 2 * lr) ** steps
    assert lesson.minimum(lambda x: (x - 3) ** 2, 10, lr, steps) == pytest.approx(
        expected, rel=1e-5
    )
