"""What is wrong with a training step? `examine` runs it, watches it, puts everything back, and says.

>>> net = torch.nn.Linear(4, 1)
>>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
>>> def step():
...     with torch.autocast("cpu", dtype=torch.float16):
...         loss = torch.nn.functional.mse_loss(net(torch.ones(8, 4)), torch.ones(8, 1))
...     loss.backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> [finding.name for finding in examine(step, net).findings]
['fp16 without a scaler']

Nothing is changed for good: parameters, buffers, gradients, random state, and the state of every optimizer,
scaler and scheduler that the step uses are as before, also where the step raises. What else a step consumes (a
data iterator, a log file) stays consumed. A finding rests on what was measured in these steps; what they did
not show is not found. `findings.toml` lists what can be found, and what to change.
"""

import copy
import html
import json
import math
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_utils import formats
from amp_utils.timing import synchronize
from amp_utils.watcher import Event, Log, Watcher

CATALOGUE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))
NARROW = {torch.float16: "fp16", torch.bfloat16: "bf16"}
MUCH = 0.01  # a share of lost values that is worth a word


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: `where` it is, and the `evidence`, numbers by name."""

    name: str
    where: str
    evidence: dict[str, Any]

    @property
    def severity(self) -> str:
        """error, warning or note."""
        return CATALOGUE[self.name]["severity"]

    @property
    def change(self) -> str:
        """What to change, in a sentence."""
        return CATALOGUE[self.name]["change"]

    @property
    def lesson(self) -> str:
        """The lesson of this course that explains it."""
        return CATALOGUE[self.name]["lesson"]


@dataclass
class Report:
    """Plain data, all of it measured.

    `products`: (module, dtype, FLOPs, calls) a step, forward and backward; `casts`: their count and bytes a step;
    `ranges`: per module and kind (activations, gradients) the shares that fp16, bf16 and e4m3 would lose or
    overflow, from a float32 run of the same step; `scale`: which loss scales save 99% of the gradients in fp16;
    `speed`: seconds of a step and of its products, and what 16 bits could gain at most (Amdahl).
    """

    precision: str
    findings: list[Finding] = field(default_factory=list)
    products: list[tuple[str, str, int, int]] = field(default_factory=list)
    casts: dict[str, int] = field(default_factory=dict)
    ranges: list[dict[str, Any]] = field(default_factory=list)
    scale: dict[str, float] = field(default_factory=dict)
    speed: dict[str, float] = field(default_factory=dict)
    advice: str = ""

    def to_json(self) -> str:
        """The report as JSON; inf and NaN become words."""
        plain = asdict(self)
        for row, finding in zip(plain["findings"], self.findings, strict=True):
            row |= CATALOGUE[finding.name] | {"raised": None}
        return json.dumps(_in_words(plain), indent=1)

    def __str__(self) -> str:
        lines = [
            f"{len(self.findings) or 'no'} finding{'s' * (len(self.findings) != 1)}, step in {self.precision}"
        ]
        for found in self.findings:
            lines += [
                f"{found.severity:<8} {found.name} ({found.where})",
                f"         {_listed(found.evidence)}" if found.evidence else "",
                f"         → {found.change} (lesson {found.lesson.partition('_')[0]})",
            ]
        for name in ("map", "range", "speed"):
            part = getattr(self, {"map": "casts", "range": "scale"}.get(name, name))
            lines += [f"{name:<8} {_listed(part)}"] if part else []
        return "\n".join(filter(None, [*lines, f"advice   {self.advice}"]))

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def examine(
    step: Callable[[], Any],
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    scaler: Any = None,
    steps: int = 3,
    precision: str | None = None,
) -> Report:
    """Run `step()`, a whole training step, `steps` times in its own precision and once in float32, and report.

    `optimizer` and `scaler` need only be given where the step may fail to use them; those it uses are found.
    `precision`, "fp16" or "bf16", is the one to advise on; by default the one that autocast takes in the step.
    Raises ValueError for a model without parameters, fewer than 1 step, or another precision. What the step
    raises becomes a finding; Ctrl-C passes through, with everything put back.
    """
    if not callable(step):
        raise ValueError(
            f"step = {step!r} is not allowed: give a function that runs one training step."
        )
    if not any(True for _ in model.parameters()):
        raise ValueError("model has no parameters: give the model that the step trains.")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps = {steps!r} is not allowed: give a whole number of at least 1.")
    if precision not in (None, "fp16", "bf16"):
        raise ValueError(f"precision = {precision!r} is not allowed: give 'fp16', 'bf16' or None.")
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    device = next(model.parameters()).device

    with _put_back(model, [*optimizers, *([scaler] if scaler is not None else [])]) as saved:
        log, error = _run(step, model, saved, steps)
        seconds = _timed(step, saved, device) if error is None else math.nan
        saved.restore()
        wide = _Ranges()
        log32, error32 = _run(step, model, saved, 1, fp32=True, on_output=wide.note)
    dtype = next((e.dtype for e in log.events if e.kind == "forward" and e.dtype), None)
    weights = Counter(p.dtype for p in model.parameters()).most_common(1)[0][0]
    if dtype is None and weights in NARROW:
        name = f"pure {NARROW[weights]}"
    else:
        name = NARROW.get(dtype, "fp32")
    report = Report(name)
    report.findings = list(
        _findings(log, error, log32, error32, wide, model, optimizers, scaler, dtype)
    )
    report.products = [
        (where, formats.of(kind).name, row.flops // log.calls, row.calls // log.calls)
        for (where, kind), row in log.products.items()
    ]
    _measure(report, log, log32, wide, seconds, weights)
    report.advice = _advice(report, wide, precision, error32)
    return report


class _Saved:
    """What a training step changes, copied before, and how to put it back."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self.gradients: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.plain: dict[int, tuple[Any, dict]] = {}
        self.optimizers: dict[int, tuple[Optimizer, dict, list]] = {}
        self.training = [(module, module.training) for module in model.modules()]
        self.cpu, self.cuda = torch.get_rng_state(), []
        if torch.cuda.is_available():
            self.cuda = torch.cuda.get_rng_state_all()
        self._keep([*model.parameters(), *model.buffers()])

    def _keep(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) not in self.tensors:
                gradient = tensor.grad
                self.tensors[id(tensor)] = tensor, tensor.detach().clone()
                self.gradients[id(tensor)] = (
                    gradient,
                    None if gradient is None else gradient.clone(),
                )

    def first(self, who: Any) -> None:
        """Copy an optimizer, scaler or scheduler, and an optimizer's parameters, before its first change."""
        if isinstance(who, Optimizer):
            if id(who) not in self.optimizers:
                self._keep(p for group in who.param_groups for p in group["params"])
                state = {p: copy.deepcopy(values) for p, values in who.state.items()}
                groups = [{**group, "params": list(group["params"])} for group in who.param_groups]
                self.optimizers[id(who)] = who, state, groups
        elif id(who) not in self.plain:
            kept = {
                n: v
                for n, v in vars(who).items()
                if not isinstance(v, Optimizer) and not callable(v)
            }
            self.plain[id(who)] = who, copy.deepcopy(kept)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; may be called again."""
        for tensor, value in self.tensors.values():
            tensor.copy_(value)
        for key, (gradient, value) in self.gradients.items():
            if gradient is not None:
                gradient.copy_(value)
            self.tensors[key][0].grad = gradient
        for optimizer, state, groups in self.optimizers.values():
            optimizer.state.clear()
            optimizer.state.update({p: copy.deepcopy(values) for p, values in state.items()})
            for group, kept in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(kept)
        for who, kept in self.plain.values():
            vars(who).update(copy.deepcopy(kept))
        for module, training in self.training:
            module.training = training
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


@contextmanager
def _put_back(model: nn.Module, others: list[Any]) -> Iterator[_Saved]:
    grad = torch.is_grad_enabled()
    saved = _Saved(model)
    for other in others:
        saved.first(other)
    try:
        yield saved
    finally:
        torch.set_grad_enabled(grad)
        saved.restore()


def _run(
    step: Callable, model: nn.Module, saved: _Saved, steps: int, **how: Any
) -> tuple[Log, Exception | None]:
    """Watch some steps from the saved state on; the exception that ended them, if one did."""
    with Watcher(model, before_first=saved.first, **how) as watcher:
        try:
            for _ in range(steps):
                watcher.begin()
                step()
        except Exception as error:  # a finding, whatever it is
            return watcher.log, error
    return watcher.log, None


def _timed(step: Callable, saved: _Saved, device: torch.device) -> float:
    """Seconds of a step that nobody watches: the median of three, from the saved state on."""
    seconds = []
    for _ in range(3):
        saved.restore()
        synchronize(device)
        start = perf_counter()
        step()
        synchronize(device)
        seconds.append(perf_counter() - start)
    return median(seconds)


class _Ranges:
    """Powers of two of the activations and their gradients, by module, in a float32 run."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], Counter[int]] = {}

    def note(self, name: str, output: Tensor) -> None:
        """Count an output now, and its gradient when it comes."""
        self._count((name, "activations"), output)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._count((name, "gradients"), gradient))

    def _count(self, key: tuple[str, str], tensor: Tensor) -> None:
        values = tensor.detach().float()
        _, exponents = torch.frexp(values[values.isfinite() & (values != 0)])
        powers, counts = (exponents - 1).unique(return_counts=True)
        found = self.counts.setdefault(key, Counter())
        found.update(dict(zip(powers.tolist(), counts.tolist(), strict=True)))

    def all(self, kind: str) -> Counter[int]:
        """The counts of all modules together."""
        return sum((c for (_, k), c in self.counts.items() if k == kind), Counter())


def _vanish(counts: Counter[int], fmt: formats.Format, shift: int = 0) -> float:
    """Share of the non-zero values that become zero in the format after multiplication by 2**shift."""
    below = (
        math.log2(fmt.smallest_subnormal) - 1
    )  # from half of the smallest number on they round to it
    return sum(n for e, n in counts.items() if e + shift < below) / max(1, counts.total())


def _overflow(counts: Counter[int], fmt: formats.Format, shift: int = 0) -> float:
    """Share of the values whose power of two lies above the format's, after multiplication by 2**shift."""
    top = math.floor(math.log2(fmt.max))
    return sum(n for e, n in counts.items() if e + shift > top) / max(1, counts.total())


def _findings(
    log: Log,
    error: Exception | None,
    log32: Log,
    error32: Exception | None,
    wide: _Ranges,
    model: nn.Module,
    optimizers: list[Optimizer],
    scaler: Any,
    dtype: torch.dtype | None,
) -> Iterator[Finding]:
    """All findings; those that end a step first."""
    events = log.events
    scaled = any(event.kind == "scale" and event.who.is_enabled() for event in events)
    if error is not None:
        said = str(error)
        known = (name for name, entry in CATALOGUE.items() if entry.get("raised", "\0") in said)
        evidence = {type(error).__name__: said.strip().partition("\n")[0][:120]}
        yield Finding(next(known, "the step raised"), f"call {log.calls} of the step", evidence)
    yield from _of_values(log, log32, error32, model)
    yield from _of_order(events, scaled)
    yield from _of_optimizers(events, model, optimizers, scaled)

    if scaled and dtype == torch.bfloat16:
        yield Finding("scaler with bf16", "the scaler", {})
    off = scaler is not None and not scaler.is_enabled()
    off = off or any(e.kind == "scale" and not e.who.is_enabled() for e in events)
    if dtype == torch.float16 and off:
        yield Finding("scaler is switched off", "the scaler", {})
    gradients = wide.all("gradients")
    lost = _vanish(gradients, formats.FP16)
    trains = any(event.kind == "backward" for event in events)
    if dtype == torch.float16 and not scaled and not off and trains:
        yield Finding("fp16 without a scaler", "the loss", {"gradients that fp16 would lose": lost})
    if log.scales and log.scales[-1] < 2.0**-10:
        yield Finding("scale near zero", "the scaler", {"scale": log.scales[-1]})

    for idle, share in _still(log):
        if share > 0.5:
            yield Finding("updates are lost", "the weights", {f"{idle} weights that stay": share})
    averages = [u for u in log.idle_updates if u[2] > 0.5]
    if averages:
        op, kind, share = max(averages, key=lambda u: u[2])
        where = f"{op} on {NARROW[kind]} tensors outside of the optimizer"
        yield Finding("moving average stands still", where, {"values that stay": share})
    for where, kind, largest in dict((a[0], a) for a in log.angles).values():
        evidence = {
            f"largest in {NARROW[kind]}": largest,
            "spacing there": formats.of(kind).ulp(largest),
        }
        yield Finding("positions in 16 bits", where, evidence)
    repeated = [c for c in log.casts.values() if c.count > 1 and c.of_parameter]
    if repeated:
        most = max(repeated, key=lambda c: c.count * c.nbytes)
        evidence = {"casts": sum(c.count for c in repeated), "of weights": len(repeated)}
        yield Finding("weights are cast again and again", most.module, evidence)
    narrow = [(w, row) for (w, kind), row in log.products.items() if kind in NARROW]
    flops, crooked = (sum(getattr(row, n) for _, row in narrow) for n in ("flops", "misaligned"))
    if crooked > flops / 4:
        where = max(narrow, key=lambda pair: pair[1].misaligned)[0]
        yield Finding(
            "sizes are not multiples of 8", where, {"share of the FLOPs": crooked / flops}
        )
    if log.reads > 2 * log.calls:
        yield Finding(
            "Python waits for values", "the loop", {"reads a step": log.reads / log.calls}
        )


def _of_values(
    log: Log, log32: Log, error32: Exception | None, model: nn.Module
) -> Iterator[Finding]:
    """Infinities and NaN in the forward pass, and whose they are."""
    if log.bad_inputs:
        yield Finding(
            "input is not finite", "what the model is given", {"steps": len(log.bad_inputs)}
        )
    elif log32.not_finite:
        yield Finding("not finite in float32 either", log32.not_finite[0], {})
    elif log.not_finite:
        yield Finding("activation overflows", log.not_finite[0], {})


def _of_order(events: list[Event], scaled: bool) -> Iterator[Finding]:
    """What happened at the wrong time."""
    found: Counter[tuple[str, str]] = Counter()
    unscaled: set[int] = set()
    dirty = False  # gradients of a scaled loss have come since the last unscale_
    stepped_in: set[int | None] = set()
    skipped = stepped = False
    for before, event in zip([None, *events], events, strict=False):
        if event.kind == "backward":
            if unscaled and scaled:
                found["unscale_ inside accumulation", "the scaler"] += 1
            dirty = True
            if event.dtype is not None:
                found["backward inside autocast", "the loss"] += 1
        elif event.kind == "unscale":
            unscaled.add(id(event.who))
        elif event.kind == "clip" and scaled and dirty and not unscaled:
            found["clip before unscale_", "the gradients"] += 1
        elif event.kind == "scaler_step":
            skipped = True
        elif event.kind == "optimizer":
            stepped_in.add(event.region)
            skipped, stepped = False, True
        elif event.kind == "update":
            unscaled.clear()
            dirty = False
        elif event.kind == "scheduler" and skipped:
            found["scheduler on a skipped step", type(event.who).__name__] += 1
        elif event.kind == "forward" and event.region in stepped_in - {None}:
            found["stale casts", "one autocast region around several steps"] += 1
    if scaled and stepped and not any(e.kind == "update" for e in events):
        found["update is missing", "the scaler"] += 1
    for (name, where), times in found.items():
        yield Finding(name, where, {"times": times})


def _of_optimizers(
    events: list[Event], model: nn.Module, given: list[Optimizer], scaled: bool
) -> Iterator[Finding]:
    """Optimizers that hold the wrong parameters, or whose eps is nothing."""
    seen = {id(e.who): e.who for e in events if e.kind in ("optimizer", "scaler_step")}
    seen = seen or {id(optimizer): optimizer for optimizer in given}
    own = {id(p) for p in model.parameters()}
    held = {
        key: [p for group in optimizer.param_groups for p in group["params"]]
        for key, optimizer in seen.items()
    }
    if seen and not any(id(p) in own for parameters in held.values() for p in parameters):
        evidence = {"parameters in common": 0}
        yield Finding(
            "optimizer holds other parameters", type(next(iter(seen.values()))).__name__, evidence
        )
    for key, optimizer in seen.items():
        for group in optimizer.param_groups:
            for kind in {p.dtype for p in group["params"]} & set(NARROW):
                if group.get("eps") and torch.tensor(group["eps"], dtype=kind) == 0:
                    where = f"{type(optimizer).__name__} on {NARROW[kind]} weights"
                    yield Finding("eps is zero", where, {"eps": group["eps"]})


def _still(log: Log) -> list[tuple[str, float]]:
    """Share of the weights that should have moved and did not, by dtype, of the worst optimizer."""
    worst: dict[torch.dtype, float] = {}
    for shares in log.still.values():
        for kind, share in shares.items():
            worst[kind] = max(worst.get(kind, 0.0), share)
    return [(formats.of(kind).name, share) for kind, share in worst.items()]


def _measure(
    report: Report, log: Log, log32: Log, wide: _Ranges, seconds: float, weights: torch.dtype
) -> None:
    """Fill in the report's tables."""
    total = sum(row.flops for row in log.products.values()) or 1
    narrow = sum(row.flops for (_, kind), row in log.products.items() if kind in NARROW)
    report.casts = {
        "share of FLOPs in 16 bits": narrow / total,
        "FLOPs": total // log.calls,
        "casts": sum(c.count for c in log.casts.values()) // log.calls,
        "bytes of casts": sum(c.count * c.nbytes for c in log.casts.values()) // log.calls,
    }
    for (name, kind), counts in wide.counts.items():
        row: dict[str, Any] = {"module": name, "kind": kind, "largest": max(counts, default=0)}
        for fmt in (formats.FP16, formats.BF16):
            row |= {
                f"{fmt.name} vanish": _vanish(counts, fmt),
                f"{fmt.name} overflow": _overflow(counts, fmt),
            }
        best = math.floor(math.log2(formats.E4M3FN.max)) - max(counts, default=0)
        report.ranges.append(
            row | {"e4m3fn vanish, best scale": _vanish(counts, formats.E4M3FN, best)}
        )
    gradients = wide.all("gradients")
    if gradients:
        save = next((s for s in range(64) if _vanish(gradients, formats.FP16, s) <= MUCH), None)
        report.scale = {
            "gradients lost by fp16 unscaled": _vanish(gradients, formats.FP16),
            "smallest scale that saves 99%": math.inf if save is None else 2.0**save,
            "largest scale without inf": 2.0 ** (15 - max(gradients)),
        }
    taken, taken32 = (
        sum(row.seconds for row in one.products.values()) / max(1, one.calls)
        for one in (log, log32)
    )
    if math.isfinite(seconds) and taken32:
        report.speed = {
            "seconds a step": seconds,
            "of which products": min(1.0, taken / seconds),
            "products, float32 / now": taken32 / max(taken, 1e-9),
        }


def _advice(report: Report, wide: _Ranges, precision: str | None, error32: Exception | None) -> str:
    """Which precision, for the range that was measured."""
    if error32 is not None or not wide.counts:
        return "could not tell: the step does not run in float32 here."
    everything = wide.all("activations") + wide.all("gradients")
    too_large = _overflow(wide.all("activations"), formats.FP16)
    needed = report.scale.get("smallest scale that saves 99%", 1.0)
    most = report.scale.get("largest scale without inf", math.inf)
    bf16 = _vanish(everything, formats.BF16) + _overflow(everything, formats.BF16)
    wanted = precision or report.precision
    if too_large or needed > most:
        fp16 = (
            f"fp16 would overflow in {too_large:.2%} of the activations"
            if too_large
            else (f"no one scale would do in fp16: {needed:g} needed, {most:g} possible")
        )
        return f"bf16 or float32: {fp16}; bf16 would lose {bf16:.2%}."
    scaler = "with a scaler" if needed > 1 else "even without a scaler in these steps"
    if wanted == "fp16":
        return f"fp16 {scaler}: scales from {needed:g} to {most:g} would do; bf16 needs none."
    return f"bf16 without a scaler; fp16 would do {scaler} ({needed:g} to {most:g})."


def _in_words(value: Any) -> Any:
    """JSON has no inf and no NaN."""
    if isinstance(value, dict):
        return {name: _in_words(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_words(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _listed(facts: dict[str, Any]) -> str:
    shown = ((n, f"{v:.3g}" if isinstance(v, float) else str(v)) for n, v in facts.items())
    return ", ".join(f"{name}: {value}" for name, value in shown)


def main(arguments: list[str]) -> int:
    """`python -m amp_utils.doctor train:make_step`: examine what make_step() returns, (step, model, …)."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        print(
            "Give MODULE:FUNCTION; the function returns the arguments of examine.", file=sys.stderr
        )
        return 2
    module, _, function = arguments[0].partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        print(f"{arguments[0]} cannot be imported: {error}.", file=sys.stderr)
        return 2
    made = make()
    report = examine(**made) if isinstance(made, dict) else examine(*made)
    print(report)
    return int(any(finding.severity == "error" for finding in report.findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
