"""The doctor names each fault where it is, leaves healthy loops alone, and changes nothing."""

import collections
import copy
import functools
import inspect
import itertools
import json
import math
import random
import subprocess
import sys

import numpy
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F

from amp_utils import doctor, watcher
from amp_utils.course import notebook
from amp_utils.lesson import ParameterError
from amp_utils.scaler import FlightRecorder, LossScaler

FP16, BF16 = torch.float16, torch.bfloat16


def region(dtype=FP16, **how):
    return torch.autocast("cpu", dtype=dtype, **how)


def mlp(width=64):
    return nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 32))


class Tall(nn.Module):
    """A hidden layer beyond fp16's largest number, brought back afterwards."""

    def __init__(self):
        super().__init__()
        self.wide, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.out(self.wide(x * 3e5) / 3e5)


class Loop:
    """A training loop as people write it; each method is one step, healthy or with a fault."""

    def __init__(
        self, net=mlp, dtype=FP16, weights=torch.float32, make=torch.optim.AdamW, **settings
    ):
        torch.manual_seed(0)
        self.net = net().to(weights)
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

    def small_scale(self):
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        self.scaler.scale(1e-6 * self.loss()).backward()
        self.finish()

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

    def masked_with_inf(self):
        with region(self.dtype):
            scores = self.net(self.x) @ self.x.T
            loss = scores.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf).softmax(-1)
        self.scaler.scale(loss.square().sum()).backward()
        self.finish()

    def positions_in_fp32(self):
        angles = torch.arange(4096.0)[:, None] @ torch.ones(1, 4)
        loss = self.loss() + angles.cos().sum() * 0
        self.scaler.scale(loss).backward()
        self.finish()

    def moving_average_in_fp32(self):
        if not hasattr(self, "average"):
            self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.healthy_bf16()
        self.average.update_parameters(self.net)

    def twice_in_a_region(self):
        with region(self.dtype):
            loss = F.mse_loss(self.net(self.net(self.x)), self.x)
        self.scaler.scale(loss).backward()
        self.finish()

    def scheduler_after_a_look(self):
        self.net[0].weight.register_hook(self.once_infinite)
        before = self.scaler.get_scale()
        self.healthy()
        if self.scaler.get_scale() >= before:
            self.scheduler.step()

    def once_infinite(self, gradient):
        self.calls = getattr(self, "calls", 0) + 1
        return gradient * (math.inf if self.calls == 1 else 1.0)

    def decay(self):
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()

    def past_the_scaler(self):
        self.healthy()
        self.scaler.scale(self.loss()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step_twice(self):
        self.scaler.scale(self.loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward_outside(self):
        output = self.net(self.x)
        with region(self.dtype):
            loss = F.mse_loss(output, self.x)
        self.scaler.scale(loss).backward()
        self.finish()

    def overflow_on_the_way_back(self):
        with region(self.dtype):
            output = self.net(self.x)
        loss = (output.half() * 2.0**-14).float().square().sum() * 2.0**34
        self.scaler.scale(loss * 2.0**-6).backward()
        self.finish()

    def to_and_fro(self):
        much = torch.ones(1000, 1000)
        for _ in range(5):
            much = much.bfloat16().float()
        self.healthy_bf16()

    def never_steps(self):
        self.loss().backward()
        self.net.zero_grad()

    def plain(self):
        F.mse_loss(self.net(self.x), self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


SGD = torch.optim.SGD
AMP = ("healthy", {})
WITHOUT = ("healthy_bf16", {"dtype": BF16})
# name, place, broken step, its settings, mended step and its settings
FAULTS = [
    ("clip before unscale_", "the gradients", "clip_before_unscale", {}, *AMP),
    ("clip before unscale_", "the gradients", "clip_values_before_unscale", {}, *AMP),
    ("update is missing", "call 2 of the step", "no_update", {}, *AMP),
    ("unscale_ called twice", "call 1 of the step", "unscale_twice", {}, *AMP),
    ("unscale_ after step", "call 1 of the step", "unscale_after_step", {}, *AMP),
    (
        "unscale_ inside accumulation",
        "the scaler",
        "unscale_inside_accumulation",
        {},
        "healthy_accumulation",
        {},
    ),
    ("scaler with bf16", "the scaler", "healthy", {"dtype": BF16}, *WITHOUT),
    ("fp16 without a scaler", "the loss", "no_scaler", {}, *AMP),
    ("scaler is switched off", "the loss", "scaler_without_gpu", {}, *AMP),
    (
        "fp16 weights under a scaler",
        "call 1 of the step",
        "healthy",
        {"weights": FP16, "make": SGD},
        "healthy",
        {"make": SGD},
    ),
    ("optimizer holds other parameters", "SGD", "other_optimizer", {}, *AMP),
    ("optimizer without gradients", "call 1 of the step", "optimizer_without_gradients", {}, *AMP),
    ("optimizer never steps", "AdamW", "never_steps", {"dtype": BF16}, *WITHOUT),
    ("step past the scaler", "AdamW", "past_the_scaler", {}, *AMP),
    ("step past the scaler", "AdamW", "step_twice", {}, *AMP),
    (
        "scheduler on a skipped step",
        "the scheduler of AdamW",
        "scheduler_on_a_skip",
        {},
        "scheduler_after_a_look",
        {},
    ),
    ("not finite in float32 either", "the gradients", "scheduler_on_a_skip", {}, *AMP),
    ("every step is skipped", "the scaler", "overflow_on_the_way_back", {}, *AMP),
    (
        "stale casts",
        "one autocast region around several steps",
        "everything_in_one_region",
        {},
        *AMP,
    ),
    ("backward inside autocast", "the loss", "backward_inside", {}, *AMP),
    ("scale near zero", "the scaler", "dying_scale", {}, *AMP),
    ("scale too small", "the scaler", "small_scale", {}, *AMP),
    ("eps is zero", "AdamW on fp16 weights", "pure", {"weights": FP16}, "plain", {}),
    (
        "updates are lost",
        "optimizer's add_ on bfloat16",
        "pure",
        {"weights": BF16, "make": SGD, "lr": 1e-6},
        "plain",
        {"make": SGD, "lr": 1e-6},
    ),
    (
        "updates are lost",
        "optimizer's mul_ on bfloat16",
        "decay",
        {"weights": BF16, "weight_decay": 0.01},
        "decay",
        {"weight_decay": 0.01},
    ),
    (
        "moving average stands still",
        "the loop's lerp_ on bfloat16",
        "moving_average",
        {"dtype": BF16},
        "moving_average_in_fp32",
        {"dtype": BF16},
    ),
    (
        "constant outside of the format",
        "call 1 of the step",
        "mask",
        {},
        "masked_with_inf",
        {},
    ),
    ("layer outside of autocast", "call 1 of the step", "layer_outside", {}, *AMP),
    ("no products in 16 bits", "the step", "forward_outside", {}, *AMP),
    ("positions in 16 bits", "the loss", "positions", {}, "positions_in_fp32", {}),
    ("input is not finite", "what the model is given", "bad_data", {}, *AMP),
    (
        "activation overflows",
        "wide",
        "healthy",
        {"net": Tall},
        "healthy_bf16",
        {"net": Tall, "dtype": BF16},
    ),
    ("weights are cast again and again", "0", "no_cache", {}, "twice_in_a_region", {}),
    (
        "sizes are not multiples of 8",
        "2",
        "healthy",
        {"net": functools.partial(mlp, 61)},
        *AMP,
    ),
    ("Python waits for values", "the loop", "reads", {}, *AMP),
]


def examined(step, settings, steps=1):
    loop = Loop(**settings)
    given = loop.scaler if "scaler" in getattr(Loop, step).__code__.co_names else None
    late = {"no_update", "scheduler_after_a_look"}  # they show in their second step
    how = getattr(loop, step), loop.net, loop.optimizer, given
    return doctor.examine(*how, steps=steps + (step in late))


@functools.cache
def mended_findings(step, settings):
    return examined(step, dict(settings)).findings


SECOND = ("clip_values_before_unscale", "step_twice", "decay")  # other forms of the same fault


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=[pytest.mark.full] * (f[2] in SECOND)) for f in FAULTS],
    ids=lambda fault: f"{fault[0]}-{fault[2]}",
)
def test_a_fault_is_named_in_its_place_and_its_cure_gets_no_finding(fault):
    name, where, broken, settings, mended, mended_settings = fault
    report = examined(broken, settings)
    assert (name, where) in [(f.name, f.where) for f in report.findings], str(report)
    assert not mended_findings(mended, tuple(mended_settings.items()))


@pytest.fixture
def machine(monkeypatch):
    """A machine that runs a product in 16 bits so many times as fast as in float32."""

    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision

    def build(faster, tf32=False):
        monkeypatch.setattr(doctor, "WORTH", 0)
        monkeypatch.setattr(doctor, "_race", lambda product, *_: (faster(product[0]), 0.05))
        matmul.fp32_precision = "tf32" if tf32 else before

    yield build
    matmul.fp32_precision = before


def slow(flops):
    return 0.5


def same(flops):
    return 1.0


def fast(flops):
    return 10.0


def fast_if_large(flops):
    return 40.0 if flops > 1e5 else 1.0


WIDE = functools.partial(mlp, 256)
# name, place, machine, broken step, its settings, mended step and its settings
SPEED_FAULTS = [
    ("no matrix units", "cpu", (slow,), *WITHOUT, "plain", {}),
    ("TF32 is on already", "cpu", (same, True), *WITHOUT, "plain", {}),
    (
        "sizes are too small",
        "the products",
        (fast_if_large,),
        *WITHOUT,
        "healthy_bf16",
        {"dtype": BF16, "net": WIDE},
    ),
    ("casts eat the gain", "the loss", (fast,), "to_and_fro", {"dtype": BF16}, *WITHOUT),
]


@pytest.fixture
def counted(monkeypatch):
    """Seconds are counted: one for each FLOP of a product and for each byte of a cast."""
    speed = doctor._speed

    def of_counts(seen, step, *how):
        total = sum((collections.Counter(op) for op in seen.ops.values()), collections.Counter())
        seen.seconds = [{"products": total["flops"], "casts": total["nbytes"]}]
        step = (total["flops"] + total["nbytes"],) * 3
        return speed(seen, doctor.timing.Timing(step, step), *how)

    monkeypatch.setattr(doctor, "_speed", of_counts)


@pytest.mark.parametrize("fault", SPEED_FAULTS, ids=lambda fault: fault[0])
def test_what_keeps_16_bits_from_being_fast_is_named_and_its_cure_gets_no_finding(
    fault, machine, counted
):
    name, where, how, broken, settings, mended, mended_settings = fault
    machine(*how)
    report = examined(broken, settings)
    assert [(f.name, f.where) for f in report.findings] == [(name, where)], str(report)
    evidence = report.findings[0].evidence
    assert evidence["from"] <= evidence["most gain"] <= evidence["to"]
    assert not examined(mended, mended_settings).findings


def test_the_speed_of_a_toy_is_not_worth_a_finding(machine, monkeypatch):
    machine(slow)
    monkeypatch.undo()
    assert "faster_if_large" not in examined(*WITHOUT).speed


@pytest.mark.full
def test_a_step_worth_it_is_compared_with_a_large_product():
    loop = Loop(functools.partial(mlp, 4096), BF16)
    loop.x = torch.randn(128, 32)
    report = doctor.examine(loop.healthy_bf16, loop.net, steps=1)
    faster = report.speed["faster_if_large"] + report.speed["spread_if_large"]
    assert faster > 0
    assert (faster < 1.2) == ("no matrix units" in [f.name for f in report.findings])


def test_every_entry_of_the_catalogue_is_tested():
    tested = {fault[0] for fault in [*FAULTS, *SPEED_FAULTS]}
    others = {"binary cross-entropy under autocast", "the step raised"}
    assert tested | others == doctor.CATALOGUE.keys()


@pytest.mark.parametrize("how", ["healthy_penalty", "healthy_accumulation"])
def test_a_healthy_loop_gets_no_finding(how):
    assert not examined(how, {}).findings


def test_a_thousand_decays_leave_a_bf16_weight_where_it_was_and_the_doctor_says_so():
    weight = nn.Parameter(torch.ones(8, 8, dtype=BF16))
    net = nn.ParameterList([weight])
    optimizer = SGD([weight], lr=0.01, weight_decay=0.01)

    def step():
        weight.grad = torch.zeros_like(weight)
        optimizer.step()

    (row,) = doctor.examine(step, net).updates
    assert (row["due"], row["stay"]) == (3 * 64, 1.0)
    for _ in range(1000):
        step()
    assert weight.unique().item() == 1.0


def test_map_ranges_scale_and_speed_are_measured():
    loop = Loop()
    report = doctor.examine(loop.healthy, loop.net)
    forward, backward = 2 * 16 * 32 * 64, 2 * 16 * 32 * 64
    flops = {(r["module"], r["phase"]): r["flops"] for r in report.map if r["flops"]}
    # Of the first layer no gradient of the input is wanted.
    assert flops == {
        ("0", "forward"): forward,
        ("2", "forward"): forward,
        ("0", "backward"): backward,
        ("2", "backward"): 2 * backward,
    }
    assert report.summary["share of FLOPs in 16 bits"] == 1.0
    casts = {(r["module"], r["op"]): r["calls"] for r in report.map if r["phase"] == "forward"}
    assert casts["0", "cast to float16"] == 3 and casts["2", "cast to float16"] == 2
    with torch.no_grad():
        truth = loop.net(loop.x).abs().max().item()
    ranges = {(r["module"], r["kind"]): r for r in report.ranges}
    assert ranges["2", "activations"]["largest"] == truth
    assert {kind for _, kind in ranges} == {"activations", "gradients", "weight gradients"}
    speed = report.speed
    assert 0 < speed["low"] <= speed["most_gain"] <= speed["high"] < math.inf


def test_what_watching_costs_counts_as_neither_product_nor_cast():
    net, x, ticks = nn.Linear(8, 8), torch.randn(8, 8), itertools.count()
    seen = doctor.Watcher(net, doctor.Saved(net))
    seen.clock = ticks.__next__  # every kernel takes one tick, and so all of it is the watching
    seen.watch(lambda: net(x).to(BF16), 3)
    assert seen.seconds == [{"products": 0, "casts": 0}] * 3


def test_a_convolution_that_calls_another_counts_once():
    net, ticks = nn.Conv2d(8, 8, 3), itertools.count()
    seen = doctor.Watcher(net, doctor.Saved(net))
    seen.clock = ticks.__next__  # a kernel that calls no other takes one tick
    seen.overhead = 0
    seen.watch(lambda: net(torch.randn(1, 8, 8, 8)), 1)
    products = [op for (*_, name, _), op in seen.ops.items() if "conv" in name]
    assert seen.seconds[0]["products"] == sum(op["calls"] for op in products) == 1


def test_a_fused_lstm_has_the_products_of_one_that_is_not():
    """torch counts none in the one kernel that CPUs with 16-bit units, and all GPUs, run it as."""
    net = nn.LSTM(16, 24, num_layers=2, bidirectional=True)
    x, hidden = torch.randn(5, 3, 16, requires_grad=True), torch.zeros(4, 3, 24, requires_grad=True)
    products = collections.Counter()
    for fused in (False, True):
        seen = doctor.Watcher(net, doctor.Saved(net))
        with torch.backends.mkldnn.flags(enabled=fused):
            seen.watch(lambda: net(x, (hidden, hidden))[0].sum().backward(), 1)
        if fused != any("rnn" in name for _, _, name, _ in seen.ops):
            pytest.skip("on this CPU torch fuses no LSTM")
        for (_, phase, _, _), op in seen.ops.items():
            products[phase, fused] += op["flops"]
    assert products["forward", True] == products["forward", False] > 0
    assert products["backward", True] == products["backward", False] > 0
    call = x, net._flat_weights, 4, None, hidden, hidden  # as cuDNN's kernel gets them
    flops = watcher.flops_of(torch.ops.aten._cudnn_rnn, call, {}, None)
    assert flops == products["forward", True]


def test_attention_takes_no_part_in_the_race_as_a_gpus_kernels_refuse_float32(monkeypatch):
    net, x = nn.Linear(8, 8), torch.randn(1, 2, 64, 8)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setitem(watcher.flop_registry, kernel, lambda *_, **__: 30_000_000)
    seen = doctor.Watcher(net, doctor.Saved(net))
    seen.watch(lambda: F.scaled_dot_product_attention(net(x), x, x), 1)
    assert 30_000_000 in [op["flops"] for op in seen.ops.values()]
    assert seen.sample[0] == 2 * 128 * 8 * 8


def test_the_scale_found_saves_the_gradients():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(64, 8)

    def step():
        (net(x).float().square().mean() * 1e-6).backward()

    report = doctor.examine(step, net)
    scale = report.scale["smallest scale that saves 99%"]
    step()
    shares = [doctor.gradients.lost(net, "fp16", s) for s in (1.0, scale)]
    assert report.scale["gradients lost by fp16 unscaled"] > 0.5
    assert shares[0] > 0.5 and shares[1] <= 0.01 and scale > 1


@pytest.mark.parametrize(
    ("how", "step", "settings", "precision", "begins", "says"),
    [
        ((fast,), "plain", {}, None, "bf16 without a scaler: ", "10 times as fast in bf16"),
        ((fast,), "plain", {}, "fp16", "fp16 with a scaler: ", "10 times as fast in fp16"),
        ((slow,), "plain", {}, None, "float32: ", "16 bits would save memory only."),
        ((same, True), "plain", {}, None, "TF32, which is on: ", "16 bits would save memory only."),
        ((fast,), "plain", {"net": Tall}, "fp16", "bf16 without", "fp16 would overflow, an acti"),
        ((fast,), "pure", {"weights": BF16}, None, "could not tell what", "are bf16: float32 wei"),
    ],
)
def test_advice_follows_what_was_measured(
    how, step, settings, precision, begins, says, machine, monkeypatch
):
    machine(*how)
    loop = Loop(**{"net": WIDE} | settings)
    monkeypatch.setattr(doctor.timing, "compare", lambda runs, *_: {"": ALL_PRODUCTS})
    advice = doctor.examine(getattr(loop, step), loop.net, precision=precision).advice
    assert advice.startswith(begins) and says in advice, advice


ALL_PRODUCTS = doctor.timing.Timing((1e-9,) * 3, (1e-9,) * 3)  # a step as short as its products


@pytest.mark.parametrize(("narrow", "gain"), [(False, 1 / (0.5 + 0.5 / 4)), (True, 0.5 + 0.5 * 4)])
def test_gain_is_amdahls(narrow, gain, machine):
    machine(lambda flops: 4.0)
    seen = doctor.Watcher(nn.Linear(2, 2), doctor.Saved())
    seen.seconds, seen.sample = [{"products": 0.5, "casts": 0.0}] * 3, (1, None, None)
    step = doctor.timing.Timing((1.0,) * 3, (1.0,) * 3)
    speed = doctor._speed(seen, step, doctor.formats.BF16, narrow, False)
    assert speed["most_gain"] == pytest.approx(gain)
    assert speed["low"] < gain < speed["high"]


def test_a_report_is_text_html_and_json():
    loop = Loop()
    report = doctor.examine(loop.no_update, loop.net)
    text = str(report)
    assert text.startswith("1 finding, step in fp16\nerror    update is missing (call 2 of the")
    assert "→ call scaler.update()" in text and "(lesson 06)" in text
    report.findings[0].evidence["<b>"] = math.inf
    assert "&lt;b&gt; inf" in report._repr_html_() and "<b>" not in report._repr_html_()
    plain = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert plain["findings"][0]["severity"] == "error"
    assert plain["findings"][0]["evidence"]["<b>"] == "Infinity"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"step": 3}, "step = 3 is not allowed: give a function"),
        ({"model": nn.ReLU()}, "model = ReLU() is not allowed"),
        ({"steps": 0}, "steps = 0 is not allowed"),
        ({"precision": "int8"}, "precision = 'int8' is not allowed"),
    ],
)
def test_wrong_arguments_are_refused_before_any_work(change, sentence):
    right = {"step": pytest.fail, "model": nn.Linear(2, 2)}
    with pytest.raises(ParameterError) as refusal:
        doctor.examine(**right | change)
    assert str(refusal.value).startswith(sentence)


SCRIPT = """
import torch
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

def make_step(update=True):
    def step():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = net(torch.ones(8, 8)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update() if update else None
        optimizer.zero_grad()
    return step, net

def make_broken():
    return dict(zip(("step", "model"), make_step(False)))

def make_nothing():
    return 3
"""


@pytest.mark.parametrize(
    ("target", "status", "says"),
    [
        ("script_of_a_user:make_step", 0, "no findings, step in fp16"),
        ("script_of_a_user:make_broken", 1, "update is missing"),
        ("script_of_a_user:make_nothing", 2, "make_nothing"),
        ("script_of_a_user:absent", 2, "absent"),
        ("no_such_module:make_step", 2, "no_such_module"),
    ],
)
def test_the_command_line(target, status, says, tmp_path, monkeypatch):
    (tmp_path / "script_of_a_user.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "script_of_a_user", raising=False)
    result = CliRunner().invoke(doctor.command, [target])
    assert result.exit_code == status and says in result.output


def state_of(loop):
    """Everything that a step may change, as one flat list that torch.equal and == can compare."""
    tensors = [
        *loop.net.state_dict().values(),
        *(p.grad for p in loop.net.parameters()),
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.from_numpy(numpy.random.get_state()[1].copy()),
    ]
    tensors += [value for state in loop.optimizer.state.values() for value in state.values()]
    plain = [
        loop.scaler.state_dict(),
        loop.scheduler.state_dict(),
        torch.is_grad_enabled(),
        loop.net.training,
    ]
    plain += [[p.requires_grad for p in loop.net.parameters()]]
    plain += [{**group, "params": None} for group in loop.optimizer.param_groups]
    return copy.deepcopy(tensors), copy.deepcopy(plain)


def raising(loop):
    loop.healthy()
    random.random(), numpy.random.rand()
    loop.net[0].weight.requires_grad_(False)
    torch.set_grad_enabled(False)
    loop.net.eval()
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "how", [Loop.healthy, Loop.scheduler_on_a_skip, Loop.unscale_twice, raising]
)
def test_nothing_is_changed(how):
    layers = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 32)
    loop = Loop(lambda: nn.Sequential(*layers))
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


def test_watching_changes_no_result():
    torch.manual_seed(0)
    net, x, seen = nn.Bilinear(16, 16, 8), torch.randn(4, 16), []

    def step():
        with region(BF16):
            output = net(x, x)
        seen.append((output.dtype, output.double().sum().item()))
        output.float().square().mean().backward()

    step()
    doctor.examine(step, net, steps=1)
    assert seen[1] == seen[0] and seen[-1] != seen[0]  # the last is the run in float32


def test_networks_and_averages_that_the_doctor_was_not_given_are_put_back():
    torch.manual_seed(0)
    net, critic = mlp(), nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = [torch.zeros_like(p) for p in net.parameters()]
    optimizers = [SGD(net.parameters(), lr=0.1), torch.optim.Adam(critic.parameters())]
    recorder = FlightRecorder(LossScaler("cpu"))

    def step():
        with region():
            loss = critic(net(torch.randn(16, 32))).square().mean()
        recorder.scale(loss).backward()
        for optimizer in optimizers:
            recorder.step(optimizer)
            optimizer.zero_grad()
        recorder.update()
        with torch.no_grad():
            for mean, p in zip(average, net.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    held = [*critic.state_dict().values(), *net.state_dict().values(), *average]
    before = copy.deepcopy(held)
    inner = recorder.scaler
    doctor.examine(step, net, scaler=recorder)
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))
    assert not optimizers[1].state and critic[0].weight.grad is None
    assert recorder.rows == [] and recorder.scaler is inner and inner._scale is None


def image_step(net, x):
    optimizer, scaler = SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu")

    def step():
        with region():
            loss = net(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step, net


def cnn():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    return image_step(net, torch.randn(4, 3, 16, 16))


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return image_step(net, torch.randn(2, 8, 32))


def compiled():
    net = mlp()
    step, _ = image_step(torch.compile(net, backend="aot_eager"), torch.randn(16, 32))
    return step, net


def checkpointed():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)

    return image_step(Checkpointed(), torch.randn(16, 32))


def lstm():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(16, 16, batch_first=True)

        def forward(self, x):
            return self.lstm(x)[0]

    net, x = Net(), torch.randn(2, 8, 16)
    optimizer = SGD(net.parameters(), lr=0.1)

    def step():
        with region(BF16):
            loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    try:
        step()
    except RuntimeError as error:
        pytest.skip(f"this CPU does not run the loop by itself: {error}")
    return step, net


def gan():
    nets = nn.ModuleList([mlp(), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))])
    makers = [torch.optim.Adam(net.parameters(), lr=1e-3) for net in nets]
    scaler, real = torch.amp.GradScaler("cpu", init_scale=256.0), torch.randn(16, 32)

    def step():
        make, judge = nets
        for turn, maker in enumerate(reversed(makers)):
            judge.requires_grad_(turn == 0)
            with region():
                fake = make(torch.randn(16, 32))
                verdict = judge(fake.detach() if turn == 0 else fake).float()
                loss = F.softplus(verdict if turn == 0 else -verdict).mean()
                if turn == 0:
                    loss = loss + F.softplus(-judge(real).float()).mean()
            maker.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(maker)
        scaler.update()

    return step, nets, makers, scaler


@pytest.mark.parametrize(
    "make",
    [
        cnn,
        pytest.param(transformer, marks=pytest.mark.full),
        pytest.param(compiled, marks=pytest.mark.full),
        pytest.param(checkpointed, marks=pytest.mark.full),
        lstm,
        gan,
    ],
)
def test_a_healthy_architecture_gets_no_error(make):
    torch.manual_seed(0)
    report = doctor.examine(*make())
    assert not [f for f in report.findings if f.severity == "error"], str(report)
    assert report.precision in ("fp16", "bf16")


DDP = """
import os, sys, torch
from torch import nn
from amp_utils import doctor
torch.distributed.init_process_group("gloo")
torch.manual_seed(torch.distributed.get_rank())
net = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
model = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
def step():
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(torch.randn(8, 16)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
report = doctor.examine(step, model)
assert report.precision == "fp16" and not report.findings, str(report)
print("healthy")
"""


@pytest.mark.full
def test_two_ranks_get_no_finding(tmp_path):
    (tmp_path / "ranks.py").write_text(DDP)
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 ranks.py".split()
    how = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 300}
    run = subprocess.run([sys.executable, *command], **how)
    assert run.returncode == 0 and run.stdout.count("healthy") == 2, run.stderr


def lesson(number, names):
    """A lesson up to the cell that has one of these functions, run with few steps."""
    (path,) = notebook.choose([number], notebook.ROOT / "notebooks")
    space = {"__name__": path.stem}
    for cell in notebook.cells(path):
        if cell.is_code:
            exec(compile(cell.source, path.name, "exec"), space)
            if "parameters" in cell.tags:
                few = {"device": "cpu", "steps": 2, "epochs": 1}
                space |= {name: value for name, value in few.items() if name in space}
        for name in names if cell.is_code and "exercise" not in cell.tags else ():
            if f"def {name}(" in cell.source:
                return space, space[name]
            if name in space.get("script", {}):  # lesson 13 keeps its loop in a file
                return space, space["script"][name]
    raise AssertionError(f"lesson {number} has none of {names}")


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "names"),
    [
        *((number, {"train"}) for number in "05 06 07 08 09 10 11 12 13".split()),
        ("06", {"train_amp"}),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(sorted(value)),
)
def test_the_courses_own_loops_get_no_error(number, names, monkeypatch):
    monkeypatch.chdir(notebook.ROOT / "notebooks")
    # torch's test machinery, which another test may have brought in, freezes torch.backends.
    with torch.backends.__allow_nonbracketed_mutation():
        space, train = lesson(number, names)
    x, nets, turn = torch.randn(64, 2), [], iter(())
    sequential = nn.Sequential

    def again(*layers):
        """The doctor wants one network, also where a loop builds its own in each call."""
        index = next(turn)
        if index == len(nets):
            nets.append(sequential(*layers))
        return nets[index]

    monkeypatch.setattr(nn, "Sequential", again)

    def step():
        nonlocal turn
        turn = itertools.count()
        known = {"dtype": FP16, "precision": "fp16", "loss_scale": 65536.0, "max_norm": 1.0}
        known |= {"clip": "right", "pieces": 4, "steps": 2, "until": 2, "seed": 0}
        known |= {"rank": 0, "ranks": 1, "device": torch.device("cpu")}
        wanted = inspect.signature(train).parameters
        if "run" in wanted:
            known["run"] = space["new_run"]("fp16", 0)
        if "scaler" in wanted:
            known["scaler"] = torch.amp.GradScaler("cpu", init_scale=256.0)
        if "net" in wanted:
            net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
            wave = torch.sin(3 * x[:, :1])
            optimizer = SGD(net.parameters(), lr=0.1)
            data = (x, wave) if number == "10" else [(x, wave)]
            known |= {"net": net, "optimizer": optimizer, "data": data}
            known["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 10)
            known["batches"] = [(x[:32], wave[:32]), (x[32:], wave[32:])]
        plain = (p for p in wanted.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD)
        train(**{parameter.name: known[parameter.name] for parameter in plain})

    step()
    report = doctor.examine(step, nn.ModuleList(nets))
    assert not [f for f in report.findings if f.severity == "error"], str(report)
    assert report.precision == "fp16"
