"""Lesson 10: the memory ledger is right for every size, and so are the rates and the clock."""

import pytest
import torch
from support.each import each

from amp_utils.course import notebook

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return notebook.load("10", device=CPU, on_gpu=False, seed=0, lr=1.0, layers=3, batch=5)


@each("amp", [False, True])
@each("batch, width, layers", [(8, 16, 2), (8, 16, 3), (3, 40, 3), (50, 8, 5)])
def test_the_predicted_bytes_are_those_that_autograd_keeps(lesson, batch, width, layers, amp):
    assert lesson.kept(batch, amp, width, layers) == lesson.predicted(batch, width, layers, amp)


@each("precision", ["fp32", "bf16"])
def test_the_loop_is_sgd(lesson, precision):
    """One step of the lesson's loop against the update written out by hand."""
    net, optimizer, scaler = lesson.new_lane(precision, 16)
    before = [p.detach().clone() for p in net.parameters()]
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = (net(x).float() - y).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    losses = lesson.train(precision, net, optimizer, scaler, (x, y))
    assert torch.allclose(losses[0], loss.detach(), rtol=1e-5)
    assert losses.untyped_storage().nbytes() == 4, "a loss must not keep mse_loss's buffer"
    for new, old, gradient in zip(net.parameters(), before, gradients, strict=True):
        assert torch.allclose(new, old - 1.0 * gradient, atol=1e-5)
    assert all(p.grad is None for p in net.parameters())


def test_every_lane_starts_from_the_same_weights(lesson):
    one, two = (lesson.new_lane(name, 16)[0].state_dict() for name in ("fp32", "bf16"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_step_has_sixteen_bw2_operations(lesson):
    """Counted by torch where the lesson reckons."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        lesson.products("fp32", lesson.new_operands("fp32", 16))
    assert counter.get_total_flops() == 16 * 5 * 16**2
    assert lesson.rate(512, 8.063) * 8.063e12 == pytest.approx(150 * 16 * 512 * 4096**2)


def test_one_past_fits_2021_and_another_2025(lesson):
    """Each row to the megabyte: (batch, leftover, gradients freed, older networks)."""
    for row, wanted in (
        ((4096, "loss", False, 0), (7516, 7617)),
        ((4096, "loss", True, 1), (7516, 7617)),
        ((512, "nothing", True, 0), (1258, 1279)),
        ((512, "network", False, 0), (1351, 1800)),
    ):
        assert [round(peak) for peak in lesson.recipe_peaks(*row)] == list(wanted), row


def test_suspects_are_those_that_could_have_done_it(lesson):
    assert lesson.suspects(67.0, 989.0, 80.0) == ["H100"]
    assert lesson.suspects(67.1, 1.0, 1.0) == ["RTX 4090"]
    assert "RTX 3070" not in lesson.suspects(1.0, 1.0, 8.1)
