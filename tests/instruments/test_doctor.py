"""The doctor names each fault in the place where it is, leaves healthy loops alone, and changes nothing."""

import copy
import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_utils import doctor
from amp_utils.scaler import FlightRecorder, LossScaler

FP16, BF16 = torch.float16, torch.bfloat16


def region(dtype=FP16, **how):
    return torch.autocast("cpu", dtype=dtype, **how)


class Loop:
    """A training loop as people write it; each method is one step, healthy or with the fault it is named after."""

    def __init__(
        self, net=None, dtype=FP16, weights=torch.float32, make=torch.optim.AdamW, **settings
    ):
        torch.manual_seed(0)
        self.net = (net or nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))).to(
            weights
        )
        self.optimizer = make(self.net.parameters(), **({"lr": 1e-2} | settings))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.x, self.dtype = torch.randn(16, 32).to(weights), dtype

    def loss(self):
        with region(self.dtype):
            return F.mse_loss(self.net(self.x), self.x)

    def finish(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def healthy(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.finish()

    def healthy_accumulation(self):
        for _ in range(3):
            self.scaler.scale(self.loss() / 3).backward()
        self.healthy()

    def healthy_bf16(self):
        self.loss().backward()
        nn.utils.clip_grad_value_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def healthy_penalty(self):
        x = self.x.clone().requires_grad_()
        with region(self.dtype):
            loss = F.mse_loss(self.net(x), self.x)
        (slope,) = torch.autograd.grad(self.scaler.scale(loss), x, create_graph=True)
        slope = slope / self.scaler.get_scale()
        with region(self.dtype):
            loss = loss + slope.pow(2).sum()
        self.scaler.scale(loss).backward()
        self.finish()

    def clip_before_unscale(self):
        self.scaler.scale(self.loss()).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.finish()

    def clip_values_before_unscale(self):
        self.scaler.scale(self.loss()).backward()
        nn.utils.clip_grad_value_(self.net.parameters(), 1.0)
        self.finish()

    def no_update(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.optimizer.zero_grad()

    def unscale_twice(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.unscale_(self.optimizer)
        self.finish()

    def unscale_after_step(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.unscale_(self.optimizer)

    def unscale_inside_accumulation(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.unscale_(self.optimizer)
        self.scaler.scale(self.loss()).backward()
        self.finish()

    def no_scaler(self):
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scaler_without_gpu(self):
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.healthy()

    def other_optimizer(self):
        other = nn.Linear(2, 2)
        other.weight.grad = torch.ones(2, 2)
        self.optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        self.healthy()

    def optimizer_without_gradients(self):
        self.optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        self.healthy()

    def scheduler_on_a_skip(self):
        self.net[0].weight.register_hook(lambda gradient: gradient * math.inf)
        self.healthy()
        self.scheduler.step()

    def everything_in_one_region(self):
        with region(self.dtype):
            for _ in range(3):
                loss = F.mse_loss(self.net(self.x), self.x)
                self.scaler.scale(loss).backward()
                self.finish()

    def backward_inside(self):
        with region(self.dtype):
            loss = F.mse_loss(self.net(self.x), self.x)
            self.scaler.scale(loss).backward()
        self.finish()

    def dying_scale(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-12)
        self.healthy()

    def pure(self):
        F.mse_loss(self.net(self.x).float(), self.x.float()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def mask(self):
        with region(self.dtype):
            scores = self.net(self.x) @ self.x.T
            loss = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -1e9).softmax(-1).sum()
        self.scaler.scale(loss).backward()
        self.finish()

    def layer_outside(self):
        with region(self.dtype):
            hidden = self.net[0](self.x)
        self.scaler.scale(self.net[2](hidden).sum()).backward()
        self.finish()

    def positions(self):
        with region(self.dtype):
            angles = torch.arange(4096.0)[:, None] @ torch.ones(1, 4)
            loss = F.mse_loss(self.net(self.x), self.x) + angles.cos().sum() * 0
        self.scaler.scale(loss).backward()
        self.finish()

    def bad_data(self):
        self.x[0, 0] = math.nan
        self.healthy()

    def moving_average(self):
        if not hasattr(self, "average"):
            self.average = [p.detach().clone().to(BF16) for p in self.net.parameters()]
        self.healthy_bf16()
        with torch.no_grad():
            for average, p in zip(self.average, self.net.parameters(), strict=True):
                average.lerp_(p.to(BF16), 1e-4)

    def no_cache(self):
        with region(self.dtype, cache_enabled=False):
            loss = F.mse_loss(self.net(self.net(self.x)), self.x)
        self.scaler.scale(loss).backward()
        self.finish()

    def reads(self):
        total = sum(self.scaler.scale(self.loss()).item() for _ in range(4))
        assert math.isfinite(total)
        self.healthy()


def crooked(width):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))


class Tall(nn.Module):
    """A hidden layer that exceeds fp16's largest number, and is brought back afterwards."""

    def __init__(self):
        super().__init__()
        self.wide, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.out(self.wide(x * 3e5) / 3e5)


FAULTS = [
    ("clip before unscale_", "clip_before_unscale", {}),
    ("clip before unscale_", "clip_values_before_unscale", {}),
    ("update is missing", "no_update", {}),
    ("unscale_ called twice", "unscale_twice", {}),
    ("unscale_ after step", "unscale_after_step", {}),
    ("unscale_ inside accumulation", "unscale_inside_accumulation", {}),
    ("scaler with bf16", "healthy", {"dtype": BF16}),
    ("fp16 without a scaler", "no_scaler", {}),
    ("scaler is switched off", "scaler_without_gpu", {}),
    ("fp16 weights under a scaler", "healthy", {"weights": FP16, "make": torch.optim.SGD}),
    ("optimizer holds other parameters", "other_optimizer", {}),
    ("optimizer without gradients", "optimizer_without_gradients", {}),
    ("scheduler on a skipped step", "scheduler_on_a_skip", {}),
    ("stale casts", "everything_in_one_region", {}),
    ("backward inside autocast", "backward_inside", {}),
    ("scale near zero", "dying_scale", {}),
    ("eps is zero", "pure", {"weights": FP16}),
    ("updates are lost", "pure", {"weights": BF16, "make": torch.optim.SGD, "lr": 1e-6}),
    ("constant outside of the format", "mask", {}),
    ("layer outside of autocast", "layer_outside", {}),
    ("positions in 16 bits", "positions", {}),
    ("input is not finite", "bad_data", {}),
    ("activation overflows", "healthy", {"net": Tall()}),
    ("moving average stands still", "moving_average", {"dtype": BF16}),
    ("weights are cast again and again", "no_cache", {}),
    ("sizes are not multiples of 8", "healthy", {"net": crooked(61)}),
    ("Python waits for values", "reads", {}),
]
HEALTHY = [
    ("healthy", {}),
    ("healthy", {"make": torch.optim.SGD}),
    ("healthy_accumulation", {}),
    ("healthy_penalty", {}),
    ("healthy_bf16", {"dtype": BF16}),
    ("healthy", {"net": crooked(64)}),
]


@pytest.mark.parametrize(("name", "step", "settings"), FAULTS)
def test_a_fault_is_named(name, step, settings):
    loop = Loop(**copy.deepcopy(settings))
    report = doctor.examine(getattr(loop, step), loop.net, loop.optimizer, loop.scaler)
    assert name in [finding.name for finding in report.findings], str(report)


@pytest.mark.parametrize(("step", "settings"), HEALTHY)
def test_a_healthy_loop_gets_no_finding(step, settings):
    loop = Loop(**settings)
    report = doctor.examine(getattr(loop, step), loop.net, loop.optimizer, loop.scaler)
    assert not report.findings, str(report)


def state_of(loop):
    """Everything that a step may change, as one flat list that torch.equal and == can compare."""
    tensors = [
        *loop.net.state_dict().values(),
        *(p.grad for p in loop.net.parameters()),
        torch.get_rng_state(),
    ]
    tensors += [value for state in loop.optimizer.state.values() for value in state.values()]
    plain = [
        loop.scaler.state_dict(),
        loop.scheduler.state_dict(),
        torch.is_grad_enabled(),
        loop.net.training,
    ]
    plain += [{**group, "params": None} for group in loop.optimizer.param_groups]
    return copy.deepcopy(tensors), copy.deepcopy(plain)


def raising(loop):
    loop.healthy()
    torch.set_grad_enabled(False)
    loop.net.eval()
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "how", [Loop.healthy, Loop.scheduler_on_a_skip, Loop.unscale_twice, raising]
)
def test_nothing_is_changed(how):
    loop = Loop(
        nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32))
    )
    loop.healthy()
    loop.loss().backward()  # gradients that wait for the next step
    tensors, plain = state_of(loop)
    try:
        doctor.examine(lambda: how(loop), loop.net)
    except KeyboardInterrupt:
        assert how is raising
    after, plain_after = state_of(loop)
    assert len(tensors) == len(after) and plain == plain_after
    for before, now in zip(tensors, after, strict=True):
        assert before is now is None or torch.equal(before, now)


def test_training_goes_on_as_if_nothing_had_happened():
    watched, alone = Loop(), Loop()
    watched.healthy(), alone.healthy()
    doctor.examine(watched.healthy, watched.net)
    losses = []
    for loop in (watched, alone):
        for _ in range(3):
            loop.healthy()
        losses.append(loop.loss().item())
    assert losses[0] == losses[1]
