"""The functions that lesson 2 defines, against torch and NumPy, and its wrong variants."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.each import each

from amp_utils.course.notebook import load

CPU = torch.device("cpu")
NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


@pytest.fixture(scope="module")
def lesson():
    return load("02", device=CPU, seed=0)


@each("dtype", NUMPY)
@each("y", [1e-50, 1e-45, 2.0**-25, 2.0**-24, 1e-5, 1.0, 65504.0, 65520.0, 3e38, 1e39])
@each("x", [1.0, 1.3])
def test_there_and_back_is_what_numpy_computes(lesson, dtype, x, y):
    narrow = NUMPY[dtype]
    with np.errstate(all="ignore"):
        expected = float(narrow(x) * narrow(y) / narrow(y))
    assert lesson.there_and_back(x, y, dtype) == pytest.approx(expected, nan_ok=True)


@each("name", ["float32", "bfloat16", "float16"])
def test_there_and_back_is_right_exactly_between_the_powers_of_two_shown(lesson, name):
    dtype = getattr(torch, name)
    results = {e: lesson.there_and_back(1.0, 2.0**e, dtype) for e in range(-160, 140)}
    right = [e for e, result in results.items() if result == 1]
    assert right == list(range(right[0], right[-1] + 1))
    assert all(math.isnan(result) for e, result in results.items() if e not in right)


@each("dim", [0, 1, -1])
@each("size", [1e-3, 1.0, 1e4])
def test_softmax_is_torchs_for_every_dimension(lesson, dim, size):
    logits = size * torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lesson.softmax(logits, dim), torch.softmax(logits, dim))


@each("shape", [(1, 2), (3, 3), (4, 3), (3, 7)])
def test_cross_entropy_and_its_gradient_are_torchs(lesson, shape):
    generator = torch.Generator().manual_seed(1)
    labels = torch.randn(shape, generator=generator).softmax(1)
    logits = (100 * torch.randn(shape, generator=generator)).requires_grad_()
    ours = lesson.cross_entropy(labels, logits)
    theirs = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(
        torch.autograd.grad(ours.sum(), logits), torch.autograd.grad(theirs.sum(), logits)
    )


@each("seed", range(5))
def test_the_guides_cross_entropy_is_right_for_one_sample_and_wrong_for_a_batch(lesson, seed):
    torch.manual_seed(seed)
    logits, labels = torch.randn(3, 3), torch.randn(3, 3).softmax(1)
    one, truth = labels[0], F.cross_entropy(logits[0], labels[0])
    torch.testing.assert_close(lesson.guide_cross_entropy(one, logits[0]), truth)
    wrong, right = (
        lesson.guide_cross_entropy(labels, logits),
        F.cross_entropy(logits, labels, reduction="sum"),
    )
    assert abs(wrong - right) > 1e-3
    # Its gradient is wrong as well: every column sum of the labels weighs a row.
    logits.requires_grad_()
    (gradient,) = torch.autograd.grad(lesson.guide_cross_entropy(labels, logits), logits)
    assert (gradient - (logits.softmax(1) - labels)).abs().max() > 1e-3


def test_the_naive_forms_fail_where_the_lesson_says(lesson):
    assert lesson.naive_softmax(torch.tensor([1000.0, 0.0])).tolist() == pytest.approx(
        [math.nan, 0], nan_ok=True
    )
    assert lesson.naive_softmax(torch.tensor([11.0, 11.0]).half()).tolist() == [0, 0]
    assert lesson.naive_softmax(torch.tensor([10.0, 10.0]).half()).tolist() == [0.5, 0.5]
    assert (
        lesson.naive_cross_entropy(torch.tensor([0.5, 0.5]), torch.tensor([1000.0, 0.0]))
        == math.inf
    )


def test_in_fp16_the_naive_cross_entropy_loses_its_gradient_before_its_value(lesson):
    labels, logits = torch.tensor([0.5, 0.5]), torch.tensor([12.0, 0.0]).half().requires_grad_()
    naive, stable = (f(labels, logits) for f in (lesson.naive_cross_entropy, lesson.cross_entropy))
    assert naive.item() == pytest.approx(6, abs=0.01) == stable.item()
    lost, kept = (torch.autograd.grad(loss, logits)[0] for loss in (naive, stable))
    assert lost.isnan().all() and kept.tolist() == pytest.approx([0.5, -0.5], abs=1e-3)


def test_the_cross_entropy_keeps_a_loss_near_0_beside_large_logits(lesson):
    labels, logits = torch.tensor([1.0, 0.0]), torch.tensor([1000.0, 988.0])
    right = math.log1p(math.exp(-12))
    assert lesson.cross_entropy(labels, logits).item() == pytest.approx(right, rel=0.05)
    assert (logits - logits.logsumexp(0))[0] == 0  # not shifted first: it cancels


def test_the_guides_cross_entropy_refuses_four_samples_of_three_classes(lesson):
    with pytest.raises(RuntimeError, match="must match"):
        lesson.guide_cross_entropy(torch.ones(4, 3), torch.zeros(4, 3))


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torchs_attention_gives_a_row_that_is_hidden_entirely_weights_of_0(dtype):
    scores, eye = torch.zeros(1, 4, dtype=dtype), torch.eye(4, dtype=dtype)
    visible = torch.zeros(1, 4, dtype=torch.bool)
    weights = F.scaled_dot_product_attention(scores, eye, eye, attn_mask=visible)
    assert weights.tolist() == [[0.0] * 4]


def test_subtracting_the_maximum_does_not_guard_a_long_sum_in_fp16(lesson):
    zeros = torch.zeros(70_000).half()
    labels = F.one_hot(torch.tensor(0), 70_000)
    assert lesson.guide_softmax(zeros).float().sum() == 0
    assert lesson.softmax(zeros).float().sum().item() == pytest.approx(1, abs=0.01)
    assert lesson.softmax(zeros).dtype == torch.float16
    assert lesson.cross_entropy(labels, zeros).item() == pytest.approx(math.log(70_000))


@each("dtype", [torch.float16, torch.bfloat16])
def test_a_variance_from_one_pass_is_lost_in_16_bits(lesson, dtype):
    x = 10 + 0.1 * torch.randn(10_000, generator=torch.Generator().manual_seed(7))
    assert lesson.variance(x) == pytest.approx(0.01, rel=0.1)
    assert abs(lesson.variance(x.to(dtype)) - 0.01) > 0.005
    assert x.to(dtype).var(correction=0).item() == pytest.approx(0.01, rel=0.1)


def test_a_difference_of_squares_keeps_its_digits_in_fp16(lesson):
    x, y = np.random.default_rng(0).uniform(-150, 150, (2, 1000)).astype(np.float16)
    yours = lesson.difference(torch.tensor(x), torch.tensor(y))
    right = x.astype(np.float64) ** 2 - y.astype(np.float64) ** 2
    assert yours.dtype == torch.float16
    np.testing.assert_allclose(yours.double(), right, rtol=2e-3)


@each("gradient", [1e-1, 1e-2, 1e-3, -1e-4])
def test_adams_first_step_is_the_learning_rate_in_float32_and_infinite_in_float16(lesson, gradient):
    sign = math.copysign(1, gradient)
    assert lesson.adam_step(gradient, torch.float32) == pytest.approx(sign * 0.01, rel=1e-3)
    # v starts at 0.001 g², and half of fp16's smallest number is 2^-25.
    vanishes = np.float16(0.001 * gradient**2) == 0
    half = lesson.adam_step(gradient, torch.float16)
    assert half == sign * math.inf if vanishes else half == pytest.approx(0.01, rel=0.1)


@each("fused", [False, True])
def test_adams_later_steps_are_too_long_in_float16_whichever_the_implementation(fused):
    weight = torch.nn.Parameter(torch.ones(1).half())
    optimizer = torch.optim.Adam([weight], lr=0.01, fused=fused)
    moved = []
    for _ in range(30):
        weight.grad = torch.full_like(weight, 1e-3)
        optimizer.step()
        moved.append(1 - weight.item())
    if fused:  # float32 inside of the kernel, so that the first step is right
        assert moved[0] == pytest.approx(0.01, rel=0.1)
    assert moved[-1] > 3 * 30 * 0.01


@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masked_softmax_is_torchs_with_minus_infinity(lesson, dtype):
    generator = torch.Generator().manual_seed(2)
    scores = (10 * torch.randn(50, 6, generator=generator)).to(dtype).requires_grad_()
    hidden = torch.rand(50, 6, generator=generator) < 0.6
    weights = lesson.masked_softmax(scores, hidden)
    (gradient,) = torch.autograd.grad(weights[:, 1].sum(), scores)
    assert gradient.isfinite().all() and not gradient[hidden].any()
    expected = scores.masked_fill(hidden, -math.inf).softmax(1).nan_to_num(nan=0.0)
    torch.testing.assert_close(weights, expected)
    assert hidden.all(dim=1).any() and weights.dtype == dtype
