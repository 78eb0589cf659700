"""LossScaler is torch's GradScaler, bit for bit; the flight recorder sees what both of them did."""

import math
import pickle
import random

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from amp_utils.scaler import FlightRecorder, LossScaler

BOTH = pytest.mark.parametrize("scaler_type", [LossScaler, GradScaler])
INF, NAN = math.inf, math.nan


class OwnScaling(torch.optim.SGD):
    """An optimizer of torch's older contract: `step` is given the scaler."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, *, grad_scaler=None):
        grad_scaler.unscale_(self)
        return super().step(closure)


class Bench:
    """A scaler and optimizers of every kind, whose gradients are put in by hand."""

    def __init__(self, scaler) -> None:
        self.scaler = FlightRecorder(scaler)
        dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        self.parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in dtypes]
        single, brain, half, double = self.parameters
        self.optimizers = [
            torch.optim.SGD([single, brain], lr=0.1, momentum=0.9),
            torch.optim.Adam([double], lr=0.01),
            torch.optim.Adam([single], lr=0.01, fused=True),
            torch.optim.SGD([half, brain], lr=0.1, fused=True),
            torch.optim.SGD([half], lr=0.1),  # torch refuses to unscale float16
            OwnScaling([brain], lr=0.1),
        ]

    def backward(self, values) -> None:
        self.scaler.scale(torch.tensor(1.0))
        for parameter, value in zip(self.parameters, values, strict=True):
            row = torch.tensor([value or 0.0, 1.0]).to(parameter.dtype)
            parameter.grad = None if value is None else row

    def unscale_(self, i) -> None:
        self.scaler.unscale_(self.optimizers[i])

    def step(self, i) -> None:
        return self.scaler.step(self.optimizers[i])

    def update(self, new_scale) -> None:
        self.scaler.update(new_scale)
        self.scaler = pickle.loads(pickle.dumps(self.scaler))

    def outcome(self, action, *args):
        """What one action returned or raised, and all that must agree after it."""
        try:
            result = getattr(self, action)(*args)
        except (RuntimeError, ValueError, AssertionError) as error:
            result = type(error)
        moments = [m for o in self.optimizers for state in o.state.values() for m in state.values()]
        tensors = [*self.parameters, *(p.grad for p in self.parameters), *moments]
        values = [None if t is None else t.tolist() for t in tensors]
        return repr((result, self.scaler.state_dict(), self.scaler.rows, values))


def actions(rng: random.Random):
    """One training iteration, seldom in the right order."""
    finite = [0.0, 1.0, -3.5, 1e-30, 2.0**-149, 7e4, 1e30]
    for _ in range(rng.choice([1, 1, 2])):
        yield "backward", rng.choices([*finite, *finite, *finite, INF, -INF, NAN, None], k=4)
        for i in rng.sample(range(6), rng.randint(1, 4)):
            if rng.random() < 0.4:
                yield "unscale_", i
            if rng.random() < 0.9:
                yield "step", i
    yield "update", rng.choice([None] * 6 + [1.0, 0.3, 2.0**20, 1e39])


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_both_scalers_do_the_same_over_any_schedule():
    rng = random.Random(0)
    for _ in range(60):
        settings = {
            "init_scale": rng.choice([2.0**16, 1.0, 3.7, 1e-40, 2.0**127, 0.0]),
            "growth_factor": rng.choice([2.0, 1.001, 3.3]),
            "backoff_factor": rng.choice([0.5, 0.999, 0.1]),
            "growth_interval": rng.randint(1, 3),
        }
        ours, theirs = (Bench(t("cpu", **settings)) for t in (LossScaler, GradScaler))
        done = [settings]
        for action in [a for _ in range(5) for a in actions(rng)]:
            done.append(action)
            assert ours.outcome(*action) == theirs.outcome(*action), done


def fresh(scaler_type, gradient=1.0, dtype=torch.float32, optimizer_type=torch.optim.SGD, **kwargs):
    """(scaler, optimizer) with a scaled backward pass done."""
    parameter = nn.Parameter(torch.ones(2, dtype=dtype))
    scaler = scaler_type("cpu", **kwargs)
    scaler.scale(torch.tensor(1.0))
    if gradient is not None:
        parameter.grad = torch.full((2,), gradient, dtype=dtype)
    return scaler, optimizer_type([parameter], lr=0.1)


def do(*methods, **kwargs):
    """A run of a fresh scaler that calls these methods, `update` without the optimizer."""

    def run(scaler_type):
        scaler, optimizer = fresh(scaler_type, **kwargs)
        for method in methods:
            getattr(scaler, method)(*[] if method == "update" else [optimizer])

    return run


def pickled(method):
    def run(scaler_type):
        scaler, optimizer = fresh(scaler_type)
        getattr(scaler, method)(optimizer)
        pickle.dumps(scaler)

    return run


MISUSE = {
    "unscale_ twice": do("unscale_", "unscale_"),
    "unscale_ after step": do("step", "unscale_"),
    "step twice": do("step", "step"),
    "float16 gradients": do("step", dtype=torch.float16),
    "complex gradients": do("step", dtype=torch.complex64),
    "no gradients": do("step", gradient=None),
    "update without a step": do("update"),
    "update before scale": lambda t: t("cpu").update(),
    "step before scale": lambda t: t("cpu").step(fresh(t)[1]),
    "unscale_ before scale": lambda t: t("cpu").unscale_(fresh(t)[1]),
    "closure": lambda t: fresh(t)[0].step(fresh(t)[1], closure=lambda: None),
    "scale of a number": lambda t: t("cpu").scale(3),
    "scale of numbers": lambda t: t("cpu").scale([torch.ones(1), 3]),
    "a scale beyond float32": lambda t: fresh(t, init_scale=1e39),
    "growth factor": lambda t: t("cpu", growth_factor=1.0),
    "backoff factor": lambda t: t("cpu", backoff_factor=1.0),
    "two new scales": lambda t: fresh(t)[0].update(torch.ones(2)),
    "new scale with gradient": lambda t: fresh(t)[0].update(torch.ones(1, requires_grad=True)),
    "new scale elsewhere": lambda t: fresh(t)[0].update(torch.ones(1, device="meta")),
    "empty state": lambda t: t("cpu").load_state_dict({}),
    "pickled after unscale_": pickled("unscale_"),
    "pickled after step": pickled("step"),
}


def test_misuse_raises_what_torch_raises():
    for name, misuse in MISUSE.items():
        raised = {}
        for scaler_type in (LossScaler, GradScaler):
            try:
                misuse(scaler_type)
            except Exception as error:
                raised[scaler_type] = type(error)
        assert raised and raised.get(LossScaler) is raised[GradScaler], f"{name}: {raised}"


def test_a_dead_or_unlucky_scale_does_as_in_torch():
    scaler, optimizer = fresh(LossScaler, gradient=INF)
    parameter = optimizer.param_groups[0]["params"][0]
    for _ in range(166):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 0 and parameter.tolist() == [1, 1], "166 infs kill the scale"
    parameter.grad = scaler.scale(torch.ones(2))
    scaler.step(optimizer)
    scaler.update()
    assert parameter.isnan().all(), "and the next good step the weights"
    scaler, optimizer = fresh(LossScaler, init_scale=2.0**126, growth_interval=1)
    for _ in range(3):
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127, "growth stops before infinity"


@BOTH
def test_nested_iterables_are_scaled_and_keep_their_type(scaler_type):
    one = torch.ones(1)
    scaled = scaler_type("cpu", init_scale=4.0).scale([one, (one, [one]), map(torch.clone, [one])])
    assert scaled[0] == 4 and scaled[1][1][0] == 4
    assert isinstance(scaled, list) and isinstance(scaled[1], tuple)
    assert [t.item() for t in scaled[2]] == [4.0]


@BOTH
def test_sparse_gradients_are_unscaled_and_checked(scaler_type):
    for value, expected in ((1.0, 2.0), (INF, 0.0)):
        embedding = nn.Embedding(4, 2, sparse=True)
        before = embedding.weight.detach().clone()
        optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
        scaler = scaler_type("cpu", init_scale=8.0)
        scaler.scale((embedding(torch.tensor([1, 1])) * value).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = (before - embedding.weight.detach())[1]
        torch.testing.assert_close(moved, torch.full((2,), expected))


@BOTH
def test_disabled_it_passes_everything_through(scaler_type):
    recorder = FlightRecorder(scaler_type("cpu", enabled=False))
    _, optimizer = fresh(scaler_type)
    assert recorder.scale("anything") == "anything"
    recorder.unscale_(optimizer)
    assert recorder.step(optimizer, closure=lambda: 7.0) == 7.0
    recorder.update()
    recorder.load_state_dict({})
    assert optimizer.param_groups[0]["params"][0].tolist() == [pytest.approx(0.9)] * 2
    assert (recorder.get_scale(), recorder.is_enabled(), recorder.state_dict()) == (1.0, False, {})
    assert recorder.rows == [(1, 1.0, False, 0, 0)]


def test_without_a_gpu_the_scaler_for_cuda_warns_and_is_disabled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.warns(UserWarning, match="No CUDA GPU: LossScaler is disabled") as caught:
        assert not LossScaler().is_enabled()
    assert caught[0].filename == __file__


@BOTH
def test_settings_can_be_read_and_changed(scaler_type):
    scaler = scaler_type("cpu")
    for name, value in (("growth_factor", 3.0), ("backoff_factor", 0.25), ("growth_interval", 7)):
        getattr(scaler, f"set_{name}")(value)
        assert getattr(scaler, f"get_{name}")() == scaler.state_dict()[name] == value


def test_states_and_pickles_move_from_one_scaler_to_the_other():
    scaler, optimizer = fresh(GradScaler, gradient=INF, init_scale=3.7, growth_interval=7)
    scaler.set_growth_factor(3.0), scaler.set_backoff_factor(0.25)
    for gradient in (INF, 1.0, 1.0):
        optimizer.param_groups[0]["params"][0].grad = torch.full((2,), gradient)
        scaler.step(optimizer)
        scaler.update()
    state = scaler.state_dict()
    for taker in (LossScaler("cpu"), fresh(LossScaler)[0]):  # before and after the first `scale`
        taker.load_state_dict(state)
        assert taker.state_dict() == state
        recorder = pickle.loads(pickle.dumps(FlightRecorder(taker)))
        assert recorder.scale(torch.ones(())) == scaler.scale(torch.ones(()))
        back = GradScaler("cpu")
        back.load_state_dict(recorder.state_dict())
        assert back.state_dict() == recorder.state_dict() == state


# ---- the flight recorder


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_the_recorder_sees_each_step(scaler_type, fused):
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1, fused=fused)
    recorder = FlightRecorder(scaler_type("cpu", init_scale=8.0, growth_interval=2))
    for value in (1.0, INF, 1.0, 1.0, NAN):
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


class Wrapper:
    """Only what a scaler needs of an optimizer; steps the real one every second time."""

    def __init__(self, optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()


@BOTH
def test_the_recorder_takes_any_optimizer_that_the_scaler_takes(scaler_type):
    scaler, optimizer = fresh(scaler_type, init_scale=1.0)
    wrapper, recorder = Wrapper(optimizer), FlightRecorder(scaler)
    for _ in range(2):
        recorder.step(wrapper)
        recorder.update()
    assert [(row.found_inf, row.skipped) for row in recorder.rows] == [(False, 0)] * 2
    assert optimizer.param_groups[0]["params"][0].tolist() != [1, 1]


@BOTH
def test_the_recorder_knows_found_inf_in_every_case(scaler_type):
    cases = {  # (gradient, calls, new scale): (found_inf, optimizers that did not step)
        (INF, ("unscale_",), None): (True, 1),
        (INF, ("unscale_",), 2.0): (True, 1),
        (1.0, ("unscale_",), 2.0): (False, 1),
        (INF, ("step",), 2.0): (True, 1),
        (1.0, ("unscale_", "step"), 2.0): (False, 0),
        (1.0, (), 2.0): (False, 0),
    }
    for (gradient, calls, new_scale), expected in cases.items():
        scaler, optimizer = fresh(scaler_type, gradient=gradient, growth_interval=1)
        recorder = FlightRecorder(scaler)
        for call in calls:
            getattr(recorder, call)(optimizer)
        recorder.update(new_scale)
        (row,) = recorder.rows
        assert (row.found_inf, row.skipped) == expected, (gradient, calls, new_scale)


@BOTH
def test_the_recorder_counts_the_optimizers_that_skipped(scaler_type):
    recorder = FlightRecorder(scaler_type("cpu"))
    bench = [fresh(scaler_type, gradient) for gradient in (1.0, INF, NAN)]
    recorder.scale(torch.tensor(1.0))
    for _, optimizer in bench:
        recorder.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        recorder.step(bench[0][1])
    recorder.update()
    assert recorder.rows == [(1, 65536.0, True, 2, 0)]
