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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from amp_utils import formats, gradients, ledger, timing
from amp_utils.lesson import choice, validate, whole
from amp_utils.watcher import NARROW, Saved, Watcher

CATALOGUE = tomllib.loads(Path(__file__).with_name("findings.toml").read_text("utf-8"))
ADVICE = CATALOGUE.pop("advice")
SEVERITIES = ("error", "warning", "note")
COLUMNS = ("calls", "flops", "misaligned", "nbytes", "repeats")  # of the map
SHOWN = 8  # rows of a table that are printed; the JSON has all
WORTH = 1e8  # FLOPs of a step whose speed is worth a finding


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
            if rows := getattr(self, name)[:SHOWN]:
                told = [key for key in rows[0] if any(row[key] for row in rows)]  # the rest is 0
                cells = [[_shown(row[key]) for key in told] for row in rows]
                lines += [f"\n{name}, {len(rows)} of {len(getattr(self, name))} rows"]
                lines += [ledger.aligned([told, *cells])]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _listed(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_shown(value)}" for name, value in facts.items())


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
        locals(),
        step=(callable, "a function that runs one training step"),
        model=(_has_parameters, "the nn.Module with parameters that the step trains"),
        steps=whole(1),
        precision=choice("fp16", "bf16", None),
    )
    given = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    saved, plain, error32 = Saved(model, scaler, *given), None, None
    seen, wide = Watcher(model, saved), Watcher(model, saved, wide=True)
    weights = Counter(p.dtype for p in model.parameters()).most_common(1)[0][0]
    with saved:
        error = seen.watch(step, steps)
    with saved, suppress(Exception):  # if only the unwatched step raises, its speed stays unknown
        plain = None if error else timing.compare({"": step}, max(3, steps), 0, seen.device)[""]
    if weights not in NARROW:
        with saved:
            error32 = wide.watch(step, 1)

    report = Report("", map=_map(seen), ranges=_ranges(wide), scale=_scale(wide))
    report.updates = [
        {"by": by, "op": op, "dtype": str(dtype)[6:], "due": n["due"], "stay": n["stay"] / n["due"]}
        for (by, op, dtype), n in seen.updates.items()
        if n["due"]
    ]
    total = {column: sum(row[column] for row in report.map) for column in COLUMNS}
    small = [row for row in report.map if row["dtype"] in ("float16", "bfloat16")]
    flops, own, narrow = sum(row["flops"] for row in small), formats.of(weights).name, ""
    if flops:  # the largest comes first
        narrow = formats.of(getattr(torch, small[0]["dtype"])).name
    pure, fmt = own if weights in NARROW else "", formats.of(precision or narrow or "bf16")
    report.precision = f"pure {own}" if pure else narrow or own
    report.summary = {
        "share of FLOPs in 16 bits": flops / max(1, total["flops"]),
        "of them misaligned": sum(row["misaligned"] for row in small) / max(1, flops),
        "casts a step": sum(row["calls"] for row in report.map if row["nbytes"]),
        "bytes of casts": total["nbytes"],
        "casts of weights again": total["repeats"],
    }
    judged = bool(narrow) and total["flops"] >= WORTH
    if plain and seen.sample:
        report.speed = _speed(seen, plain, fmt, bool(narrow), judged)

    outputs = (row for row in report.ranges if row["kind"] == "activations")
    largest = max((row["largest"] for row in outputs), default=0)
    bf16_loses = [row["bf16 loses"] + row["bf16 overflows"] for row in report.ranges]
    lost, needed, allowed = report.scale.values() or (math.nan, 1.0, math.nan)
    facts = vars(seen) | vars(report) | report.speed
    facts |= {"asked": precision, "narrow": narrow, "pure": pure, "format": fmt.name}
    facts |= {"lost": lost, "needed": needed, "allowed": allowed, "wild32": wide.wild}
    facts |= {"largest": largest, "fits": largest <= formats.FP16.max and not needed > allowed}
    facts |= {"bf16_loses": max(bf16_loses, default=0), "finished": error is None}
    facts |= {"judged": judged and report.speed, "gains": report.speed.get("high", 2) >= 1.1}
    facts |= {"off": scaler is not None and not scaler.is_enabled()}
    facts |= {"optimizers": _optimizers(seen, model, given), "angles": seen.angles.values()}
    facts |= {"worst": {c: max(report.map, key=itemgetter(c), default={}) for c in COLUMNS}}
    facts["times"] = partial(_times, seen.trace)
    found = {
        (finding.name, finding.where): finding for finding in _judge(facts, error, bool(error32))
    }
    report.findings = sorted(found.values(), key=lambda f: SEVERITIES.index(f.severity))
    what, *why = [rule["say"].format(**facts) for rule in ADVICE if eval(rule["when"], facts)]
    report.advice = f"{what}: {'; '.join(why)}."
    return report


def _has_parameters(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(True for _ in model.parameters())


def _judge(facts: dict[str, Any], error: Exception | None, beyond: bool) -> Iterator[Finding]:
    """What of the catalogue is the case, and where; of an error `beyond` AMP, only that it is."""
    said, raised = str(error or "").strip(), None
    if error is not None:
        raises = (n for n, rule in CATALOGUE.items() if re.search(rule.get("raised", "(?!)"), said))
        raised = "the step raised" if beyond else next(raises)
    for name, rule in CATALOGUE.items():
        for row in facts[rule["each"]] if "each" in rule else [{}]:
            known = facts | row
            if name == raised:
                where = f"call {len(facts['seconds'])} of the step"
                evidence = {type(error).__name__: said.partition("\n")[0][:120]}
            elif found := eval(rule.get("when", "False"), known):
                known["found"] = found
                where = rule["where"].format(**known)
                evidence = {k: eval(fact, known) for k, fact in rule.get("evidence", {}).items()}
            else:
                continue
            mild = eval(rule.get("mild", "False"), known)
            severity = "warning" if mild else rule["severity"]
            yield Finding(name, where, evidence, severity, rule["change"], rule["lesson"])


def _times(trace: list[tuple[str, Any]], pattern: str) -> int:
    return len(re.findall(pattern, "".join(letter for letter, _ in trace)))


def _optimizers(seen: Watcher, model: nn.Module, given: list[Optimizer]) -> list[dict[str, Any]]:
    """A row per optimizer: what it holds, and what happened to that."""
    rows, own = [], {id(p) for p in model.parameters()}
    stepped = [who for _, who in seen.trace if isinstance(who, Optimizer)]
    for optimizer in dict.fromkeys([*given, *stepped]):
        held, eps = _weights(optimizer), optimizer.defaults.get("eps") or math.inf
        narrow = [formats.of(dtype) for dtype in {*held.values()} & {*NARROW}]
        dead = [fmt.name for fmt in narrow if eps <= fmt.smallest_subnormal / 2]
        trace = [(x, who) for x, who in seen.trace if who is None or _weights(who).keys() & held]
        row = {"optimizer": type(optimizer).__name__, "eps": eps, "dead": ", ".join(dead)}
        row |= {"foreign": own.isdisjoint(held), "steps": _times(trace, "[SoO]")}
        rows.append(row | {"times": partial(_times, trace)})
    return rows


def _weights(who: Any) -> dict[int, torch.dtype]:
    """The dtypes of an optimizer's weights, of those of a scheduler's optimizer, of a weight."""
    groups = getattr(getattr(who, "optimizer", who), "param_groups", [{"params": [who]}])
    return {id(p): p.dtype for group in groups for p in group["params"]}


def _map(seen: Watcher) -> list[dict[str, Any]]:
    """A row per module, phase, op and dtype, a step; the most FLOPs come first."""
    rows = []
    for (module, phase, op, dtype), counts in seen.ops.items():
        row = {"module": module, "phase": phase, "op": op, "dtype": str(dtype)[6:]}
        rows.append(row | {column: counts[column] / len(seen.seconds) for column in COLUMNS})
    return sorted(rows, key=lambda row: (-row["flops"], -row["nbytes"]))


def _ranges(wide: Watcher) -> list[dict[str, Any]]:
    """A row per module and kind; those that fp16 would hurt most come first."""
    rows = []
    for (module, kind), values in wide.values.items():
        row = {"module": module, "kind": kind, "largest": wide.largest[module, kind]}
        for name in ("fp16", "bf16"):
            row[f"{name} loses"] = gradients.lost(values, name)
            row[f"{name} overflows"] = gradients.overflowed(values, name)
        best = formats.E4M3FN.max / (row["largest"] or math.inf)
        best = 2.0 ** math.floor(math.log2(best)) if 0 < best < math.inf else 1.0
        rows.append(row | {"e4m3 loses": gradients.lost(values, "e4m3fn", best), "at": best})
    return sorted(rows, key=lambda row: -row["fp16 loses"] - row["fp16 overflows"])


def _scale(wide: Watcher) -> dict[str, Any]:
    """Which loss scales save the gradients in fp16; empty where there are none."""
    kinds = [key for key in wide.values if "grad" in key[1]]
    values = [sample for key in kinds for sample in wide.values[key]]
    largest = max((wide.largest[key] for key in kinds), default=0)
    saves = lambda power: gradients.lost(values, "fp16", 2.0**power) <= 0.01  # noqa: E731
    if not values:
        return {}
    return {
        "gradients lost by fp16 unscaled": gradients.lost(values),
        "smallest scale that saves 99%": 2.0 ** bisect_left(range(64), True, key=saves),
        "largest scale without inf": formats.FP16.max / largest if largest else math.inf,
    }


def _speed(
    seen: Watcher, step: timing.Timing, fmt: formats.Format, narrow: bool, judged: bool
) -> dict[str, Any]:
    """The share of products in a step, and what 16 bits could gain at most (Amdahl's law)."""
    taken = _own(step, seen.device).median
    products = min(0.99, median(step["products"] for step in seen.seconds) / taken)
    faster, spread = _race(seen.sample, fmt.dtype, seen.device)
    rest, rates = 1 - products, (faster, max(0.01, faster - spread), faster + spread)
    gains = [rest + products * s if narrow else 1 / (rest + products / s) for s in rates]
    cuda = seen.device.type == "cuda"
    matmul = (torch.backends.cuda if cuda else torch.backends.mkldnn).matmul
    speed = {
        "seconds_a_step": taken,
        "products": products,
        "casts": median(step["casts"] for step in seen.seconds) / taken,
        "FLOPs_of_a_product": seen.sample[0],
        "faster": faster,
        "spread": spread,
        "most_gain": gains[0],
        "low": min(gains),
        "high": max(gains),
        "tf32": matmul.fp32_precision == "tf32",
    }
    if judged:  # what this device does with sizes that suit it
        n = 4096 if cuda else 256
        square = 2 * n**3, torch.mm, ((torch.empty(n, n, device="meta"),) * 2, {})
        best = _race(square, fmt.dtype, seen.device)
        speed["faster_if_large"], speed["spread_if_large"] = best
    return speed


def _race(product: tuple, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """How many times as fast a product is in `dtype` as in float32, and ± how many."""
    _, func, shapes = product
    runs = {}
    for each in (torch.float32, dtype):  # filled without drawing random numbers
        fill = partial(torch.full_like, fill_value=0.5, dtype=each, device=device)
        args, kwargs = tree_map_only(Tensor, fill, shapes)
        runs[str(each)] = partial(func, *args, **kwargs)
    with torch.no_grad():
        wide, narrow = timing.compare(runs, 5, 1, device, patience=0.5).values()
    faster, spread = timing.ratio(_own(wide, device), _own(narrow, device))
    return faster, spread / 2


def _own(measured: timing.Timing, device: torch.device) -> timing.Timing:
    """On a CPU the time it computed, which does not mind what else runs there."""
    return timing.Timing(measured.cpu_seconds) if device.type == "cpu" else measured


@click.command()
@click.argument("target", metavar="MODULE:FUNCTION")
def command(target: str) -> None:
    """Examine what FUNCTION() returns: the arguments of `examine`, as a tuple or by name.

    Exit status 1 where a finding is an error, 2 for wrong usage.
    """
    sys.path.insert(0, "")
    try:
        made = resolve_name(target)()
        report = examine(**made) if isinstance(made, dict) else examine(*made)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise click.BadParameter(f"{target}: {error}") from None
    click.echo(report)
    sys.exit(any(found.severity == "error" for found in report.findings))


if __name__ == "__main__":
    command()
