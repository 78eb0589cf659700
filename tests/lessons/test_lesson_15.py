"""The functions that lesson 15 defines."""

import pytest
import torch
from support.each import each

from amp_utils.blocks import round_scaled
from amp_utils.course.notebook import load
from amp_utils.formats import BF16, E2M1, E4M3FN, FP16


@pytest.fixture(scope="module")
def lesson():
    return load("15", device=torch.device("cpu"), seed=0, seeds=1, steps=60, **picture())


def picture() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(4608, 64, generator=generator, dtype=torch.float64)
    return {"inputs": inputs, "picture": torch.tanh(inputs[:, 0] + inputs[:, 1])}


def test_stochastic_write_back_is_right_on_average_for_every_sign_and_size(lesson):
    torch.manual_seed(0)
    for weight, update in ((1.0, 1e-3), (-3.0, 2e-3), (0.01, -1e-5), (1.0, -1e-3)):
        weights = torch.full((200_000,), weight).bfloat16()
        exact = weights[0].double() + torch.tensor(update, dtype=torch.float32)
        moved, _ = lesson.stochastic(weights, torch.full(weights.shape, update), weights)
        spacing = BF16.ulp(abs(weight))
        assert moved.dtype == torch.bfloat16 and (moved.double() - exact).abs().max() < spacing
        assert abs(moved.double().mean() - exact) < 0.01 * spacing


def test_kahan_write_back_keeps_what_rounding_cuts_off(lesson):
    updates = 1e-3 * torch.randn(2000, 50, generator=torch.Generator().manual_seed(0)) + 5e-4
    exact = torch.ones(50, dtype=torch.float64) + updates.double().sum(0)
    weight = nearest = torch.ones(50).bfloat16()
    carry = torch.zeros(50).bfloat16()
    for update in updates:
        weight, carry = lesson.kahan(weight, update, carry)
        nearest, _ = lesson.nearest(nearest, update, carry)
    assert carry.dtype == torch.bfloat16
    assert (weight.double() + carry.double() - exact).abs().max() < 0.01
    assert (nearest.double() - exact).abs().max() > 0.1


@each("fmt", [E2M1, E4M3FN])
def test_block_round_is_the_instruments(lesson, fmt):
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).exp()
    x[0], x[1, :32] = 0, fmt.max
    assert torch.equal(lesson.block_round(x, fmt, 32, True), round_scaled(x, fmt, "e8m0", 32))
    for block in (16, 64):
        right = round_scaled(x, fmt, "fp32", block)
        torch.testing.assert_close(lesson.block_round(x, fmt, block), right, rtol=1e-6, atol=0)


@each("exponent", range(-149, 128))
def test_the_scale_of_a_power_of_two_is_exact(lesson, exponent):
    x = torch.tensor([[2.0**exponent, 0.0]])
    for fmt in (E2M1, E4M3FN):
        assert torch.equal(lesson.block_round(x, fmt, 2, True), x)


def test_without_rounding_the_three_products_are_torchs(lesson):
    x, weight = torch.randn(32, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    plain = lesson.Rung()
    ours = torch.autograd.grad(lesson.Rounded.apply(x, weight, plain).sin().sum(), (x, weight))
    theirs = torch.autograd.grad((x @ weight.T).sin().sum(), (x, weight))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


def test_emulated_16_bits_are_autocasts_forward_and_backward(lesson):
    x, weight = torch.randn(32, 64), torch.randn(64, 64) / 8
    for fmt, dtype in ((BF16, torch.bfloat16), (FP16, torch.float16)):
        rung = lesson.Rung(fmt.round, fmt.round)
        results = []
        for emulated in (True, False):
            a, b = x.to(dtype).float().requires_grad_(), weight.clone().requires_grad_()
            with torch.autocast("cpu", dtype=dtype, enabled=not emulated):
                y = lesson.Rounded.apply(a, b, rung) if emulated else a @ b.T
            results.append([y, *torch.autograd.grad(y.float().square().sum(), (a, b))])
        for ours, theirs in zip(*results, strict=True):
            apart = (ours - theirs.float()).abs().max()
            assert apart <= fmt.ulp(ours.abs().max().item()), dtype
            assert torch.equal(fmt.round(ours), ours)


def test_blocks_lie_along_the_dimension_that_is_summed(lesson):
    seen = []
    rung = lesson.Rung(lambda t: seen.append(t.shape) or t)
    x, weight = torch.ones(4, 32, requires_grad=True), torch.ones(8, 32, requires_grad=True)
    lesson.Rounded.apply(x, weight, rung).sum().backward()
    assert seen == [(4, 32), (8, 32), (4, 8), (32, 8), (8, 4), (32, 4)]


def test_each_kind_of_weights_trains_and_fp64_agrees_with_fp32(lesson):
    plain = lesson.Rung()
    double = lesson.Rung(stored=torch.float64)
    pure = lesson.Rung(lesson.bf16, lesson.bf16, stored=torch.bfloat16, write=lesson.kahan)
    share, wide, narrow = (lesson.test(lesson.train(r, 0)) for r in (plain, double, pure))
    assert share == pytest.approx(wide, rel=1e-3) and share < 50
    assert narrow == pytest.approx(share, rel=0.2)


def test_the_error_is_that_of_the_points_left_out_without_rounding(lesson):
    weights = lesson.train(lesson.Rung(E2M1.round, lesson.bf16), 0)
    points, target = lesson.inputs[4096:], lesson.picture[4096:]
    first, second, last = weights.double().split([64, 64, 1])
    painted = ((points @ first.T).relu() @ second.T).relu() @ last.T
    expected = 100 * ((painted[:, 0] - target).square().mean() / target.var()).item()
    assert lesson.test(weights) == pytest.approx(expected, rel=1e-4)
    assert lesson.test(weights.double()) == pytest.approx(expected, rel=1e-12)
    constant = torch.zeros(129, 64).bfloat16()  # paints 0 everywhere
    expected = 100 * (target.square().mean() / target.var()).item()
    assert lesson.test(constant) == pytest.approx(expected, rel=1e-5)


def test_torchs_own_fp8_product_keeps_a_row_of_zeros_and_the_scales_of_tiny_rows(lesson):
    a, b = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(2))
    rounded = [lesson.block_round(t, E4M3FN, 32) for t in (a, b)]
    whole = rounded[0] @ rounded[1].T
    powers = torch.tensor([1.0, 0.0, 2.0**-30, 2.0**30]).repeat(8)[:, None]
    product = lesson.torch_fp8(powers * a, b).float()
    apart = (product - powers * whole).abs()
    assert (apart <= powers * BF16.ulp(whole.abs().max().item())).all()


def test_counting_zeros_finds_every_gradient_that_rounds_to_zero(lesson):
    assert lesson.zeros(lesson.Rung()) == [0] * 60
    seen = []

    def gradient(grad: torch.Tensor) -> torch.Tensor:
        rounded = E4M3FN.round(grad)
        seen.append((grad != 0, rounded != 0))
        return rounded

    found = lesson.zeros(lesson.Rung(E4M3FN.round, lesson.bf16))
    lesson.train(lesson.Rung(E4M3FN.round, lesson.bf16, gradient), 0)
    for step, share in enumerate(found):
        before, after = zip(*seen[4 * step : 4 * step + 4], strict=True)
        left = sum(x.sum() for x in after) / sum(x.sum() for x in before)
        assert share == pytest.approx(100 * (1 - left.item()), abs=1e-3)
    first, last = sum(found[:10]) / 10, sum(found[-10:]) / 10
    assert 0 < first < last
    lifted = lesson.zeros(lesson.Rung(E4M3FN.round, lesson.bf16, loss_scale=1024.0))
    assert sum(lifted[-10:]) / 10 < last / 4


def test_gradients_are_rounded_as_factors_are_unless_a_rung_says_otherwise(lesson):
    assert lesson.Rung(E4M3FN.round).gradient == E4M3FN.round
    assert lesson.Rung(E4M3FN.round, gradient=E2M1.round).gradient == E2M1.round


def test_reach_compares_the_largest_magnitude_with_the_median_of_all_but_zeros(lesson):
    assert lesson.reach(torch.tensor([[0.0, -8.0, 2.0], [0.0, 1.0, 0.0]])) == 4
    assert lesson.reach(torch.tensor([-3.0, 3.0, 3.0])) == 1


def test_gigabytes_count_weight_gradient_two_averages_and_a_carry(lesson):
    pure = lesson.Rung(stored=torch.bfloat16, write=lesson.stochastic)
    owed = lesson.Rung(stored=torch.bfloat16, write=lesson.kahan)
    rungs = lesson.Rung(lesson.bf16, lesson.bf16), pure, owed
    assert [lesson.gigabytes(rung, 3) for rung in rungs] == [48, 24, 30]
