"""LossScaler is torch's GradScaler, bit for bit; the flight recorder sees what either of them did."""

import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.amp import GradScaler

from amp_utils.scaler import FlightRecorder, LossScaler

BOTH = pytest.mark.parametrize("scaler_type", [LossScaler, GradScaler])
GRADIENTS = st.sampled_from(
    [0.0, 1.0, -3.5, 1e-30, 2.0**-149, 7e4, 1e30, math.inf, -math.inf, math.nan]
)


class Bench:
    """A scaler with two optimizers over three parameters, whose gradients are put in by hand."""

    def __init__(self, scaler) -> None:
        self.scaler = scaler
        self.parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.optimizers = [
            torch.optim.SGD(self.parameters[:2], lr=0.1, momentum=0.9),
            torch.optim.Adam(self.parameters[2:], lr=0.01),
        ]

    def step(self, values, unscale, new_scale) -> None:
        self.scaler.scale(torch.tensor(1.0))
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = torch.tensor([value, 1.0])
        for optimizer, first in zip(self.optimizers, unscale, strict=True):
            if first:
                self.scaler.unscale_(optimizer)
            self.scaler.step(optimizer)
        self.scaler.update(new_scale)

    def state(self) -> list:
        """Everything that must agree, as bits."""
        tensors = [t for p in self.parameters for t in (p.detach(), p.grad)]
        return [*(t.view(torch.int32).tolist() for t in tensors), repr(self.scaler.state_dict())]


STEP = st.tuples(
    st.tuples(GRADIENTS, GRADIENTS, GRADIENTS),
    st.tuples(st.booleans(), st.booleans()),
    st.one_of(st.none(), st.none(), st.sampled_from([1.0, 0.3, 2.0**20])),
    st.booleans(),  # swap the two scalers' states before this step
)
SETUP = {
    "init_scale": st.sampled_from([2.0**16, 1.0, 3.7, 1e-40, 2.0**127, 0.0]),
    "growth_factor": st.sampled_from([2.0, 1.001, 3.3]),
    "backoff_factor": st.sampled_from([0.5, 0.999, 0.1]),
    "growth_interval": st.integers(1, 4),
}


@settings(max_examples=1000, deadline=None, derandomize=True, database=None)
@given(setup=st.fixed_dictionaries(SETUP), schedule=st.lists(STEP, min_size=1, max_size=8))
def test_both_scalers_do_the_same_over_any_schedule(setup, schedule):
    ours, theirs = Bench(LossScaler("cpu", **setup)), Bench(GradScaler("cpu", **setup))
    for values, unscale, new_scale, swap in schedule:
        if swap:
            states = theirs.scaler.state_dict(), ours.scaler.state_dict()
            ours.scaler.load_state_dict(states[0])
            theirs.scaler.load_state_dict(states[1])
        for bench in (ours, theirs):
            bench.step(values, unscale, new_scale)
        assert ours.state() == theirs.state()


def fresh(scaler_type, **kwargs):
    """(scaler, optimizer) with a scaled backward pass done."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = scaler_type("cpu", **kwargs)
    scaler.scale(parameter.sum()).backward()
    return scaler, optimizer


def twice_unscaled(t):
    scaler, optimizer = fresh(t)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def unscaled_after_step(t):
    scaler, optimizer = fresh(t)
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def stepped_twice(t):
    scaler, optimizer = fresh(t)
    scaler.step(optimizer)
    scaler.step(optimizer)


def half_gradients(t):
    scaler, optimizer = fresh(t)
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones(2, dtype=torch.float16)
    scaler.step(torch.optim.SGD([parameter], lr=0.1))


def no_gradients(t):
    scaler, _ = fresh(t)
    scaler.step(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))


MISUSE = {
    "unscale_ twice": twice_unscaled,
    "unscale_ after step": unscaled_after_step,
    "step twice": stepped_twice,
    "float16 gradients": half_gradients,
    "no gradients": no_gradients,
    "update without a step": lambda t: fresh(t)[0].update(),
    "update before scale": lambda t: t("cpu").update(),
    "step before scale": lambda t: t("cpu").step(fresh(t)[1]),
    "unscale_ before scale": lambda t: t("cpu").unscale_(fresh(t)[1]),
    "closure": lambda t: fresh(t)[0].step(fresh(t)[1], closure=lambda: None),
    "scale of a number": lambda t: t("cpu").scale(3),
    "scale of numbers": lambda t: t("cpu").scale([torch.ones(1), 3]),
    "growth factor": lambda t: t("cpu", growth_factor=1.0),
    "backoff factor": lambda t: t("cpu", backoff_factor=1.0),
    "two new scales": lambda t: fresh(t)[0].update(torch.ones(2)),
    "new scale with gradient": lambda t: fresh(t)[0].update(torch.ones(1, requires_grad=True)),
    "empty state": lambda t: t("cpu").load_state_dict({}),
}


@pytest.mark.parametrize("misuse", MISUSE.values(), ids=MISUSE)
def test_misuse_raises_the_same_error(misuse):
    errors = []
    for scaler_type in (LossScaler, GradScaler):
        with pytest.raises((RuntimeError, ValueError, AssertionError)) as caught:
            misuse(scaler_type)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


@BOTH
def test_nested_iterables_are_scaled_and_keep_their_type(scaler_type):
    one = torch.ones(1)
    scaled = scaler_type("cpu", init_scale=4.0).scale([one, (one, [one]), map(torch.clone, [one])])
    assert scaled[0] == 4 and scaled[1][1][0] == 4
    assert isinstance(scaled, list) and isinstance(scaled[1], tuple)
    assert [t.item() for t in scaled[2]] == [4.0]


@BOTH
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_sparse_gradients_are_unscaled_and_checked(scaler_type, value):
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    before = embedding.weight.detach().clone()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler = scaler_type("cpu", init_scale=8.0)
    scaler.scale((embedding(torch.tensor([1, 1])) * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    moved = (before - embedding.weight.detach())[1]
    torch.testing.assert_close(moved, torch.full((2,), 2.0 if value == 1 else 0.0))


@BOTH
def test_a_scale_dies_after_166_infs_and_takes_the_weights_along(scaler_type):
    scaler, optimizer = fresh(scaler_type)
    (parameter,) = optimizer.param_groups[0]["params"]
    for _ in range(166):
        parameter.grad = torch.full((2,), math.inf)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0 and parameter.tolist() == [1, 1]
    optimizer.zero_grad()
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.isnan().all()


@BOTH
def test_growth_stops_before_infinity(scaler_type):
    scaler, optimizer = fresh(scaler_type, init_scale=2.0**126, growth_interval=1)
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127


@BOTH
def test_disabled_it_passes_everything_through(scaler_type):
    scaler = scaler_type("cpu", enabled=False)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    assert scaler.scale("anything") == "anything"
    parameter.grad = torch.ones(1)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, closure=lambda: 7.0) == 7.0
    scaler.update()
    assert parameter == 0.5
    assert (scaler.get_scale(), scaler.is_enabled(), scaler.state_dict()) == (1.0, False, {})


@BOTH
def test_settings_can_be_read_and_changed(scaler_type):
    scaler = scaler_type("cpu")
    scaler.set_growth_factor(3.0), scaler.set_backoff_factor(0.25), scaler.set_growth_interval(7)
    assert (
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    ) == (3.0, 0.25, 7)


def test_our_scaler_can_be_pickled():
    scaler, optimizer = fresh(LossScaler, init_scale=32.0)
    scaler.step(optimizer)
    scaler.update()
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == scaler.state_dict()


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_the_recorder_sees_each_step(scaler_type, fused):
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=fused)
    recorder = FlightRecorder(scaler_type("cpu", init_scale=8.0, growth_interval=2))
    for value in (1.0, math.inf, 1.0, 1.0, math.nan):
        recorder.scale(torch.tensor(1.0))
        parameter.grad = torch.full((2,), value)
        recorder.step(optimizer)
        recorder.update()
    assert recorder.rows == [
        (1, 8.0, False, 0, 1),
        (2, 8.0, True, 1, 0),
        (3, 4.0, False, 0, 1),
        (4, 4.0, False, 0, 0),
        (5, 8.0, True, 1, 0),
    ]
    assert recorder.get_scale() == 4.0
    assert not optimizer._optimizer_step_pre_hooks, "the hooks must be gone"


@BOTH
def test_the_recorder_counts_the_optimizers_that_skipped(scaler_type):
    bench = Bench(FlightRecorder(scaler_type("cpu")))
    bench.step((1.0, math.inf, 1.0), (False, True), None)
    bench.step((math.nan, 1.0, math.inf), (True, False), None)
    assert [(row.found_inf, row.skipped) for row in bench.scaler.rows] == [(True, 1), (True, 2)]
    assert [row.scale for row in bench.scaler.rows] == [65536.0, 32768.0]


def test_the_recorder_records_a_disabled_scaler():
    recorder = FlightRecorder(GradScaler("cpu", enabled=False))
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    recorder.step(torch.optim.SGD([parameter], lr=0.1))
    recorder.update()
    assert recorder.rows == [(1, 1.0, False, 0, 0)]


def test_the_recorder_passes_errors_on_and_leaves_no_hook():
    scaler, optimizer = fresh(GradScaler)
    recorder = FlightRecorder(scaler)
    recorder.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        recorder.step(optimizer)
    assert not optimizer._optimizer_step_pre_hooks
