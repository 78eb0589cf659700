"""The modules and training loops that appendix A2 defines, against NumPy and torch."""

import numpy as np
import pytest
import torch
from support.each import each
from torch import nn

from amp_utils.course.notebook import load

X = (torch.arange(100) / 100).float()
Y = 5 * X + 3 + 0.3 * torch.rand(100, generator=torch.Generator().manual_seed(4))


@pytest.fixture
def lesson():
    given = {"device": torch.device("cpu"), "x": X, "y": Y, "points_in": X.unsqueeze(1), "seed": 3}
    return load("A2", **given)


def test_a_line_is_a_line(lesson):
    line = lesson.Line()
    assert [name for name, _ in line.named_parameters()] == ["a", "b"]
    np.testing.assert_allclose(
        line(X).detach(), np.polyval([line.a.item(), line.b.item()], X), rtol=1e-6
    )


def test_two_of_three_tensors_are_overlooked(lesson):
    gaps = lesson.Gaps()
    assert [name for name, _ in gaps.named_parameters()] == list(gaps.state_dict()) == ["one"]


def test_the_noise_is_uniform_and_its_mean_moves_the_intercept(lesson):
    lesson.noise = 0.3
    many = torch.linspace(0, 1, 100_000)
    slope, intercept = np.polyfit(many.double(), lesson.line_data(many).double(), 1)
    assert slope == pytest.approx(5, abs=0.01) and intercept == pytest.approx(3.15, abs=0.01)


def test_training_ends_at_the_least_squares_line(lesson):
    torch.manual_seed(0)
    line = lesson.Line()
    slopes = lesson.train(line, Y, 8000)
    slope, intercept = np.polyfit(X.double(), Y.double(), 1)
    assert line.a.item() == pytest.approx(slope, abs=2e-3) and line.b.item() == pytest.approx(
        intercept, abs=2e-3
    )
    assert len(slopes) == 8000 and slopes[-1] == line.a.item() and slopes[0] < 2


def test_autocast_ends_near_it_and_keeps_float32_weights(lesson):
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(4.5)
    slope, intercept = lesson.train_amp(model, 4000)
    expected = np.polyfit(X.double(), Y.double(), 1)
    assert (slope, intercept) == pytest.approx(tuple(expected), abs=0.06)
    assert model.weight.dtype == torch.float32


@each("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_16_bits_come_to_rest_too_early(lesson, dtype):
    slopes = lesson.train_pure(dtype, 1500)
    assert len(set(slopes[-500:])) == 1 and slopes[-1] < 4.5
    assert torch.tensor(slopes[-1]).to(dtype).item() == slopes[-1]


def test_float32_weights_do_not(lesson):
    slopes = lesson.train_pure(torch.float32, 1500)
    assert len(set(slopes[-500:])) == 500


@each("model", [nn.Linear(3, 7), nn.LayerNorm(5).double(), nn.Conv2d(2, 4, 3).half()])
def test_size_counts_numbers_and_bytes(lesson, model):
    arrays = [p.detach().numpy() for p in model.parameters()]
    assert lesson.size(model) == (sum(a.size for a in arrays), sum(a.nbytes for a in arrays))


@each("degree", [0, 1, 4])
def test_polynomial_is_numpys_and_can_be_trained(lesson, degree):
    model = lesson.Polynomial(degree)
    values = torch.linspace(-1, 2, degree + 1)
    with torch.no_grad():
        model.coefficients.copy_(values)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected = np.polynomial.polynomial.polyval(x.numpy(), values.numpy())
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    expected = [(x**k).sum().item() for k in range(degree + 1)]
    assert model.coefficients.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_half_state_can_be_loaded_and_is_half_the_size(lesson):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    state = lesson.half_state(model)
    other = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, model[0].weight.half().float())
    assert {str(t.dtype) for t in state.values()} == {"torch.float16", "torch.int64"}
