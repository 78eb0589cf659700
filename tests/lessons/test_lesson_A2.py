"""The modules and training loops that appendix A2 defines, against NumPy and torch."""

import numpy as np
import pytest
import torch
from support.each import each
from torch import nn

from amp_utils import formats
from amp_utils.course.notebook import load

X = (torch.arange(100) / 100).float()
Y = 5 * X + 3 + 0.3 * torch.rand(100, generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def lesson():
    given = {"x": X, "y": Y, "column": X.unsqueeze(1), "seed": 3, "noise": 0.3}
    return load("A2", device=torch.device("cpu"), **given)


def test_two_of_three_tensors_are_overlooked(lesson):
    three = lesson.Three()
    assert [name for name, _ in three.named_parameters()] == list(three.state_dict()) == ["one"]


def test_the_noise_is_uniform_and_its_mean_moves_the_intercept(lesson):
    many = torch.linspace(0, 1, 100_000)
    slope, intercept = np.polyfit(many.double(), lesson.line_data(many).double(), 1)
    assert slope == pytest.approx(5, abs=0.01) and intercept == pytest.approx(3.15, abs=0.01)


def test_training_goes_the_way_of_the_formula_to_the_least_squares_line(lesson):
    line = lesson.Line()
    start = np.array([line.a.item(), line.b.item()])
    lesson.train(line, X, Y, 200)
    columns = np.stack([X.double(), np.ones(100)], 1)
    best = np.linalg.lstsq(columns, Y.double().numpy(), rcond=None)[0]
    shrink = np.linalg.matrix_power(np.eye(2) - 0.1 * 2 / 100 * columns.T @ columns, 200)
    expected = best + shrink @ (start - best)
    assert (line.a.item(), line.b.item()) == pytest.approx(tuple(expected), abs=1e-3)


def history(lesson, dtype, **options):
    """What `train_in` notes, as a tensor: a row (slope, its gradient, intercept) for each step."""
    return torch.tensor(lesson.train_in(dtype, **options))


def test_autocast_follows_float32_and_16_bit_weights_come_to_rest(lesson):
    full = history(lesson, torch.float32, steps=500)[:, 0]
    cast = history(lesson, torch.float32, autocast=True, steps=500)[:, 0]
    assert (full - cast).abs().max() < 0.1
    for dtype, steps, end in ((torch.float16, 800, 4.6), (torch.bfloat16, 300, 3.5)):
        rows = history(lesson, dtype, steps=steps)
        assert len(rows[-100:].unique(dim=0)) == 1 and rows[-1, 0] < end
        assert torch.equal(rows[-1].to(dtype).float(), rows[-1])
    assert full[-100:].unique().numel() == cast[-100:].unique().numel() == 100


@each("dtype", [torch.float16, torch.bfloat16])
def test_a_step_is_rounded_to_whole_gaps(lesson, dtype):
    slopes, gradients, _ = history(lesson, dtype, steps=400)[30:].T
    gaps = torch.tensor([formats.of(dtype).ulp(slope) for slope in slopes[1:].tolist()])
    moves, wanted = slopes.diff() / gaps, -0.02 * gradients[:-1] / gaps
    assert (moves - wanted).abs().max() < 0.55  # half a gap, and a little for lr in 16 bits
    assert (moves == moves.round()).float().mean() > 0.98  # not where a gap doubles


def test_master_weights_follow_float32(lesson):
    expected, *_ = lesson.train_in(torch.float32, steps=400)[-1]
    torch.manual_seed(3)  # the lesson's seed: the same start
    model = nn.Linear(1, 1).bfloat16()
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.SGD(masters, lr=0.02)
    for _ in range(400):
        prediction = model(X.unsqueeze(1).bfloat16()).squeeze(1)
        nn.functional.mse_loss(prediction.float(), Y).backward()
        lesson.master_step(weights, masters, optimizer)
    assert masters[0].item() == pytest.approx(expected, abs=0.1)
    assert model.weight.dtype == torch.bfloat16 and model.weight.grad is None
    assert torch.equal(model.weight, masters[0].bfloat16())


@each("degree", [0, 1, 4])
def test_polynomial_is_numpys_and_can_be_trained(lesson, degree):
    model = lesson.Polynomial(degree, 0.5)
    values = torch.linspace(-1, 2, degree + 1)
    with torch.no_grad():
        model.coefficients.copy_(values)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    z = x - 0.5
    expected = np.polynomial.polynomial.polyval(z.numpy(), values.numpy())
    np.testing.assert_allclose(model(x).detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    model(x).sum().backward()
    expected = [(z**k).sum().item() for k in range(degree + 1)]
    assert model.coefficients.grad.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert set(model.state_dict()) == {"coefficients", "centre"}
