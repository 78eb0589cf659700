"""Runs sick and mended training loops, and judges a repair by what it does, never by its text.

A loop is a function `loop(net, batches)` that trains `net` and yields its losses. `clinic.toml` has
for each patient the illness, and what a healthy loop must measure: Python over a `Chart`.
"""

import copy
import inspect
import itertools
import math
import textwrap
import tomllib
import warnings
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config
from torch.amp import GradScaler
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from amp_utils import doctor, lesson

Batches = list[tuple[Tensor, Tensor]]
Loop = Callable[[nn.Module, Batches], Iterable[float]]
PATIENTS = tomllib.loads(Path(__file__).with_name("clinic.toml").read_text("utf-8"))
NARROW = (torch.float16, torch.bfloat16)
THAN = {"<": "below ", ">": "above ", "<=": "at most ", "==": "", "!=": "other than "}
OLD = "before, float32"  # a row of the signs after a repair
HIGH = 2.0**24  # a first loss scale from which every scaler has to come down
WORDS = {  # what a verdict calls the measured things
    "distance": "the distance from float32's weights, as a share of their way,",
    "gap": "the largest difference from float32's losses, as a share of the largest,",
    "narrow": "the share of the layers' outputs in 16 bits",
    "learned": "the mean of the last three losses, as a share of the first,",
    "dtypes": "the set of the weights' dtypes",
    "casts": "the number of casts of weights by autocast",
    "needless": "the number of searches for inf in gradients that bf16 made",
    "formats": "the number of 16-bit formats that the layers' outputs have",
    "graphed": "the number of layers' outputs with a graph for backward",
    "graphs": "the number of graphs whose backward is compiled as well",
    "scalers": "the number of scalers made or restored, where each day is a process of its own,",
    "slowest": "the largest ratio of a step's learning rate to the one before",
    "rates[0]": "the learning rate of the first step taken",
    "rates[-1]": "the learning rate of the last step",
    "len(rates)": "the number of steps taken",
    "moved['0.weight']": "the length of the first layer's way",
}


@dataclass
class Chart:
    """What one run of a loop showed. `distance` and `gap` compare it with a reference run."""

    batches: int
    losses: list[float] = field(default_factory=list)
    raised: str = ""
    rates: list[float] = field(default_factory=list)  # learning rate of every step taken
    outputs: list[str] = field(default_factory=list)  # dtypes of what linear layers returned
    kept: set[str] = field(default_factory=set)  # dtypes of the weights of linear layers that ran
    casts: int | None = 0  # of weights, by autocast; None where they were not counted
    checks: int = 0  # of all gradients for inf and NaN
    blind: int = 0  # steps taken with gradients that are inf or NaN
    backwards: int = 0
    scalers: int = 0  # made, or restored from a state
    graphed: int = 0  # outputs of linear layers that a backward may need
    weights: dict[str, Tensor] = field(default_factory=dict)  # afterwards, in float64
    moved: dict[str, float] = field(default_factory=dict)  # length of each weight's way
    dtypes: set[str] = field(default_factory=set)  # of the weights, afterwards
    graphs: int = 0  # that torch.compile has made, with their backward

    @property
    def narrow(self) -> float:
        """Share of the linear layers' outputs in 16 bits."""
        return sum(name != "float32" for name in self.outputs) / max(1, len(self.outputs))

    @property
    def needless(self) -> int:
        """Checks of all gradients in a run in bf16."""
        return self.checks if set(self.outputs) & {"float16", "bfloat16"} == {"bfloat16"} else 0

    @property
    def bare(self) -> int:
        """Steps taken in a run in fp16 that never looked for inf: no scaler was at work."""
        return len(self.rates) if "float16" in self.outputs and not self.checks else 0

    @property
    def formats(self) -> int:
        """How many 16-bit formats the linear layers' outputs have."""
        return len(set(self.outputs) - {"float32"})

    @property
    def slowest(self) -> float:
        """The largest ratio of the learning rates of two steps in a row."""
        return max((b / a for a, b in itertools.pairwise(self.rates)), default=1.0)

    @property
    def learned(self) -> float:
        """Mean of the last three losses, as a share of the first; inf where it is not finite."""
        last, first = self.losses[-3:], self.losses[:1]
        share = sum(last) / len(last) / first[0] if any(first) else math.inf
        return share if math.isfinite(share) else math.inf

    def distance(self, other: "Chart") -> float:
        """Between the final weights, as a share of the way that the other's have gone."""
        gone = math.hypot(*other.moved.values())
        if self.weights.keys() != other.weights.keys() or not gone:
            return math.inf
        apart = [(self.weights[name] - w).norm().item() for name, w in other.weights.items()]
        return math.hypot(*apart) / gone if all(map(math.isfinite, apart)) else math.inf

    def gap(self, other: "Chart") -> float:
        """The largest difference between the losses, as a share of the other's largest."""
        pairs = list(zip(self.losses, other.losses, strict=False))
        apart = max((abs(a - b) for a, b in pairs), default=math.inf) / max(other.losses, default=1)
        return apart if len(self.losses) == len(other.losses) and apart == apart else math.inf


class _Counts(TorchDispatchMode):
    def __init__(self, chart: Chart, net: nn.Module) -> None:
        super().__init__()
        self.chart, self.net, self.by_hand = chart, net, False

    @contextmanager
    def tell_apart(self) -> Iterator[None]:
        """In this block it knows the casts that a loop writes out from those of autocast."""

        def aside(method: Callable) -> Callable:
            def convert(*args, **kwargs):
                before, self.by_hand = self.by_hand, True
                try:
                    return method(*args, **kwargs)
                finally:
                    self.by_hand = before

            return convert

        with ExitStack() as stack:
            for name in ("to", "half", "bfloat16", "type"):
                own = aside(getattr(Tensor, name))
                stack.enter_context(mock.patch.object(Tensor, name, own))
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "_to_copy" and kwargs.get("dtype") in NARROW:
            weights = {p.data_ptr() for p in self.net.parameters()}  # a loop may replace some
            in_region = torch.autocast_increment_nesting() > 1
            torch.autocast_decrement_nesting()
            asked = in_region and not self.by_hand
            self.chart.casts += asked and args[0].data_ptr() in weights
        self.chart.checks += name == "_amp_foreach_non_finite_check_and_unscale_"
        return func(*args, **kwargs)


def observe(loop: Loop, net: nn.Module, batches: Batches, counting: bool = True) -> Chart:
    """Train `net` with the loop; what it raises is kept, but for the NotImplementedError of a stub.

    `counting` (of casts and checks) must be off for a loop that compiles.
    """
    chart, before, made = Chart(len(batches)), _weights(net), counters["aot_autograd"]["ok"]
    chart.casts = 0 if counting else None

    def stepped(optimizer, *_) -> None:
        chart.rates.append(optimizer.param_groups[0]["lr"])
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        chart.blind += not all(g.isfinite().all() for g in held if g is not None)

    def returned(layer, _, output) -> None:
        if isinstance(layer, nn.Linear) and not torch.compiler.is_compiling():
            if not chart.outputs:  # what a loop replaced before is no part of the way
                before.update(_weights(net))
            chart.outputs.append(str(output.dtype)[6:])
            chart.kept.add(str(layer.weight.dtype)[6:])
            chart.graphed += output.requires_grad

    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_counted(torch.autograd, "backward", chart, "backwards"))
        for name in ("__init__", "load_state_dict"):
            stack.enter_context(_counted(GradScaler, name, chart, "scalers"))
        stack.callback(register_optimizer_step_post_hook(stepped).remove)
        stack.callback(register_module_forward_hook(returned).remove)
        try:
            if counting:
                counts = _Counts(chart, net)
                stack.enter_context(counts.tell_apart())
                stack.enter_context(counts)
            chart.losses.extend(map(float, loop(net, batches)))
        except NotImplementedError:
            raise
        except Exception as error:  # a patient may raise anything
            chart.raised = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    chart.weights, chart.dtypes = _weights(net), {str(p.dtype)[6:] for p in net.parameters()}
    chart.graphs = counters["aot_autograd"]["ok"] - made
    chart.moved = {name: (chart.weights[name] - was).norm().item() for name, was in before.items()}
    return chart


def _weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().cpu().double() for name, p in net.named_parameters()}


def _counted(where: object, name: str, chart: Chart, row: str) -> AbstractContextManager:
    """In this block the chart counts the calls of `where.name`, but not of scalers turned off."""
    call = getattr(where, name)

    def counted(first, *args, **kwargs):
        result = call(first, *args, **kwargs)
        on = not isinstance(first, GradScaler) or first.is_enabled()
        setattr(chart, row, getattr(chart, row) + on)
        return result

    return mock.patch.object(where, name, counted)


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings and torch's switches are afterwards as before."""
    anomaly = torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled())
    kept = config.patch(backward_pass_autocast=config.backward_pass_autocast)  # of torch.compile
    with warnings.catch_warnings(), anomaly, kept, torch.enable_grad():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def in_float32() -> Iterator[None]:
    """In this block autocast and scalers do nothing, and the 16-bit formats are float32."""
    off = torch.autocast("cpu", enabled=False)
    instead = {
        (torch, "float16"): torch.float32,
        (torch, "bfloat16"): torch.float32,
        (torch, "autocast"): lambda *_, **__: off,
        (torch.amp, "GradScaler"): lambda *_, **__: GradScaler(enabled=False),
        **{
            (kind, name): kind.float
            for kind in (nn.Module, Tensor)
            for name in ("half", "bfloat16")
        },
    }
    with ExitStack() as stack:
        for (where, name), value in instead.items():
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextmanager
def told(**settings: float) -> Iterator[None]:
    """In this block every scaler has these settings, whatever else it is told."""
    init = GradScaler.__init__

    def begin(*args, **others) -> None:
        given = inspect.signature(init).bind(*args, **others)
        given.arguments.update(settings)
        init(*given.args, **given.kwargs)

    with mock.patch.object(GradScaler, "__init__", begin):
        yield


class Ward:
    """The patients of a lesson; `network()` makes a new network, the same one each time."""

    def __init__(self, network: Callable[[], nn.Module], batches: Batches, seed: int = 0) -> None:
        self.network, self.batches, self.seed = network, batches, seed
        self.loops: dict[int | str, Loop] = {}  # as they were admitted
        self.wide: dict[int | str, Chart] = {}  # the same in float32
        self.meant: dict[int | str, Chart] = {}  # the same, on clean data
        self.ill: dict[int | str, Chart] = {}  # of the loops as they were admitted
        self.found: dict[int | str, list[str]] = {}  # what the doctor said of them
        self.seen: Chart | None = None  # of the loop that was judged last

    def _observe(
        self, number: int | str, loop: Loop, clean: str = "x", counting: bool = True
    ) -> Chart:
        torch.manual_seed(self.seed)
        counting = counting and not PATIENTS[str(number)].get("compiled")
        batches = [(eval(clean, {"x": x}), y) for x, y in self.batches]
        return observe(loop, self.network(), batches, counting)

    def illness(self, number: int | str, guess: object = None) -> str | list[str]:
        """Its letter in the lesson's list; two where there are two; a guess that is as right.

        Two letters may come in either order, as a list or as a word.
        """
        patient = PATIENTS[str(number)]
        words = guess if isinstance(guess, list | tuple) else [guess]
        letters = sorted(filter(str.isalpha, "".join(map(str, words)).upper()))
        right = letters in (sorted(patient["illness"]), [patient.get("or")])
        shown = guess.upper() if isinstance(guess, str) else guess
        return shown if right else patient["illness"]

    def admit(self, number: int | str) -> Callable[[Loop], Loop]:
        """A decorator that runs a sick loop and prints its vital signs."""

        def run(loop: Loop) -> Loop:
            self.loops[number] = loop
            self.found.pop(number, None)
            clean = PATIENTS[str(number)].get("clean", "x")
            with in_float32():
                self.wide[number] = self.meant[number] = self._observe(number, loop)
                if clean != "x":
                    self.meant[number] = self._observe(number, loop, clean)
            self.ill[number] = self._observe(number, loop)
            self._show(number, self.ill[number])
            return loop

        return run

    def _show(self, number: int | str, chart: Chart, other: str = "in float32") -> None:
        lost = other != "in float32" and PATIENTS[str(number)].get("astray")
        apart = None if lost else chart.distance(self.meant[number])
        whose = "this" if other == "in float32" else "the admitted"
        way = f"{whose} loop's way in float32"
        way += " on clean data" * ("clean" in PATIENTS[str(number)])
        print(_signs(chart, self.wide[number], apart, other, way))

    def judge(self, number: int | str, loop: Loop, signs: bool = False) -> None:
        """Raises AssertionError, with numbers, for a loop that is not healthy.

        With `signs`, its vital signs are printed first.
        """
        patient, self.seen = PATIENTS[str(number)], None
        self.seen = chart = self._observe(number, loop)
        if signs:
            self._show(number, chart, OLD)
        self._judge(number, chart)
        if chart.checks and "float16" in chart.outputs:
            self._strain(number, loop)
        if settings := patient.get("told"):  # a repair must not lean on one scale
            with told(**settings):
                again = self._observe(number, loop)
            said = " and ".join(f"{name}={value:,.0f}" for name, value in settings.items())
            self._judge(number, again, f"with a scaler of {said}, ")

    def _strain(self, number: int | str, loop: Loop) -> None:
        """Asks whether a loop in fp16 skips the steps whose gradients overflow."""
        with told(init_scale=HIGH):
            chart = self._observe(number, loop, counting=False)
        when = f"with a scaler of init_scale={HIGH:,.0f}, "
        assert not chart.blind, (
            f"{when}{chart.blind} of {len(chart.rates)} steps were taken with gradients that are "
            "inf or NaN; `scaler.step` would have skipped them"
        )
        assert chart.rates or chart.raised, f"{when}no step is taken: the scale never comes down"

    def _judge(self, number: int | str, chart: Chart, when: str = "") -> None:
        patient, meant = PATIENTS[str(number)], self.meant[number]
        assert not chart.raised, f"{when}batch {len(chart.losses) + 1} raised {chart.raised}"
        assert patient.get("compiled") or not chart.bare, (
            f"{when}{chart.bare} steps were taken in fp16 without a scaler: these gradients are "
            "large enough for that, the next network's are not (lesson 5)"
        )
        first, was, data = chart.losses[:1], meant.losses[:1], patient.get("data", "")
        same = first and abs(first[0] / was[0] - 1) < 0.08
        assert same or not math.isfinite(was[0]), (
            f"{when}the first loss is {(first or [math.nan])[0]:.2g}, and that of the admitted "
            f"loop in float32 {was[0]:.2g}{data}: this is another task"
        )
        shares = ("narrow", "learned", "needless", "formats", "slowest")
        known = {name: getattr(chart, name) for name in shares}
        known |= vars(chart) | {"distance": chart.distance(meant), "gap": chart.gap(meant)}
        for healthy in ("needless == 0", *patient["healthy"]):
            what, than, limit = healthy.split(" ", 2)
            value = eval(what, known)
            value = f"{value:.3g}" if isinstance(value, float) else value
            said = f"{when}{WORDS[what]} is {value}, and should be {THAN[than]}{eval(limit, known)}"
            said += data if what == "distance" else ""
            assert eval(healthy, known), said

    def repair(self, number: int | str) -> Callable[[Loop], None]:
        """A decorator that prints ✎, ✗ with the reason, or ✓ for a repair, and its vital signs."""

        def run(loop: Loop) -> None:
            lesson.check(lambda: self.judge(number, loop))
            if self.seen:  # not the stub
                self._show(number, self.seen, OLD)

        return run

    def consult(self, number: int | str) -> list[str]:
        """What the doctor says of an admitted loop."""
        if number not in self.found:
            self.found[number] = self.findings(self.loops[number])
        return self.found[number]

    def mended(self, number: int | str) -> Callable[[Loop], None]:
        """A decorator like `repair`, which also asks the doctor about the loop before and after."""

        def run(loop: Loop) -> None:
            lesson.check(lambda: self.judge(number, loop))
            print("the doctor, before:", ", ".join(self.consult(number)) or "no finding")
            print("            after: ", ", ".join(self.findings(loop)) or "no finding")

        return run

    def findings(self, loop: Loop, few: int = 3) -> list[str]:
        """What `amp_utils.doctor` says of the first few batches, notes left out."""
        torch.manual_seed(self.seed)
        net, few = self.network(), self.batches[:few]
        weights = copy.deepcopy(net.state_dict())
        with _quiet():
            with suppress(Exception):  # so that what a loop does to the network has been done
                list(loop(net, few))
            net.load_state_dict(weights)
            report = doctor.examine(lambda: list(loop(net, few)), net, steps=1)
        return list(dict.fromkeys(f.name for f in report.findings if f.severity != "note"))


BORDERS = [0.02, 0.125, 0.375, 0.625, 0.875]
WAYS = ["under 2% of", "under an eighth of", "a quarter of", "half", "three quarters of", "all of"]


def _signs(chart: Chart, wide: Chart, distance: float | None, other: str, meant: str) -> str:
    def course(losses: list[float], stopped: bool) -> str:
        shown = [losses[0], losses[len(losses) // 2], losses[-1]] if losses else []
        if stopped:
            return f"{losses[-1]:.2g}, then stopped" if losses else "none"
        return " → ".join(f"{loss:.2g}" for loss in shown) or "none"

    outputs, casts = "layers' outputs", f"{chart.casts} of weights"
    if chart.casts is None:
        outputs, casts = f"eager {outputs}", "not counted where code is compiled"
    way = "no measure: the admitted loop is ill in float32 too"
    if distance is not None and not chart.rates:
        way = "no measure: no step was taken"
    elif distance is not None:  # in coarse words, so that every machine says the same
        way = f"{WAYS[bisect(BORDERS, distance)]} {meant}"
    rows = {
        "loss": course(chart.losses, bool(chart.raised)),
        other: wide.raised or course(wide.losses, False),
        "steps taken": f"{len(chart.rates)} of {len(wide.rates)}",
        "in 16 bits": f"{chart.narrow:.0%} of the {outputs}",
        "weights kept in": " and ".join(sorted(chart.kept, reverse=True)),
        "casts by autocast": casts,
        "off course": "not finite" if chart.rates and distance == math.inf else way,
    }
    lines = [f"{name:<17}  {value}" for name, value in rows.items()]
    stop = f"stopped at batch {len(chart.losses) + 1}: {chart.raised}"
    return "\n".join([*textwrap.wrap(stop, 96), *lines] if chart.raised else lines)
