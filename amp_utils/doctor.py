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
call `examine`. `findings.toml` lists all that can be found: when, on what evidence, and what to
change.
"""

import html
import json
import math
import re
import sys
import tomllib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from operator import itemgetter
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
from amp_utils.watcher import NARROW, Saved, Watcher

CATALOGUE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))
ADVICE = CATALOGUE.pop("advice")
SEVERITIES = ("error", "warning", "note")
COLUMNS = ("calls", "flops", "misaligned", "nbytes", "repeats")  # of the map
SAMPLE = 2048  # values of a tensor that are looked at
SHOWN = 8  # rows of a table that are printed; the JSON has all
WORTH = 1e8  # FLOPs of a step whose speed is worth a finding
LARGE = {"cpu": 256, "cuda": 4096}  # rows and columns of a product that fills matrix units


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, where it is, the measured evidence, and what to change."""

    name: str
    where: str
    evidence: dict[str, Any]
    severity: str  # one of SEVERITIES
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
    saved, values = Saved(model, scaler, *given), _Values()
    seen, wide = Watcher(model, saved), Watcher(model, saved, values.look)
    weights = Counter(p.dtype for p in model.parameters()).most_common(1)[0][0]
    plain = error32 = None
    try:
        error = seen.watch(step, steps)
        saved.restore()
        with suppress(Exception):  # if only the unwatched step raises, its speed stays unknown
            plain = error or timing.compare({"": step}, max(3, steps), 0, seen.device)[""]
        saved.restore()
        if weights not in NARROW:
            error32 = wide.watch(step, 1)
    finally:
        saved.restore()

    ops = {dtype: Counter() for dtype in [*NARROW, *(key[-1] for key in seen.ops)]}
    for (*_, dtype), op in seen.ops.items():
        ops[dtype].update(op)
    everything, small = sum(ops.values(), Counter()), ops[torch.float16] + ops[torch.bfloat16]
    used = max(NARROW, key=lambda dtype: ops[dtype]["flops"])
    own, narrow = formats.of(weights).name, formats.of(used).name if small["flops"] else ""
    pure, kind = own if weights in NARROW else "", formats.of(precision or narrow or "bf16")
    report = Report(f"pure {own}" if pure else narrow or own)
    report.map, report.ranges, report.scale = _map(seen), values.rows(), values.scale()
    report.updates = [
        {"by": by, "op": op, "dtype": str(dtype)[6:], "due": n["due"], "stay": n["stay"] / n["due"]}
        for (by, op, dtype), n in seen.updates.items()
        if n["due"]
    ]
    times = len(seen.seconds)
    report.summary = {
        "share of FLOPs in 16 bits": small["flops"] / max(1, everything["flops"]),
        "of them in sizes not multiples of 8": small["misaligned"] / max(1, small["flops"]),
        "casts a step": everything["casts"] / times,
        "bytes of casts": everything["nbytes"] / times,
        "casts of weights again": everything["repeats"] / times,
    }
    judged = bool(narrow) and everything["flops"] >= WORTH * times
    if isinstance(plain, timing.Timing) and seen.sample:
        report.speed = _speed(seen, plain, kind, bool(narrow), judged)

    top = max((row["largest"] for row in report.ranges if row["kind"] == "activations"), default=0)
    bf16 = max((row["bf16 loses"] + row["bf16 overflows"] for row in report.ranges), default=0)
    lost, needed, allowed = report.scale.values() or (math.nan, 1.0, math.nan)
    facts = vars(seen) | vars(report) | report.speed
    facts |= {"narrow": narrow, "pure": pure, "format": kind.name, "asked": precision}
    facts |= {"lost": lost, "needed": needed, "allowed": allowed, "largest": top}
    facts |= {"fits": top <= formats.FP16.max and not needed > allowed, "bf16_loses": bf16}
    facts |= {"gains": report.speed.get("high", 2) >= 1.1, "judged": judged and report.speed}
    facts |= {"off": scaler is not None and not scaler.is_enabled(), "wild32": wide.wild}
    facts |= {"optimizers": _optimizers(seen, model, given), "angles": seen.angles.values()}
    report.findings, report.advice = _findings(facts, error, error32), _advice(facts)
    return report


def _has_parameters(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(True for _ in model.parameters())


def _advice(facts: dict[str, Any]) -> str:
    """Which precision, and the measured reasons, in the catalogue's words."""
    what, *why = [rule["say"].format(**facts) for rule in ADVICE if eval(rule["when"], facts)]
    return f"{what}: {'; '.join(why)}."


def _findings(
    facts: dict[str, Any], error: Exception | None, error32: Exception | None
) -> list[Finding]:
    """What of the catalogue is the case, once in each place, the worst first."""
    found: dict[tuple[str, str], Finding] = {}
    worst = {column: max(facts["map"], key=itemgetter(column), default={}) for column in COLUMNS}
    facts |= {"finished": error is None, "worst": worst}
    facts["trace"], raised = "".join(letter for letter, _ in facts["trace"]), ""

    def add(name: str, where: str, evidence: dict[str, Any], severity: str = "") -> None:
        rule = CATALOGUE[name]
        words = severity or rule["severity"], rule["change"], rule["lesson"]
        found.setdefault((name, where), Finding(name, where, evidence, *words))

    if error is not None:
        said = str(error).strip()
        known = (n for n, rule in CATALOGUE.items() if re.search(rule.get("raised", "(?!)"), said))
        raised = "the step raised" if error32 else next(known, "the step raised")
        evidence = {type(error).__name__: said.partition("\n")[0][:120]}
        add(raised, f"call {len(facts['seconds'])} of the step", evidence)
    for name, rule in CATALOGUE.items():
        for row in facts[rule["each"]] if "each" in rule else [{}]:
            known = facts | row
            known["times"] = lambda pattern, trace=known["trace"]: len(re.findall(pattern, trace))
            known["found"] = name != raised and eval(rule.get("when", "False"), known)
            if known["found"]:
                evidence = {k: eval(fact, known) for k, fact in rule.get("evidence", {}).items()}
                severity = "warning" if eval(rule.get("mild", "False"), known) else ""
                add(name, rule["where"].format(**known), evidence, severity)
    return sorted(found.values(), key=lambda finding: SEVERITIES.index(finding.severity))


def _optimizers(seen: Watcher, model: nn.Module, given: list[Optimizer]) -> list[dict[str, Any]]:
    """A row per optimizer: what it holds, and what happened to that."""
    rows, own = [], {id(p) for p in model.parameters()}
    steppers = [who for _, who in seen.trace if isinstance(who, Optimizer)]
    for optimizer in dict.fromkeys([*given, *steppers]):
        held, eps = _weights(optimizer), optimizer.defaults.get("eps") or math.inf
        dead = [d for d in {*held.values()} & {*NARROW} if torch.tensor(eps).to(d) == 0]
        trace = [x for x, who in seen.trace if who is None or _weights(who).keys() & held.keys()]
        row = {"optimizer": type(optimizer).__name__, "trace": "".join(trace), "eps": eps}
        row |= {"dead": formats.of(dead[0]).name if dead else "", "foreign": own.isdisjoint(held)}
        rows.append(row | {"steps": not {*"SoO"}.isdisjoint(trace)})
    return rows


def _weights(who: Any) -> dict[int, torch.dtype]:
    """The dtypes of an optimizer's weights, of those of a scheduler's optimizer, of a weight."""
    groups = getattr(getattr(who, "optimizer", who), "param_groups", [{"params": [who]}])
    return {id(p): p.dtype for group in groups for p in group["params"]}


def _map(seen: Watcher) -> list[dict[str, Any]]:
    """A row per module, phase, op and dtype, a step; the most FLOPs come first."""
    rows = []
    for (module, phase, name, dtype), op in seen.ops.items():
        row = {"module": module, "phase": phase, "op": name, "dtype": str(dtype)[6:]}
        rows.append(row | {column: op[column] // len(seen.seconds) for column in COLUMNS})
    return sorted(rows, key=lambda row: (-row["flops"], -row["nbytes"]))


class _Values:
    """A sample of the values in a float32 run, by module and kind, and their largest."""

    def __init__(self) -> None:
        self.samples: defaultdict[tuple[str, str], list[Tensor]] = defaultdict(list)
        self.largest: Counter[tuple[str, str]] = Counter()

    def look(self, module: str, kind: str, tensor: Tensor) -> None:
        """Take in a tensor."""
        key, values = (module or "model", kind), tensor.detach().to_dense().flatten()
        if len(values):
            self.samples[key].append(values[:: -(-len(values) // SAMPLE)].clone())
            largest = values.abs().nan_to_num(math.inf, math.inf).max().item()
            self.largest[key] = max(self.largest[key], largest)

    def rows(self) -> list[dict[str, Any]]:
        """A row per module and kind; those that fp16 would hurt most come first."""
        rows = []
        for (module, kind), values in self.samples.items():
            row = {"module": module, "kind": kind, "largest": self.largest[module, kind]}
            for name in ("fp16", "bf16"):
                row[f"{name} loses"] = gradients.lost(values, name)
                row[f"{name} overflows"] = gradients.overflowed(values, name)
            best = formats.E4M3FN.max / (row["largest"] or math.inf)
            best = 2.0 ** math.floor(math.log2(best)) if 0 < best < math.inf else 1.0
            rows.append(row | {"e4m3 loses": gradients.lost(values, "e4m3fn", best), "at": best})
        return sorted(rows, key=lambda row: -row["fp16 loses"] - row["fp16 overflows"])

    def scale(self) -> dict[str, Any]:
        """Which loss scales save the gradients in fp16; empty where there are none."""
        keys = [key for key in self.samples if "grad" in key[1]]
        values = [sample for key in keys for sample in self.samples[key]]
        largest = max((self.largest[key] for key in keys), default=0.0)

        def saves(power: int) -> bool:
            return gradients.lost(values, "fp16", 2.0**power) <= 0.01

        return (
            {}
            if not values
            else {
                "gradients lost by fp16 unscaled": gradients.lost(values),
                "smallest scale that saves 99%": 2.0 ** bisect_left(range(64), True, key=saves),
                "largest scale without inf": formats.FP16.max / largest if largest else math.inf,
            }
        )


def _speed(
    seen: Watcher, step: timing.Timing, kind: formats.Format, narrow: bool, large: bool
) -> dict[str, Any]:
    """The share of products in a step, and what 16 bits could gain at most (Amdahl's law)."""
    device = seen.device.type
    taken = median(step.cpu_seconds if device == "cpu" else step.seconds)
    products = [min(0.99, seconds["products"] / taken) for seconds in seen.seconds]
    faster, spread = _race(seen.sample, kind.dtype, seen.device)
    gains = [
        1 - p + p * s if narrow else 1 / (1 - p + p / s)
        for p in (median(products), min(products), max(products))
        for s in (faster, max(0.01, faster - spread), faster + spread)
    ]
    matmul = (torch.backends.cuda if device == "cuda" else torch.backends.mkldnn).matmul
    speed = {
        "seconds_a_step": taken,
        "products": median(products),
        "casts": median(seconds["casts"] for seconds in seen.seconds) / taken,
        "FLOPs_of_a_product": seen.sample[0],
        "faster": faster,
        "spread": spread,
        "most_gain": gains[0],
        "low": min(gains),
        "high": max(gains),
        "tf32": matmul.fp32_precision == "tf32",
    }
    if large:  # what this device does with sizes that suit it
        n = LARGE.get(device, 256)
        square = 2 * n**3, torch.mm, ((torch.empty(n, n, device="meta"),) * 2, {})
        best = _race(square, kind.dtype, seen.device)
        speed |= dict(zip(("faster_if_large", "spread_if_large"), best, strict=True))
    return speed


def _race(
    product: tuple[int, Callable, Any], dtype: torch.dtype, device: torch.device
) -> tuple[float, float]:
    """How many times as fast a product is in `dtype` as in float32, and ± how many."""
    _, func, shapes = product

    def run(dtype: torch.dtype) -> Callable[[], Any]:
        def filled(t: Tensor) -> Tensor:
            return torch.full(t.shape, 0.5, device=device, dtype=dtype)  # draws no random numbers

        args, kwargs = tree_map_only(Tensor, filled, shapes)
        return lambda: func(*args, **kwargs)

    with torch.no_grad():
        runs = {"wide": run(torch.float32), "narrow": run(dtype)}
        wide, narrow = timing.compare(runs, 5, 1, device, patience=0.5).values()
    if device.type == "cpu":  # CPU time does not mind what else runs on the machine
        wide, narrow = timing.Timing(wide.cpu_seconds), timing.Timing(narrow.cpu_seconds)
    faster, spread = timing.ratio(wide, narrow)
    return faster, spread / 2


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items())


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
