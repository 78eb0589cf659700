"""What is wrong with a training step? `examine` runs it, watches it, undoes it, and says.

>>> net = torch.nn.Linear(8, 8)
>>> optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
>>> def step():
...     with torch.autocast("cpu", dtype=torch.float16):
...         loss = net(torch.ones(8, 8)).square().mean()
...     loss.backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> [finding.name for finding in examine(step, net).findings]
['fp16 without a scaler']

Parameters, buffers, gradients, random state, and the state of every optimizer, scaler, scheduler
and module that the step uses are afterwards as before, also where the step raises. Not undone: a
data iterator that moved on, a file that was written, generators of your own, and what the step
assigns (`p.data = …`) to a module that it never calls; to include such modules, give as `model`
an `nn.ModuleList` of all.

A finding rests on what was measured in these steps; what they did not show is not found. Compiled
models run eagerly, what is not a `torch.optim.Optimizer` is not seen, under DDP every rank must
call `examine`. `findings.toml` lists all that can be found, and what to change.
"""

import html
import json
import math
import re
import sys
import tomllib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from amp_utils import formats, gradients, timing
from amp_utils.lesson import choice, validate, whole
from amp_utils.watcher import NARROW, Log, Saved, Watcher

CATALOGUE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))
MUCH = 0.01  # a share of lost values that is worth a word
SAMPLE = 2048  # values of a tensor that are looked at
SHOWN = 8  # rows of a table that are printed; the JSON has all


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where it is, the measured evidence, and what to change."""

    name: str
    where: str
    evidence: dict[str, Any]
    severity: str  # error, warning or note
    change: str
    lesson: str


@dataclass
class Report:
    """Plain data, all of it measured; tables are lists of rows.

    `map`: calls, FLOPs and bytes of casts by module, phase, op and dtype. `ranges`: shares that a
    format would lose or overflow, from a sample of each tensor in a float32 run of the same step.
    `scale`: what fp16 gradients need. `updates`: shares of 16-bit values that stayed although
    float32 would have moved them. `speed`: seconds and ratios, of CPU time on a CPU.
    """

    precision: str
    findings: list[Finding] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    scale: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, Any] = field(default_factory=dict)
    advice: str = ""
    map: list[dict[str, Any]] = field(default_factory=list)
    ranges: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        """The report as JSON; inf and NaN become words."""
        in_words = json.loads(json.dumps(asdict(self)), parse_constant=str)
        return json.dumps(in_words, indent=1)

    def __str__(self) -> str:
        count = len(self.findings)
        lines = [f"{count or 'no'} finding{'s' * (count != 1)}, step in {self.precision}"]
        for found in self.findings:
            lines += [f"{found.severity:<8} {found.name} ({found.where})"]
            lines += [f"         {_listed(found.evidence)}"] if found.evidence else []
            lines += [f"         → {found.change} (lesson {found.lesson.partition('_')[0]})"]
        for name, facts in (("map", self.summary), ("scale", self.scale), ("speed", self.speed)):
            lines += [f"{name:<8} {_listed(facts)}"] if facts else []
        lines += [f"advice   {self.advice}"]
        for name in ("map", "ranges", "updates"):
            rows = getattr(self, name)
            lines += ["", f"{name}, {min(len(rows), SHOWN)} of {len(rows)} rows"] if rows else []
            lines += _table(rows[:SHOWN])
        return "\n".join(lines)

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
    """Run `step()`, a whole training step, watched and unwatched and once in float32, and report.

    `optimizer` and `scaler` need only be given where the step may fail to use them. `precision`,
    "fp16" or "bf16", is the one to advise on; by default the step's own. Raises ParameterError for
    wrong arguments. What the step raises becomes a finding; Ctrl-C passes through.
    """
    validate(
        {"step": step, "model": model, "steps": steps, "precision": precision},
        step=(callable, "a function that runs one training step"),
        model=(_has_parameters, "the nn.Module with parameters that the step trains"),
        steps=whole(1),
        precision=choice("fp16", "bf16", None),
    )
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    device, saved, wide = next(model.parameters()).device, Saved(model), _Ranges()
    weights = Counter(p.dtype for p in model.parameters()).most_common(1)[0][0]
    try:
        for known in [*given, *([] if scaler is None else [scaler])]:
            saved.keep_object(known)
        log, error = _run(step, Watcher(model, saved), steps)
        saved.restore()
        plain = None
        with suppress(Exception):  # if only the unwatched step raises, its speed stays unknown
            plain = error or timing.compare({"step": step}, max(3, steps), 0, device)["step"]
        saved.restore()
        log32, error32 = Log(), None
        if weights not in NARROW:
            log32, error32 = _run(step, Watcher(model, saved, True, wide.look), 1)
    finally:
        saved.restore()

    flops = Counter(dict.fromkeys(NARROW, 0))
    for (*_, dtype), op in log.ops.items():
        flops[dtype] += op.flops
    used = max(NARROW, key=flops.get)
    narrow = used if flops[used] else None
    pure = weights in NARROW
    report = Report("pure " * pure + formats.of(weights if pure else narrow or weights).name)
    report.map, report.ranges, report.updates = _map(log), wide.rows(), _updates(log)
    report.scale = wide.scale()
    report.summary = {
        "share of FLOPs in 16 bits": sum(map(flops.get, NARROW)) / max(1, flops.total()),
        "casts a step": sum(row["calls"] for row in report.map if "cast" in row["op"]),
        "bytes of casts": sum(row["nbytes"] for row in report.map),
        "casts of weights again": sum(row["repeats"] for row in report.map),
    }
    report.findings = list(_of_error(log, error, error32))
    if narrow is None and not pure and (precision is not None or _scaled(log)):
        report.findings.append(_finding("no products in 16 bits", "the step"))
    others = (
        *_of_values(log, log32, report.scale, narrow, scaler),
        *_of_order(log),
        *_of_optimizers(log, model, [] if error else given, report.updates),
        *_of_speed(log),
    )
    told = {found.name for found in report.findings}
    report.findings += [found for found in others if found.name not in told]
    kind = formats.of(precision or narrow or torch.bfloat16)
    if isinstance(plain, timing.Timing) and log.sample:
        report.speed = _speed(log, plain, device, kind, narrow is not None)
    report.advice = _advice(report, kind)
    return report


def _has_parameters(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(True for _ in model.parameters())


def _run(step: Callable, watcher: Watcher, steps: int) -> tuple[Log, Exception | None]:
    """What was seen, and the exception that ended it."""
    with watcher:
        try:
            for _ in range(steps):
                watcher.begin()
                step()
        except Exception as error:  # a finding, whatever it is
            return watcher.log, error
    return watcher.log, None


def _finding(name: str, where: str, severity: str = "", **evidence: Any) -> Finding:
    entry = CATALOGUE[name]
    told = {key.replace("_", " "): value for key, value in evidence.items()}
    severity = severity or entry["severity"]
    return Finding(name, where, told, severity, entry["change"], entry["lesson"])


class _Ranges:
    """A sample of the values in a float32 run, by module and kind, and their largest."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, str], list[Tensor]] = {}
        self.largest: dict[tuple[str, str], float] = {}

    def look(self, module: str, kind: str, tensor: Tensor) -> None:
        """Take in a tensor."""
        key, values = (module or "model", kind), tensor.detach().flatten()
        if len(values):
            sample = values[:: -(-len(values) // SAMPLE)].clone()
            self.samples.setdefault(key, []).append(sample)
            self.largest[key] = max(
                self.largest.get(key, 0.0), values.abs().nan_to_num(math.inf).max().item()
            )

    def rows(self) -> list[dict[str, Any]]:
        """A row per module and kind; those that fp16 would hurt most come first."""
        rows = []
        for (module, kind), values in self.samples.items():
            row = {"module": module, "kind": kind, "largest": self.largest[module, kind]}
            for name in ("fp16", "bf16"):
                row[f"{name} loses"] = gradients.lost(values, name)
                row[f"{name} overflows"] = gradients.overflowed(values, name)
            best = formats.E4M3FN.max / row["largest"] if row["largest"] else 1.0
            best = 2.0 ** math.floor(math.log2(best)) if 0 < best < math.inf else 1.0
            rows.append(row | {"e4m3 loses": gradients.lost(values, "e4m3fn", best), "at": best})
        return sorted(rows, key=lambda row: -row["fp16 loses"] - row["fp16 overflows"])

    def scale(self) -> dict[str, Any]:
        """Which loss scales save the gradients in fp16; empty where there are none."""
        values = [v for (_, kind), vs in self.samples.items() if "grad" in kind for v in vs]
        largest = max((v for (_, kind), v in self.largest.items() if "grad" in kind), default=0)
        if not values:
            return {}

        def saves(power: int) -> bool:
            return gradients.lost(values, "fp16", 2.0**power) <= MUCH

        return {
            "gradients lost by fp16 unscaled": gradients.lost(values),
            "smallest scale that saves 99%": 2.0 ** bisect_left(range(64), True, key=saves),
            "largest scale without inf": formats.FP16.max / largest if largest else math.inf,
        }


def _of_error(log: Log, error: Exception | None, error32: Exception | None) -> Iterator[Finding]:
    if error is not None:
        said = str(error).strip()
        known = (n for n, e in CATALOGUE.items() if "raised" in e and re.search(e["raised"], said))
        where = f"call {len(log.seconds)} of the step"
        name = "the step raised" if error32 else next(known, "the step raised")
        yield _finding(name, where, **{type(error).__name__: said.partition("\n")[0][:120]})


def _of_values(
    log: Log, log32: Log, scale: dict[str, Any], narrow: torch.dtype | None, scaler: Any
) -> Iterator[Finding]:
    """What does not fit its format, and whether a scaler helps."""
    kinds = {event.kind for event in log.events}
    scaled, off = _scaled(log), scaler is not None and not scaler.is_enabled()
    off = off or not scaled and "scale" in kinds
    allowed = scale.get("largest scale without inf", math.nan)  # 0 if a gradient is infinite
    if log.bad_inputs:
        yield _finding("input is not finite", "what the model is given", calls=log.bad_inputs)
    elif log32.not_finite or scale and not allowed > 0:
        where = [*log32.not_finite, "the gradients"][0]
        yield _finding("not finite in float32 either", where)
    elif log.not_finite:
        count = len(set(log.not_finite))
        yield _finding("activation overflows", log.not_finite[0], modules=count)
    elif scaled and "step" in kinds and "optimizer" not in kinds and log.scales:
        if log.scales[0] < allowed / 2:
            evidence = {"scale": log.scales[0], "float32_allows": allowed}
            yield _finding("every step is skipped", "the scaler", **evidence)
    if scaled and narrow == torch.bfloat16:
        yield _finding("scaler with bf16", "the scaler")
    if narrow == torch.float16 and not scaled and "backward" in kinds:
        share = scale.get("gradients lost by fp16 unscaled", math.nan)
        name = "scaler is switched off" if off else "fp16 without a scaler"
        severity = "warning" if share <= MUCH else ""
        yield _finding(name, "the loss", severity, gradients_that_fp16_would_lose=share)
    if log.scales and log.scales[-1] < 2.0**-10:
        yield _finding("scale near zero", "the scaler", scale=log.scales[-1])
    for (where, dtype), largest in log.angles.items():
        spacing = formats.of(dtype).ulp(largest)
        yield _finding("positions in 16 bits", where, largest=largest, spacing_there=spacing)


def _scaled(log: Log) -> bool:
    return any(event.kind == "scale" and event.who.is_enabled() for event in log.events)


def _of_order(log: Log) -> Iterator[Finding]:
    """What happened at the wrong time."""
    found: Counter[tuple[str, str]] = Counter()
    scaled, kinds = _scaled(log), {event.kind for event in log.events}
    raw = skipped = False  # scaled gradients wait for unscale_; the last step was skipped
    unscaled, done = set(), set()  # optimizers, since update and since backward
    stepped = set()  # autocast regions in which an optimizer stepped
    for event in log.events:
        who = type(event.who).__name__
        if event.kind == "forward":
            stale = event.dtype is not None and event.region in stepped
            found["stale casts", "one autocast region around several steps"] += stale
        elif event.kind == "backward":
            found["unscale_ inside accumulation", "the scaler"] += scaled and bool(unscaled)
            found["backward inside autocast", "the loss"] += event.dtype is not None
            raw, done = True, set()
        elif event.kind == "unscale_":
            unscaled.add(event.who)
        elif event.kind == "clip":
            found["clip before unscale_", "the gradients"] += scaled and raw and not unscaled
        elif event.kind == "step":
            skipped = True
            done.add(event.who)
        elif event.kind == "optimizer":
            past = not event.by_scaler and (raw and event.who not in unscaled or event.who in done)
            found["step past the scaler", who] += scaled and past
            skipped = False
            stepped |= {event.region} - {None}
        elif event.kind == "update":
            raw, unscaled = False, set()
        elif event.kind == "scheduler":
            found["scheduler on a skipped step", who] += skipped
    missing = scaled and "step" in kinds and "update" not in kinds
    found["update is missing", "the scaler"] += missing
    yield from (_finding(*key, times=times) for key, times in found.items() if times)


def _of_optimizers(
    log: Log, model: nn.Module, given: list[Optimizer], updates: list[dict]
) -> Iterator[Finding]:
    """Optimizers that hold the wrong parameters, and updates that do nothing."""
    stepped = {event.who for event in log.events if event.kind in ("optimizer", "step")}
    held = {o: [p for g in o.param_groups for p in g["params"]] for o in stepped or given}
    own = {id(p) for p in model.parameters()}
    if held and own.isdisjoint(id(p) for parameters in held.values() for p in parameters):
        yield _finding("optimizer holds other parameters", type(next(iter(held))).__name__)
    for optimizer in {*given} - stepped:
        count = len(log.seconds)
        yield _finding("optimizer never steps", type(optimizer).__name__, steps=count)
    for optimizer, parameters in held.items():
        for dtype in {p.dtype for p in parameters} & {*NARROW}:
            eps = optimizer.defaults.get("eps")
            if eps and torch.tensor(eps, dtype=dtype) == 0:
                where = f"{type(optimizer).__name__} on {formats.of(dtype).name} weights"
                yield _finding("eps is zero", where, eps=eps)
    for row in updates:
        if row["stay"] > 0.5:
            by_loop = row["by"] == "the loop"
            name = "moving average stands still" if by_loop else "updates are lost"
            where = f"{row['by']}'s {row['op']} on {row['dtype']}"
            yield _finding(name, where, share_that_stays=row["stay"], values=row["due"])


def _of_speed(log: Log) -> Iterator[Finding]:
    """What slows a step down, apart from what the clock says."""
    repeated, crooked, flops = Counter(), Counter(), 0
    for (module, *_, dtype), op in log.ops.items():
        repeated[module] += op.repeats
        if dtype in NARROW:
            crooked[module] += op.misaligned
            flops += op.flops
    if repeated.total():
        where = repeated.most_common(1)[0][0]
        yield _finding("weights are cast again and again", where, casts=repeated.total())
    if crooked.total() > flops / 4:
        where, share = crooked.most_common(1)[0][0], crooked.total() / flops
        yield _finding("sizes are not multiples of 8", where, share_of_the_FLOPs=share)
    reads = log.reads / len(log.seconds)
    if reads > 2:
        yield _finding("Python waits for values", "the loop", reads_a_step=reads)


def _map(log: Log) -> list[dict[str, Any]]:
    """A row per module, phase, op and dtype, a step; the most FLOPs come first."""
    rows = []
    for (module, phase, name, dtype), op in log.ops.items():
        row = {"module": module, "phase": phase, "op": name, "dtype": str(dtype)[6:]}
        rows.append(row | {n: total // len(log.seconds) for n, total in asdict(op).items()})
    return sorted(rows, key=lambda row: (-row["flops"], -row["nbytes"]))


def _updates(log: Log) -> list[dict[str, Any]]:
    return [
        {"by": by, "op": op, "dtype": str(dtype)[6:], "due": n, "stay": log.stayed[key] / n}
        for key, n in log.due.items()
        for by, op, dtype in [key]
        if n
    ]


def _speed(
    log: Log, step: timing.Timing, device: torch.device, kind: formats.Format, narrow: bool
) -> dict[str, Any]:
    """The share of products in a step, and what 16 bits could gain at most (Amdahl's law)."""
    flops, func, shapes = log.sample

    def product(dtype: torch.dtype) -> Callable[[], Any]:
        def filled(t: Tensor) -> Tensor:
            return torch.full(t.shape, 0.5, device=device, dtype=dtype)  # draws no random numbers

        args, kwargs = tree_map_only(Tensor, filled, shapes)
        return lambda: func(*args, **kwargs)

    with torch.no_grad():
        pair = {"wide": product(torch.float32), "narrow": product(kind.dtype)}
        taken = list(timing.compare(pair, 5, 1, device, patience=0.5).values())
    if device.type == "cpu":  # CPU time does not mind what else runs on the machine
        step, *taken = [timing.Timing(t.cpu_seconds) for t in (step, *taken)]
    faster, spread = timing.ratio(*taken)
    shares = [min(0.99, seconds["products"] / step.median) for seconds in log.seconds]
    low, high = max(0.01, faster - spread / 2), faster + spread / 2
    gains = [
        1 - p + p * s if narrow else 1 / (1 - p + p / s)
        for p in (median(shares), min(shares), max(shares))
        for s in (faster, low, high)
    ]
    return {
        "seconds a step": step.median,
        "products": median(shares),
        "casts": median(seconds["casts"] for seconds in log.seconds) / step.median,
        "FLOPs of a typical product": flops,
        f"{kind.name} is faster there": faster,
        "±": spread / 2,
        "most gain of a step": gains[0],
        "from": min(gains),
        "to": max(gains),
        "TF32": device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32",
    }


def _advice(report: Report, kind: formats.Format) -> str:
    """Which precision, and the measured reasons, in the catalogue's words."""
    words, speed, name = CATALOGUE["advice"], report.speed, kind.name
    if report.precision.startswith("pure"):
        return words["pure"].format(report.precision[5:])
    if not report.ranges:
        return words["unknown"]
    activations = [row for row in report.ranges if row["kind"] == "activations"]
    top = max((row["largest"] for row in activations), default=0.0)
    needed, most = [1.0, math.inf, *report.scale.values()][-2:]
    lost = max(row["bf16 loses"] + row["bf16 overflows"] for row in report.ranges)
    facts = {"top": top, "needed": needed, "most": most, "lost": lost, "name": name}
    ill = "overflow" if top > formats.FP16.max else "torn" if needed > most else ""
    reasons = [words[ill or "fits"]]
    pick = "fp16 with a scaler" if kind is formats.FP16 and not ill else "bf16 without a scaler"
    if speed:
        facts |= {"faster": speed[f"{name} is faster there"], "casts": speed["casts"]}
        facts |= {key: speed[key] for key in ("from", "to")} | {
            "gain": speed["most gain of a step"]
        }
        if speed["to"] < 1.1:
            pick = "TF32, which is on" if speed["TF32"] else "float32"
            reasons.append(words["no gain"])
        slow = {"casts": speed["casts"] > 0.1, "products": speed["products"] < 0.3}
        slow |= {"small": speed["FLOPs of a typical product"] < 1e7}
        reasons = [words["speed"], *(words[key] for key, is_so in slow.items() if is_so), *reasons]
    return f"{pick}: {'; '.join(reasons)}.".format(**facts)


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_shown(value)}" for name, value in facts.items())


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    told = [name for name in rows[0] if any(row[name] for row in rows)]  # the rest is 0
    cells = [told, *([_shown(row[name]) for name in told] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells]


@click.command()
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(target: str, as_json: bool) -> None:
    """Examine what FUNCTION() returns: the arguments of `examine`, as a tuple or by name.

    Exit status 1 where a finding is an error, 2 for wrong usage.
    """
    sys.path.insert(0, "")
    module, _, function = target.partition(":")
    try:
        made = getattr(import_module(module), function)()
        report = examine(**made) if isinstance(made, dict) else examine(*made)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{target}: {error}") from None
    click.echo(report.to_json() if as_json else report)
    sys.exit(any(found.severity == "error" for found in report.findings))


if __name__ == "__main__":
    command()
