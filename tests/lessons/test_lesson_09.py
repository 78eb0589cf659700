"""The functions that lesson 9 defines."""

import math
from contextlib import nullcontext

import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load
from amp_utils.scaler import LossScaler

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return load("09", device=CPU, seed=0)


@each("bad", [False, True])
def test_a_second_update_changes_the_scale_and_no_loss(lesson, bad):
    losses, scales = [], []
    for updates in (1, 2):
        nets, optimizers = lesson.new_gan()
        start = 2.0**20 if bad else 2.0**10
        scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=3)
        losses.append([])
        for _ in range(7):
            loss, fake = lesson.discriminator_phase(nets, optimizers[1], scaler, torch.float16)
            if updates == 2:
                scaler.update()
            other = lesson.generator_phase(nets, optimizers[0], scaler, torch.float16, fake)
            scaler.update()
            losses[-1] += [loss, other]
        scales.append(scaler.get_scale())
    if bad:
        assert all(scale < 2.0**20 for scale in scales) and all(map(math.isfinite, losses[1]))
    else:
        assert losses[0] == losses[1] and scales == [2.0**12, 2.0**14]


@each("k", [1, 3])
def test_a_longer_iteration_steps_each_network_its_number_of_times(lesson, k):
    for kind in (torch.amp.GradScaler, LossScaler):
        nets, optimizers = lesson.new_gan()
        scaler = kind("cpu", init_scale=1024.0, growth_interval=k + 1)
        for _ in range(2):
            lesson.long_iteration(nets, optimizers, scaler, k)
        assert [lesson.steps_made(optimizer) for optimizer in optimizers] == [2, 2 * k]
        assert scaler.get_scale() == 4096


def test_skipped_steps_do_not_count(lesson):
    _, optimizers = lesson.new_gan()
    assert [lesson.steps_made(optimizer) for optimizer in optimizers] == [0, 0]
    run = lesson.train(torch.float16, 3, init_scale=2.0**60)
    assert run["made"] == [0, 0] and run["scale"] == 2.0**57


def test_a_second_step_of_one_optimizer_needs_an_update_between(lesson):
    weights, (optimizer, _), scaler = lesson.pair()
    scaler.scale(sum(lesson.losses_of(weights))).backward()
    scaler.step(optimizer)
    assert "already been called" in lesson.refusal(lambda: scaler.step(optimizer))
    scaler.update()
    assert lesson.refusal(lambda: scaler.step(optimizer)) == "no error"


def test_a_region_around_both_phases_hides_the_step_of_the_discriminator(lesson):
    gaps = []
    for around in (nullcontext(), torch.autocast("cpu", dtype=torch.float16)):
        nets, (optimizer_g, optimizer_d) = lesson.new_gan()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        with around:
            _, fake = lesson.discriminator_phase(nets, optimizer_d, scaler, torch.float16)
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                now = lesson.loss_of(nets[1](fake.float()), 1.0).item()
            loss = lesson.generator_phase(nets, optimizer_g, scaler, torch.float16, fake)
        gaps.append(abs(loss - now))
    assert gaps[0] < 2e-4 and gaps[1] > 2e-3


@each("enabled", [True, False])
def test_a_frozen_discriminator_steps_towards_the_fakes(lesson, enabled):
    """With a scaler or without: most of its gradient comes from the generator's loss."""
    nets, optimizers = lesson.new_gan()
    dtype = torch.float16 if enabled else torch.float32
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)

    def norm():
        return torch.stack([p.grad.norm() for p in nets[1].parameters()]).norm()

    _, fake = lesson.discriminator_phase(nets, optimizers[1], scaler, dtype)
    own = norm()
    lesson.generator_phase(nets, optimizers[0], scaler, dtype, fake)
    assert norm() > (100 if enabled else 2) * own
    nets[1].requires_grad_(False)
    fake = fake.detach().float()
    before = nets[1](fake).mean()
    scaler.update()
    scaler.step(optimizers[1])
    assert nets[1](fake).mean() > before + 0.1


@each("unscale", [(), (0,), (1,), (1, 0)])
def test_unscaling_is_free_choice(lesson, unscale):
    assert lesson.iteration(unscale) == ([-5, 2], 1024)


@each("bad", [(), (0,), (1,), (0, 1)])
def test_each_optimizer_decides_and_the_scale_backs_off_once(lesson, bad):
    weights, scale = lesson.iteration(bad=bad)
    assert weights == [-5 * (0 not in bad), 2 * (1 not in bad)]
    assert scale == (512 if bad else 1024)


@each("bad", [False, True])
@each("phases", [False, True])
def test_an_update_between_steps_is_wrong_once_the_scale_differs(lesson, bad, phases):
    weights, optimizers, scaler = lesson.pair()
    scaler.scale(sum(lesson.losses_of(weights))).backward()
    weights[0].grad.mul_(math.inf if bad else 1)
    scaler.step(optimizers[0])
    scaler.update()
    if phases:  # the second backward pass comes after the update
        optimizers[1].zero_grad()
        scaler.scale(sum(lesson.losses_of(weights))).backward()
    scaler.step(optimizers[1])
    assert lesson.gradients_of(weights)[1] == (-4 if bad and not phases else -2)


@each(
    "growth_interval, unscaled, used", [(2000, False, -2), (1, False, -1), (2000, True, -2 / 1024)]
)
def test_an_early_update_may_grow_the_scale_and_forgets_what_was_unscaled(
    lesson, growth_interval, unscaled, used
):
    weights, optimizers, scaler = lesson.pair()
    scaler.set_growth_interval(growth_interval)
    scaler.scale(sum(lesson.losses_of(weights))).backward()
    if unscaled:
        scaler.unscale_(optimizers[1])
    scaler.step(optimizers[0])
    scaler.update()
    scaler.step(optimizers[1])
    assert lesson.gradients_of(weights)[1] == used


@each("kind", [torch.amp.GradScaler, LossScaler])
@each("bad", [(), (0,), (1,), (0, 1)])
def test_step_together_is_all_or_none(lesson, kind, bad):
    weights, optimizers, _ = lesson.pair()
    scaler = kind("cpu", init_scale=1024.0)
    scaler.scale(sum(lesson.losses_of(weights))).backward()
    for i in bad:
        weights[i].grad.fill_(math.nan)
    assert lesson.step_together(scaler, optimizers) is (not bad)
    assert [weight.item() for weight in weights] == ([0, 0] if bad else [-5, 2])
    assert scaler.get_scale() == (512 if bad else 1024)
