"""Lesson 10: the memory ledger is right for every size, and the exercises' answers are."""

import pytest
import torch
from support.each import each
from torch import nn

from amp_utils import models
from amp_utils.course import notebook

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return notebook.load("10", device=CPU, on_gpu=False, seed=0, lr=1.0, layers=3, width=16)


@each("amp", [False, True])
@each("batch, width, layers", [(8, 16, 2), (8, 16, 3), (3, 40, 3), (50, 8, 5)])
def test_the_predicted_bytes_are_those_that_autograd_keeps(lesson, batch, width, layers, amp):
    net, x = models.mlp(width, width, width, layers), torch.randn(batch, width)
    found = lesson.saved(net, x, torch.zeros_like(x), torch.bfloat16 if amp else None)
    expected = lesson.predicted(batch, width, layers, amp)
    assert found.keys() == expected.keys()
    for kind, size in expected.items():
        assert abs(found[kind] / size - 1) < 0.05, kind


def test_a_cast_of_a_parameter_is_told_from_a_cast_of_data(lesson):
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    assert lesson.is_cast_of_parameter(weight.bfloat16())
    assert lesson.is_cast_of_parameter(weight.bfloat16().t())
    assert not lesson.is_cast_of_parameter(x.bfloat16())
    assert not lesson.is_cast_of_parameter((weight * 2).bfloat16())


@each("precision", ["fp32", "bf16"])
def test_the_loop_is_sgd(lesson, precision):
    """One step of the lesson's loop against the update written out by hand."""
    net, optimizer, scaler = lesson.new_lane(precision)
    before = [p.detach().clone() for p in net.parameters()]
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = (net(x).float() - y).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    losses = lesson.train(precision, net, optimizer, scaler, [(x, y)])
    assert torch.allclose(losses[0], loss.detach(), rtol=1e-5)
    for new, old, gradient in zip(net.parameters(), before, gradients, strict=True):
        assert torch.allclose(new, old - 1.0 * gradient, atol=1e-5)
    assert all(p.grad is None for p in net.parameters())


def test_every_lane_starts_from_the_same_weights(lesson):
    one, two = (lesson.new_lane(name)[0].state_dict() for name in ("fp32", "bf16"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_the_published_peaks_come_out_of_the_ledger(lesson):
    for (batch, leftover), (fp32, amp) in lesson.PUBLISHED.items():
        ours = lesson.recipe_peaks(batch, leftover)
        assert ours[0] == pytest.approx(fp32, rel=0.02) and ours[1] == pytest.approx(amp, rel=0.02)
    alone = lesson.recipe_peaks(512, "nothing")
    assert not alone[1] == pytest.approx(1804, rel=0.02), (
        "without a leftover the rise would be unexplained"
    )


def test_break_even_splits_where_amp_needs_less(lesson):
    for width, layers in ((64, 3), (64, 4), (128, 10)):
        batch = int(lesson.break_even(width, layers))
        few, many = (
            [sum(lesson.predicted(size, width, layers, amp).values()) for amp in (False, True)]
            for size in (batch // 2, batch * 2)
        )
        assert few[1] > few[0] and many[1] < many[0]


def test_the_stages_are_seconds_of_a_real_step(lesson):
    net, optimizer, scaler = lesson.new_lane("bf16")
    vars(lesson)["data"] = [(torch.randn(4, 16), torch.randn(4, 16))]
    before = net[0].weight.detach().clone()
    taken = lesson.stages("bf16", net, optimizer, scaler)
    assert (
        list(taken) == ["forward", "backward", "unscale", "optimizer"] and min(taken.values()) >= 0
    )
    assert not torch.equal(before, net[0].weight)


def test_the_low_precision_switch_is_put_back(lesson):
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(RuntimeError), lesson.float32_products("tf32"):
        raise RuntimeError
    assert torch.backends.cuda.matmul.fp32_precision == before


@each("inputs, outputs, multiple", [(13, 8, 8), (8, 3, 8), (5, 5, 4), (16, 16, 8)])
def test_padding_computes_the_same(lesson, inputs, outputs, multiple):
    linear = nn.Linear(inputs, outputs)
    wide = lesson.padded(linear, multiple)
    x = torch.randn(6, inputs)
    padded = wide(nn.functional.pad(x, (0, wide.in_features - inputs)))
    assert wide.in_features % multiple == wide.out_features % multiple == 0
    assert (
        torch.allclose(padded[:, :outputs], linear(x), atol=1e-5) and not padded[:, outputs:].any()
    )
