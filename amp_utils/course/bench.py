"""Benchmarks: ratios of interleaved runs, each with a 95% interval of its median.

A CPU computes with one thread: more would spin while they wait, which CPU time counts as work.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory

import click
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_utils import models
from amp_utils.course import ROOT, CourseError, notebook, rungs, write_whole
from amp_utils.device import choose_device, describe
from amp_utils.ledger import record
from amp_utils.scaler import FlightRecorder
from amp_utils.timing import Timing, compare, interval

Run = Callable[[], object]
CLOCKS = {"CPU": "cpu_seconds", "wall": "seconds"}  # of equally good ones the first counts
KINDS = {"mm": "products", "addmm": "products", "_to_copy": "casts"}
PARTS = ("products", "casts", "pointwise, loss", "optimizer")
INSTRUMENTS = "from amp_utils import formats, ledger, gradients, scaler, timing, device, lesson"
# Runs so long that the five seconds in which a sweep starts its workers weigh little.
POINT = {"size": [16], "steps": [200], "seeds": [4]}
GRID = POINT | {"precision": ["fp32", "bf16"], "seed": [0, 1]}
LESSON = "notebooks/12_checkerboard_cnn.ipynb"
LOOP = f"""
import itertools, papermill, sys
for i, values in enumerate(itertools.product(*{list(GRID.values())})):
    out, point = f"{{sys.argv[1]}}/{{i}}.ipynb", dict(zip({list(GRID)}, values))
    papermill.execute_notebook("{LESSON}", out, point, cwd="notebooks")
"""


def cut_lesson(root: Path) -> None:
    """Make a course in `root` of the lesson that is swept, cut to its parameters."""
    lesson = json.loads((ROOT / LESSON).read_text("utf-8"))
    cells = [cell for cell in lesson["cells"] if "parameters" in str(cell["metadata"])]
    (root / LESSON).parent.mkdir()
    (root / LESSON).write_text(json.dumps(lesson | {"cells": cells}))


class Steps:
    """Training steps of a network on one batch, under autocast unless `dtype` is float32."""

    def __init__(self, net: nn.Module, batch: Sequence, dtype: torch.dtype, kind=torch.optim.SGD):
        self.inputs, self.targets = batch
        self.net, device = net.to(self.inputs.device), self.inputs.device.type
        self.optimizer = kind(self.net.parameters(), lr=1e-3)
        self.dtype, self.scaler = (
            dtype,
            torch.amp.GradScaler(device, enabled=dtype == torch.float16),
        )
        self.autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = nn.functional.mse_loss(self.net(self.inputs), self.targets)
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            self.gradients()
            self.update()

    def parts(self) -> list[Run]:
        """Each of PARTS alone: its kernels in order, with the tensors that they get in a step."""
        with Trace() as gradients:
            self.gradients()
        with Trace() as update:
            self.update()
        calls: dict[str, list[Run]] = {part: [] for part in PARTS} | {"optimizer": update.calls}
        for call in gradients.calls:
            calls[KINDS.get(call.func.overloadpacket.__name__, "pointwise, loss")].append(call)
        return [partial(replay, calls[part]) for part in PARTS]


class Trace(TorchDispatchMode):
    """Collects the kernels that run in a block, with their arguments; views are free.

    Products, which can take half a minute each, get random results: speed depends on no value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[partial] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = partial(func, *args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.calls.append(call)
        if KINDS.get(func.overloadpacket.__name__) == "products":
            a, b = args[-2:]
            return torch.randn(len(a), b.shape[1], device=a.device).to(a.dtype)
        return call()


@torch.no_grad()
def replay(calls: Sequence[Run]) -> None:
    """Keep the results to the end: in a step, too, they take new memory that no cache holds."""
    _ = [call() for call in calls]


def run_in_a_row(run: Run, times: int) -> None:
    for _ in range(times):
        run()


def halves(values: Sequence) -> list[tuple]:
    """Pair the values of a float32 step, followed by its parts, with those of a 16-bit step."""
    half = len(values) // 2
    return [*zip(values[:half], values[half:], strict=True)]


def gain_by_parts(*seconds: float) -> float:
    """The gain that the parts predict over the measured one; `seconds` as in `halves`."""
    (fp32, low), *parts = halves(seconds)
    return sum(part for part, _ in parts) / sum(part for _, part in parts) / (fp32 / low)


def table(name: str, seconds: Sequence[float], gain_by_parts: float) -> str:
    """Where a step's time goes, and how well the parts explain the gain."""
    step, *parts = halves(seconds)
    pairs = [step, *parts, tuple(map(sum, zip(*parts, strict=True)))]
    lines = [f"\n{name:<20}{'fp32, ms':>10}{'16 bits, ms':>13}{'gain':>8}"]
    for row, (fp32, low) in zip(("step", *PARTS, "sum of the parts"), pairs, strict=True):
        gain = "" if row == "casts" else f"{fp32 / low:8.3f}"
        lines.append(f"{row:<20}{1e3 * fp32:10.2f}{1e3 * low:13.2f}{gain}")
    within = "within" if abs(gain_by_parts - 1) <= 0.1 else "not within"
    return "\n".join([*lines, f"Gain by the parts: {gain_by_parts - 1:+.1%}, {within} 10%."])


@dataclass
class Result:
    """A ratio or an exponent from each repeat, the clock behind it, and the limits it must keep."""

    name: str
    values: Sequence[float]
    clock: str = "wall"
    bar: float | None = None  # at most this
    floor: float = 0.0  # at least this

    def __post_init__(self) -> None:
        """Broken where the whole interval is beyond a limit; if it straddles one, cannot tell."""
        self.interval = low, high = interval(self.values)
        self.verdict = "" if self.bar is None else "cannot tell"
        if self.verdict and len(self.values) > 1:
            if low > self.bar or high < self.floor:
                self.verdict = "broken"
            elif self.floor <= low and high <= self.bar:
                self.verdict = "kept"

    def __str__(self) -> str:
        numbers = "".join(f"{number:8.3f}" for number in (median(self.values), *self.interval))
        bar = "" if self.bar is None else f"{self.bar:.3f}"
        about = f"{bar:>8}{len(self.values):>4}  {self.clock:<6}{self.verdict}"
        return f"{self.name:<44}{numbers}{about}".rstrip()


def exponent(sizes: Sequence[int], *seconds: float) -> float:
    """The slope of the straight line through log(seconds) over log(sizes)."""
    return linear_regression([*map(math.log, sizes)], [*map(math.log, seconds)]).slope


def run_python(*command: str) -> None:
    """Run a Python command in the course's folder, with an empty folder as its last argument."""
    with TemporaryDirectory() as out:
        whole = [sys.executable, *command, out]
        ended = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        why = ended.stderr.strip().splitlines()[-1:]
        raise CourseError(f"A benchmark's command {command[:6]} failed: {' '.join(why)}")


def sweep_of(root: Path, grid: Mapping[str, Sequence]) -> Run:
    """Sweep lesson 12 over a grid, with two jobs."""
    values = [f"--set={name}={','.join(map(str, listed))}" for name, listed in grid.items()]
    options = "--root", str(root), "sweep", "12", *values, "--jobs", "2", "--out"
    return partial(run_python, "-m", "amp_utils.course", *options)


class Bench:
    """Measures on a device; `tables` collects what is printed below the results."""

    def __init__(self, device: torch.device, repeats: int, patience: float = 1.0) -> None:
        self.device, self.repeats, self.patience = device, repeats, patience
        self.on_cpu = device.type == "cpu"
        self.low = torch.bfloat16 if self.on_cpu else torch.float16
        # The shorter a step, the more an overhead weighs: every CPU is fast in float32.
        self.fast = torch.float32 if self.on_cpu else torch.float16
        self.size = (512, 256) if self.on_cpu else (4096, 512)
        self.tables: list[str] = []

    def time(self, runs: Sequence[Run], times=1, warmup=1, patience=8) -> list[Timing]:
        named, repeats = dict(enumerate(runs)), times * self.repeats
        return [*compare(named, repeats, warmup, self.device, self.patience * patience).values()]

    def result(self, name: str, statistic: Callable, taken, wall=False, **limits) -> Result:
        """`statistic` of the times in each repeat; a GPU has the wall clock only."""
        results = []
        for clock in CLOCKS if self.on_cpu and not wall else ["wall"]:
            values = [*map(statistic, *(getattr(timing, CLOCKS[clock]) for timing in taken))]
            results.append(Result(name, values, clock, **limits))
        return min(results, key=lambda result: result.interval[1] - result.interval[0])

    def pair(self, name: str, *runs: Run, bar=None, wall=False, **how) -> list[Result]:
        """How many times longer the first of two runs takes."""
        return [self.result(name, truediv, self.time(runs, **how), wall, bar=bar)]

    def growth(self, name: str, runs: Mapping[int, Run], wall=False, **how) -> list[Result]:
        """The exponent with which time grows, from runs by size."""
        name, slope = f"exponent of {name} {(*runs,)}", partial(exponent, [*runs])
        return [self.result(name, slope, self.time([*runs.values()], **how), wall, bar=1.1)]

    def perceptron(self, dtype: torch.dtype, width: int, batch: int) -> Steps:
        """Steps of the recipe's three linear layers."""
        data = torch.randn(2, batch, width, device=self.device)
        return Steps(models.mlp(width, width, width), data, dtype)

    def painter(self, dtype: torch.dtype, side: int) -> Steps:
        """The checkerboard net, in the form that lesson 12 takes on the device."""
        batch = [models.pixel_grid(side).to(self.device), models.checkerboard(side).to(self.device)]
        if self.on_cpu:
            return Steps(models.pixel_painter(64), batch, dtype, torch.optim.Adam)
        images = [pixels.T.reshape(1, -1, side, side) for pixels in batch]
        return Steps(models.conv_painter(256), images, dtype, torch.optim.Adam)

    def taught(self, steps: Steps, count: int) -> Run:
        """Steps in the training loop of lesson 10, read from its notebook."""
        lesson = notebook.load("10", device=self.device, on_gpu=not self.on_cpu)
        name, data = "fp32" if self.on_cpu else "fp16", (steps.inputs, steps.targets)
        return partial(lesson.train, name, steps.net, steps.optimizer, steps.scaler, data, count)

    def recipe(self, width=512, batch=256, in_a_row=5, **how) -> list[Result]:
        """What 16 bits gain in a step and in its products, and whether its parts explain that.

        Each is run several times in a row: a short one alone would find its caches cold.
        """
        name, runs, limits = f"recipe {width}/{batch}", [], {"bar": 1.1, "floor": 0.9}
        for dtype in (torch.float32, self.low):
            steps = self.perceptron(dtype, width, batch)
            runs += [partial(run_in_a_row, run, in_a_row) for run in (steps.train, *steps.parts())]
        taken = self.time(runs, **how)
        step, products, *_ = halves(taken)
        gain = self.result(f"{name}: gain by parts / gain", gain_by_parts, taken, **limits)
        share = self.result(
            f"{name}: gain of the step / of its products",
            lambda a, b, c, d: a / b / (c / d),
            [*step, *products],
            **({} if self.on_cpu else {"bar": math.inf, "floor": 0.9}),
        )
        seconds = [median(getattr(timing, CLOCKS[gain.clock])) / in_a_row for timing in taken]
        self.tables.append(table(name, seconds, median(gain.values)))
        products = self.result(f"{name}: its products, fp32 / 16 bits", truediv, products)
        # The published gain is that of the recipe's own size, 4096/512, on a GPU.
        goal = {"bar": math.inf, "floor": 2.44} if name == "recipe 4096/512" else {}
        step = self.result(f"{name}: step, fp32 / 16 bits", truediv, step, **goal)
        return [step, products, share, gain]

    def large(self) -> list[Result]:
        return self.recipe(2048 if self.on_cpu else 4096, 512, in_a_row=1, warmup=0, patience=30)

    def precisions(self) -> list[Result]:
        """Steps and products in every precision, compiled and as a CUDA graph, against peaks."""
        width, batch = (256, 128) if self.on_cpu else (4096, 512)
        names, device, low = rungs.names(self.device), self.device, self.low
        steps = {
            name: self.perceptron(rungs.DTYPES.get(name, torch.float32), width, batch)
            for name in names
            if name != "fp8"
        }
        runs: dict[str, Run] = {name: step.train for name, step in steps.items()}
        if "tf32" in runs:
            runs["tf32"] = partial(rungs.in_tf32, runs["tf32"])
        compiled = self.perceptron(low, width, batch)
        compiled.net.compile()
        runs["bf16 compiled" if self.on_cpu else "fp16 compiled"] = compiled.train
        if "bf16" in runs and not self.on_cpu:
            one = self.perceptron(torch.bfloat16, width, batch)
            whole = one.inputs, one.targets
            runs["bf16 as a CUDA graph"] = rungs.graphed(one.net, one.optimizer, whole, one.dtype)
        products = {name: rungs.product(name, batch, width, device) for name in names}
        odd = f"{names[-1 if self.on_cpu else names.index('fp16')]} of width {width + 1}"
        products[odd] = rungs.product(odd.split()[0], batch, width + 1, device)
        results = []
        for title, kinds, flops in (
            ("step of the recipe", runs, 16 * batch * width**2),
            ("product", products, 2 * batch * width**2),
        ):
            taken = dict(zip(kinds, self.time([*kinds.values()], warmup=3), strict=True))
            self.tables.append(rungs.table(f"{title} {width}/{batch}", taken, flops, device))
            others = [name for name in kinds if name != "fp32"]
            results += [
                self.result(f"{title}: fp32 / {name}", truediv, [taken["fp32"], taken[name]])
                for name in others
            ]
        return results

    def checkerboard(self) -> list[Result]:
        side = 40 if self.on_cpu else 512
        runs = [partial(self.painter(dtype, side).train, 10) for dtype in (torch.float32, self.low)]
        return self.pair("checkerboard: fp32 / 16 bits", *runs)

    def loop(self) -> list[Result]:
        steps = self.perceptron(self.fast, *self.size)
        runs = self.taught(steps, 4), partial(steps.train, 4)
        return self.pair("lesson 10's loop / the same loop bare", *runs, bar=1.02, times=5)

    def recorder(self) -> list[Result]:
        bare = self.perceptron(self.fast, *self.size)
        bare.scaler = torch.amp.GradScaler(self.device.type)
        watched = copy(bare)  # the same network: only the instrument differs
        watched.scaler = FlightRecorder(bare.scaler)
        runs = partial(watched.train, 4), partial(bare.train, 4)
        return self.pair("flight recorder / bare step", *runs, bar=1.05, times=5)

    def ledger(self) -> list[Result]:
        step = self.perceptron(self.low, *self.size).train
        return self.pair("ledger / bare step", record()(step), step)

    def imports(self) -> list[Result]:
        runs = [partial(run_python, "-c", f"import torch; {more}") for more in (INSTRUMENTS, "")]
        return self.pair("import a lesson's modules / torch alone", *runs, bar=1.1, patience=20)

    def steps(self) -> list[Result]:
        net = self.perceptron(self.fast, *self.size)
        return self.growth("steps", {count: self.taught(net, count) for count in (4, 8, 16)})

    def pixels(self) -> list[Result]:
        sides = (32, 64, 128) if self.on_cpu else (256, 512, 1024)
        return self.growth("pixels", {s**2: self.painter(torch.float32, s).train for s in sides})

    def sweep(self) -> list[Result]:
        how = {"bar": 0.666, "wall": True, "warmup": 0, "patience": 100}
        runs = sweep_of(ROOT, GRID), partial(run_python, "-c", LOOP)
        return self.pair("sweep with 2 jobs / papermill loop", *runs, **how)

    def points(self) -> list[Result]:
        """Sweeps of a lesson cut to its parameters: only the sweep itself takes time."""
        with TemporaryDirectory() as root:
            cut_lesson(Path(root))
            runs = {count: sweep_of(Path(root), {"seed": range(count)}) for count in (2, 4, 8)}
            return self.growth("points of a sweep", runs, wall=True, warmup=0, patience=20)


POSITIVE = click.FloatRange(0, min_open=True)
SWEEPS = ["sweep", "points"]
OTHERS = "recipe large precisions checkerboard loop recorder ledger imports steps pixels".split()
PAIRS = {name: getattr(Bench, name) for name in OTHERS + SWEEPS}


@click.command(help=f"Measure gains and overheads as ratios: all, or some of {', '.join(PAIRS)}.")
@click.argument("pairs", nargs=-1, type=click.Choice([*PAIRS]), metavar="[PAIR]...")
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--repeats", type=click.IntRange(2), default=21, help="most times a run is timed")
@click.option("--patience", type=POSITIVE, default=1.0, help="2: twice as long for repeats")
@click.pass_obj
def command(root: Path, pairs: Sequence[str], device: str, repeats: int, patience: float) -> int:
    device = choose_device(device)
    usual = [name for name in PAIRS if name != "precisions" or device.type == "cuda"]
    chosen = list(pairs or usual)
    if any(find_spec(name) is None for name in ("papermill", "joblib")) or os.cpu_count() < 2:
        print("Sweeps are not measured: that needs papermill, joblib and two cores.")
        chosen = [name for name in chosen if name not in SWEEPS]
    torch.set_num_threads(1)
    bench, results, failed = Bench(device, repeats, patience), [], False
    about = {"device": describe(device), "torch": torch.__version__, "date": str(date.today())}
    about |= {"results": results, "tables": bench.tables}
    path = root / "runs" / f"bench-{device.type}.json"
    path.parent.mkdir(exist_ok=True)
    print(f"{'':<44}{'median':>8}{'95% interval':>16}{'bar':>8}{'n':>4}  clock")
    for name in chosen:
        try:
            for result in PAIRS[name](bench):
                results.append(result)
                print(result, flush=True)
        except CourseError as error:  # the other pairs are still worth their minutes
            print(error, file=sys.stderr)
            failed = True
        write_whole(path, json.dumps(about, indent=1, default=vars))  # a cut-off run leaves it
    print(*bench.tables, sep="\n")
    return int(failed or any(result.verdict == "broken" for result in results))
