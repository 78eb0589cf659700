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


def test_a_second_update_doubles_the_scale_sooner_and_changes_no_loss(lesson):
    ways = (lesson.gan_step, lesson.two_updates)
    once, twice = (lesson.train(torch.float16, 7, way, growth_interval=3) for way in ways)
    assert once["losses"] == twice["losses"] and len(once["losses"]) == 14
    assert [run["scaler"]["scale"] for run in (once, twice)] == [2.0**12, 2.0**14]
    assert [run["scaler"]["_growth_tracker"] for run in (once, twice)] == [1, 2]


def test_a_second_step_of_one_optimizer_needs_an_update_between(lesson):
    weights, (optimizer, _), scaler = lesson.pair()
    scaler.scale(sum(lesson.losses_of(weights))).backward()
    scaler.step(optimizer)
    assert "already been called" in lesson.refusal(lambda: scaler.step(optimizer))
    scaler.update()
    assert lesson.refusal(lambda: scaler.step(optimizer)) == "no error"


def test_a_shared_region_hides_the_step_of_the_discriminator(lesson):
    assert abs(lesson.change_of_score(nullcontext())) > 0.01
    assert lesson.change_of_score(torch.autocast("cpu", dtype=torch.float16)) == 0


def test_a_region_around_the_loop_hides_weights_that_move(lesson):
    untrained = lesson.new_gan()[0][0](lesson.noise(2048)).norm(dim=1).mean()
    with torch.autocast("cpu", dtype=torch.float16):
        run = lesson.train(torch.float16, 60)
    inside = run["fakes"][-1].norm(dim=1).mean()
    after = run["nets"][0](lesson.noise(2048)).norm(dim=1).mean()
    assert abs(inside - untrained) < 0.05 and after > 3


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
@each("step", [(0, 1), (1, 0), (1,)])
def test_unscaling_is_free_choice_and_stepping_is_not(lesson, unscale, step):
    assert lesson.iteration(unscale, step)[0] == [-5 * (0 in step), 2 * (1 in step)]


@each("bad", [(), (0,), (1,), (0, 1)])
def test_each_optimizer_decides_and_the_scale_backs_off_once(lesson, bad):
    weights, scale = lesson.iteration(bad=bad)
    assert weights == [-5 * (0 not in bad), 2 * (1 not in bad)]
    assert scale == (512 if bad else 1024)


def test_an_update_between_steps_and_two_scalers_are_wrong_once_the_scale_differs(lesson):
    assert lesson.update_between_steps(bad=False) == -2
    assert lesson.update_between_steps(bad=True) == -4
    assert lesson.update_between_steps(bad=True, phases=True) == -2
    for scale in (256.0, 1024.0):
        right = [2 + 3 * scale / 1024, 3 * 1024 / scale - 5]
        assert lesson.two_scalers(1024.0, scale) == right
        assert (right == [5, -2]) == (scale == 1024)


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


def test_one_note_per_optimizer_makes_my_scaler_torchs(lesson):
    """The same losses to the bit in the GAN, in both phases and with a growing scale."""

    def losses(make):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.amp, "GradScaler", make)
            return lesson.train(torch.float16, 8, growth_interval=3)["losses"]

    class Mine(lesson.ManyScaler):
        def __init__(self, device_type, init_scale, enabled, growth_interval):
            super().__init__(init_scale, growth_interval)

        def state_dict(self):
            return {}

    theirs = losses(torch.amp.GradScaler)
    assert losses(Mine) == theirs

    class OneNote(Mine):
        unscale_, step = lesson.MyScaler.unscale_, lesson.MyScaler.step
        update = lesson.MyScaler.update

    assert losses(OneNote) != theirs
