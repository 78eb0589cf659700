"""The functions that lesson 8 defines."""

import pytest
import torch
from support.each import each
from torch.nn.functional import mse_loss

from amp_utils import models
from amp_utils.course.notebook import load

CPU = torch.device("cpu")
XY = models.pixel_grid(16)[torch.randperm(256, generator=torch.Generator().manual_seed(0))]
WAVE = torch.sin(torch.pi * XY[:, :1]) * XY[:, 1:]


@pytest.fixture
def lesson():
    return load("08", device=CPU, seed=0, epochs=8, xy=XY, wave=WAVE, mse_loss=mse_loss)


def gradient_of(loss, net):
    """One plain backward pass, as a vector."""
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(net.parameters()))])


@each("pieces", [1, 4, 16])
@each("seed", range(2))
def test_bites_have_the_gradient_of_the_big_batch(lesson, pieces, seed):
    lesson.seed = seed
    net = lesson.new_net()
    expected = gradient_of(mse_loss(net(XY), WAVE), net)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)):
        bites = lesson.gradients_in(pieces, pieces, dtype, lesson.new_net())
        assert (bites - expected).norm() < tolerance * expected.norm()
        assert lesson.distance(bites, expected) < tolerance


@each("seed", range(6))
def test_where_nothing_rounds_they_are_equal(lesson, seed):
    lesson.seed = seed
    whole = lesson.integer_gradients(1)
    assert all(torch.equal(lesson.integer_gradients(pieces), whole) for pieces in (2, 4, 8, 16))


@each("seed", range(4))
def test_batch_norm_ends_the_equality(lesson, seed):
    lesson.seed = seed
    whole, bites = (lesson.gradients_in(n, n, torch.float32, lesson.new_norm_net()) for n in (1, 4))
    assert lesson.distance(bites, whole) > 1e-3


@each("batches, k", [(10, 4), (8, 4), (3, 4), (7, 3), (1, 1)])
def test_every_micro_batch_is_in_one_step_an_epoch_and_each_step_is_a_mean(lesson, batches, k):
    steps = lesson.steps_with_tail(batches, k, epochs=2)
    groups = [list(range(batches))[first : first + k] for first in range(0, batches, k)]
    assert [step.nonzero().flatten().tolist() for step in steps] == groups * 2
    for step, group in zip(steps, groups * 2, strict=True):
        torch.testing.assert_close(step[group], torch.full((len(group),), 1 / len(group)))


@each("batches, k", [(10, 4), (7, 3), (3, 4)])
def test_the_page_drops_or_leaks_the_tail(lesson, batches, k):
    steps = lesson.steps_of_the_page(batches, k, epochs=2)
    assert len(steps) == 2 * (batches // k)
    if batches > k:  # the first step of the second epoch has the tail of the first
        assert steps[batches // k].sum() == pytest.approx(1 + batches % k / k)


def test_hands_off_in_the_middle(lesson):
    assert lesson.two_micro_batches() == 2
    assert lesson.two_micro_batches(lesson.unscale) == 1025
    assert lesson.two_micro_batches(lesson.look_and_update, growth_interval=1) == 2049 / 2048
    assert lesson.two_micro_batches(lambda scaler, optimizer: scaler.update(2048.0)) == 1.5
    assert lesson.message(lesson.update).startswith("AssertionError: No inf checks were recorded")
    assert lesson.message(lesson.unscale, lesson.unscale).startswith(
        "RuntimeError: unscale_() has already"
    )
    assert lesson.message() == "nothing"


@each("pieces", [2, 16])
def test_training_in_bites_follows_the_big_batch_and_an_early_unscale_does_not(lesson, pieces):
    big, norms = lesson.train(1, torch.float32)
    bites, _ = lesson.train(pieces, torch.float16)
    early, early_norms = lesson.train(pieces, torch.float16, look_early=True)
    assert len(big) == 8 and len(norms) == 32
    assert bites == pytest.approx(big, rel=0.03)
    assert lesson.furthest(early, big) > 0.03 and min(early_norms) > 1


def by_hand(lesson, dtype):
    """Gradient of mse + weight · |gradient of mse|, by torch.func in `dtype`."""
    net = lesson.new_net().to(dtype)
    names = [name for name, _ in net.named_parameters()]

    def loss(*values):
        output = torch.func.functional_call(
            net, dict(zip(names, values, strict=True)), (XY.to(dtype),)
        )
        return mse_loss(output, WAVE.to(dtype))

    def total(*values):
        grads = torch.func.grad(loss, argnums=tuple(range(len(values))))(*values)
        norm = sum(grad.pow(2).sum() for grad in grads).sqrt()
        return loss(*values) + lesson.penalty_weight * norm, norm

    values = tuple(p.detach() for p in net.parameters())
    grads, norm = torch.func.grad(total, argnums=tuple(range(len(values))), has_aux=True)(*values)
    return norm.item(), torch.cat([grad.flatten() for grad in grads])


@each("seed", range(4))
def test_the_amp_penalty_is_the_plain_penalty_is_the_true_one(lesson, seed):
    lesson.seed = seed
    true_norm, true_gradient = by_hand(lesson, torch.float64)
    norm, gradient = lesson.plain_penalty(lesson.new_net(), WAVE)
    assert norm == pytest.approx(true_norm, rel=1e-5)
    assert lesson.distance(gradient.double(), true_gradient) < 1e-5

    norm_32, gradient_32 = lesson.amp_penalty(
        lesson.new_net(), WAVE, lesson.new_scaler(), dtype=torch.float32
    )
    assert norm_32 == norm and torch.equal(gradient_32, gradient)

    norm_16, gradient_16 = lesson.amp_penalty(lesson.new_net(), WAVE, lesson.new_scaler())
    assert norm_16 == pytest.approx(true_norm, rel=0.01)
    assert lesson.distance(gradient_16.double(), true_gradient) < 0.01

    wrong, _ = lesson.amp_penalty(lesson.new_net(), WAVE, lesson.new_scaler(), divide=False)
    assert wrong == 4096 * norm_16


@each("seed", range(4))
def test_an_inner_loss_that_is_not_scaled_gives_nan(lesson, seed):
    lesson.seed = seed
    norm, gradient = lesson.skin_penalty(1.0)
    assert norm == 0 and gradient.isnan().all()
    norm, gradient = lesson.skin_penalty(2.0**20)
    net = lesson.new_net()
    expected = gradient_of(mse_loss(1e-3 * net(XY), 1e-3 * WAVE), net).norm().item()
    assert norm == pytest.approx(expected, rel=0.01) and gradient.isfinite().all()


def test_training_with_the_penalty_follows_float32(lesson):
    lesson.epochs = 40
    plain, amp = lesson.train_penalty(torch.float32), lesson.train_penalty(torch.float16)
    assert (
        amp == pytest.approx(plain, rel=0.03)
        and len(amp) == 3 * lesson.epochs
        and plain[-1] < plain[0]
    )
    undivided = lesson.train_penalty(torch.float16, divide=False)
    assert not all(abs(a - b) < 0.03 * b for a, b in zip(undivided, plain, strict=True))


def test_the_solutions_agree_with_torch(lesson):
    sizes = [100, 100, 56]
    parts = torch.stack(
        [mse_loss(x, y) for x, y in zip(WAVE.split(sizes), XY[:, :1].split(sizes), strict=True)]
    )
    weighted = (parts * torch.tensor(lesson.bite_weights(sizes))).sum()
    torch.testing.assert_close(weighted, mse_loss(WAVE, XY[:, :1]))

    grads = [torch.randn(3, 2), torch.randn(5)]
    expected = torch.nn.utils.get_total_norm(grads).square()
    for scale in (1.0, 2.0**16, 2.0**66):
        torch.testing.assert_close(
            lesson.squared_penalty([grad * scale for grad in grads], scale), expected
        )


@each("size", [1.0, 50.0])
def test_the_accumulated_step_is_one_clipped_float32_step(lesson, size):
    ours, theirs = lesson.new_net(), lesson.new_net()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.5)
    bites = list(zip(XY.split(64), (size * WAVE).split(64), strict=True))
    lesson.accumulated_step(ours, optimizer, lesson.new_scaler(2.0**4), bites)

    plain = torch.optim.SGD(theirs.parameters(), lr=0.5)
    mse_loss(theirs(XY), size * WAVE).backward()
    norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    plain.step()
    assert (norm > 1) == (size == 50)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=2e-3)
