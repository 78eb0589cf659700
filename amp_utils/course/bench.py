"""Benchmarks: ratios of interleaved runs, each with a 95% interval of its median.

They need torch, matplotlib and click; sweeps are left out where papermill and joblib are missing.
A CPU computes with one thread, timed by the wall clock and in CPU time: the clock with the narrower
interval counts. (More threads would spin while they wait, and CPU time count that as work.)
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property, partial
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory

import click
import torch

from amp_utils import models
from amp_utils.course import ROOT, CourseError, notebook, write_whole
from amp_utils.course.step import Run, Steps, gain_by_parts, table
from amp_utils.device import choose_device, describe
from amp_utils.ledger import record
from amp_utils.lesson import validate, whole
from amp_utils.scaler import FlightRecorder
from amp_utils.timing import Timing, compare, interval

INSTRUMENTS = "from amp_utils import formats, ledger, gradients, scaler, timing, device, lesson"
GRID = {"size": [16], "steps": [60], "precision": ["fp32", "bf16"], "seed": [0, 1, 2, 3]}
LOOP = f"""
import itertools, papermill, sys
for i, values in enumerate(itertools.product(*{list(GRID.values())})):
    out, point = f"{{sys.argv[1]}}/{{i}}.ipynb", dict(zip({list(GRID)}, values))
    papermill.execute_notebook("notebooks/12_checkerboard_cnn.ipynb", out, point, cwd="notebooks")
"""


@dataclass(frozen=True)
class Result:
    """A ratio or an exponent from each repeat, the clock behind it, and the limits it must keep."""

    name: str
    values: Sequence[float]
    clock: str = "wall"
    bar: float | None = None  # at most this
    floor: float = 0.0  # at least this

    @cached_property
    def interval(self) -> tuple[float, float]:
        return interval(self.values)

    @property
    def verdict(self) -> str:
        """Broken where the whole interval is beyond a limit; one that straddles it cannot tell."""
        low, high = self.interval
        if self.bar is None:
            return ""
        if low > self.bar or high < self.floor:
            return "broken"
        return "kept" if self.floor <= low and high <= self.bar else "cannot tell"

    def __str__(self) -> str:
        numbers = "".join(f"{number:8.3f}" for number in (median(self.values), *self.interval))
        bar = "" if self.bar is None else f"{self.bar:.3f}"
        about = f"{bar:>8}{len(self.values):>4}  {self.clock:<6}{self.verdict}"
        return f"{self.name:<44}{numbers}{about}".rstrip()


class Bench:
    """Measures on a device; `tables` collects what is printed below the results."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats, self.on_cpu = device, repeats, device.type == "cpu"
        self.low = torch.bfloat16 if self.on_cpu else torch.float16
        # The shorter a step, the more an overhead weighs: every CPU is fast in float32.
        self.fast = torch.float32 if self.on_cpu else torch.float16
        self.size = (512, 256) if self.on_cpu else (4096, 512)
        self.tables: list[str] = []

    def time(self, runs: Sequence[Run], times=1, warmup=1, patience=20) -> list[Timing]:
        named = dict(enumerate(runs))
        return [*compare(named, times * self.repeats, warmup, self.device, patience).values()]

    def result(self, name: str, statistic: Callable, taken, wall=False, **limits) -> Result:
        """`statistic` of the times in each repeat, by the clock with the narrower interval.

        Only the wall clock counts on a GPU and where `wall` is true.
        """
        by_clock = {"wall": [timing.seconds for timing in taken]}
        if self.on_cpu and not wall:
            by_clock["CPU"] = [timing.cpu_seconds for timing in taken]
        results = [
            Result(name, [*map(statistic, *times)], clock, **limits)
            for clock, times in by_clock.items()
        ]
        return min(results, key=lambda result: result.interval[1] - result.interval[0])

    def pair(self, name: str, *runs: Run, bar=None, wall=False, **how) -> list[Result]:
        """How many times longer the first of two runs takes."""
        return [self.result(name, truediv, self.time(runs, **how), wall, bar=bar)]

    def growth(self, name: str, runs: Mapping[int, Run], wall=False, **how) -> list[Result]:
        """The exponent with which time grows, from runs by size."""
        name = f"exponent of {name} {(*runs,)}"
        taken = self.time([*runs.values()], **how)
        return [self.result(name, partial(exponent, [*runs]), taken, wall, bar=1.1)]

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
        name, data = (
            "fp32" if self.on_cpu else "fp16",
            [(steps.inputs, steps.targets)],
        )
        return partial(lesson.train, name, steps.net, steps.optimizer, steps.scaler, data, count)


def exponent(sizes: Sequence[int], *seconds: float) -> float:
    """The slope of the straight line through log(seconds) over log(sizes)."""
    return linear_regression([*map(math.log, sizes)], [*map(math.log, seconds)]).slope


def recipe(bench: Bench, width=512, batch=256, **how) -> list[Result]:
    """What 16 bits gain in a step and in its products alone, and whether its parts explain that."""
    name, runs = f"recipe {width}/{batch}", []
    for dtype in (torch.float32, bench.low):
        steps = bench.perceptron(dtype, width, batch)
        runs += [steps.train, *steps.parts()]
    taken = bench.time(runs, **how)
    gain = bench.result(f"{name}: gain by parts / gain", gain_by_parts, taken, bar=1.1, floor=0.9)
    by_wall = gain.clock == "wall"
    seconds = [median(timing.seconds if by_wall else timing.cpu_seconds) for timing in taken]
    bench.tables.append(table(name, seconds, median(gain.values)))
    half = len(taken) // 2
    return [
        bench.result(f"{name}: step, fp32 / 16 bits", truediv, taken[::half]),
        bench.result(f"{name}: its products, fp32 / 16 bits", truediv, taken[1::half]),
        gain,
    ]


def large(bench: Bench) -> list[Result]:
    return recipe(bench, 2048 if bench.on_cpu else 4096, 512, warmup=0)


def checkerboard(bench: Bench) -> list[Result]:
    side = 40 if bench.on_cpu else 512
    runs = [partial(bench.painter(dtype, side).train, 10) for dtype in (torch.float32, bench.low)]
    return bench.pair("checkerboard: fp32 / 16 bits", *runs)


def loop(bench: Bench) -> list[Result]:
    steps = bench.perceptron(bench.fast, *bench.size)
    runs = bench.taught(steps, 4), partial(steps.train, 4)
    return bench.pair("lesson 10's loop / the same loop bare", *runs, bar=1.02, times=5)


def recorder(bench: Bench) -> list[Result]:
    bare = bench.perceptron(bench.fast, *bench.size)
    bare.scaler = torch.amp.GradScaler(bench.device.type)
    watched = copy(bare)  # the same network: only the instrument differs
    watched.scaler = FlightRecorder(bare.scaler)
    runs = partial(watched.train, 4), partial(bare.train, 4)
    return bench.pair("flight recorder / bare step", *runs, bar=1.05, times=5)


def ledger(bench: Bench) -> list[Result]:
    step = bench.perceptron(bench.low, *bench.size).train
    return bench.pair("ledger / bare step", record()(step), step)


def command_line(*command: str) -> Run:
    """Run a Python command in the course's folder, with an empty folder as its last argument."""

    def run() -> None:
        with TemporaryDirectory() as out:
            whole = [sys.executable, *command, out]
            ended = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True)
        if ended.returncode:
            raise CourseError(f"{' '.join(command[:3])} failed: {ended.stderr.splitlines()[-1:]}")

    return run


def imports(bench: Bench) -> list[Result]:
    runs = [command_line("-c", f"import torch; {more}") for more in (INSTRUMENTS, "")]
    return bench.pair("import a lesson's modules / torch alone", *runs, bar=1.1, patience=30)


def steps(bench: Bench) -> list[Result]:
    net = bench.perceptron(bench.fast, *bench.size)
    return bench.growth("steps", {count: bench.taught(net, count) for count in (4, 8, 16)})


def pixels(bench: Bench) -> list[Result]:
    sides = (32, 64, 128) if bench.on_cpu else (256, 512, 1024)
    return bench.growth("pixels", {s**2: bench.painter(torch.float32, s).train for s in sides})


def sweep_of(root: Path, grid: Mapping[str, Sequence]) -> Run:
    """Sweep lesson 12 over a grid, with two jobs."""
    values = [f"--set={name}={','.join(map(str, listed))}" for name, listed in grid.items()]
    options = "--root", str(root), "sweep", "12", *values, "--jobs", "2", "--out"
    return command_line("-m", "amp_utils.course", *options)


def sweep(bench: Bench) -> list[Result]:
    how = {"bar": 0.666, "wall": True, "warmup": 0, "patience": 40}
    runs = sweep_of(ROOT, GRID), command_line("-c", LOOP)
    return bench.pair("sweep with 2 jobs / papermill loop", *runs, **how)


def points(bench: Bench) -> list[Result]:
    """Sweeps of a lesson without work: only the sweep itself takes time."""
    cell = {"cell_type": "code", "source": "n: int = 0  # point", "outputs": [], "id": "n"}
    cell |= {"execution_count": None, "metadata": {"tags": ["parameters"]}}
    lesson = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    with TemporaryDirectory() as root:
        path = Path(root, "notebooks", "12_checkerboard_cnn.ipynb")
        path.parent.mkdir()
        path.write_text(json.dumps(lesson))
        runs = {count: sweep_of(Path(root), {"n": range(count)}) for count in (2, 4, 8)}
        return bench.growth("points of a sweep", runs, wall=True, warmup=0)


BENCHMARKS = recipe, large, checkerboard, loop, recorder, ledger, imports, steps, pixels
SWEEPS = sweep, points
PAIRS = {pair.__name__: pair for pair in BENCHMARKS + SWEEPS}


@click.command(help=f"Measure gains and overheads as ratios: all, or some of {', '.join(PAIRS)}.")
@click.argument("pairs", nargs=-1, metavar="[PAIR]...")
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--repeats", type=int, default=21, help="how often each run is timed, at most")
@click.pass_obj
def command(root: Path, pairs: Sequence[str], device: str, repeats: int) -> int:
    device = choose_device(device)
    validate({"repeats": repeats}, repeats=whole(2))
    if unknown := [pair for pair in pairs if pair not in PAIRS]:
        raise CourseError(f"{unknown[0]!r} is not a benchmark: give {', '.join(PAIRS)}.", 2)
    chosen = [PAIRS[name] for name in pairs or PAIRS]
    if any(find_spec(name) is None for name in ("papermill", "joblib")) or os.cpu_count() < 2:
        print("Sweeps are not measured: that needs papermill, joblib and two cores.")
        chosen = [pair for pair in chosen if pair not in SWEEPS]
    torch.set_num_threads(1)
    bench, results = Bench(device, repeats), []
    print(f"{'':<44}{'median':>8}{'95% interval':>16}{'bar':>8}{'n':>4}  clock")
    for pair in chosen:
        for result in pair(bench):
            results.append(
                asdict(result) | {"interval": result.interval, "verdict": result.verdict}
            )
            print(result, flush=True)
    print(*bench.tables, sep="\n")
    about = {"device": describe(device), "date": date.today().isoformat()}
    about |= {"python": platform.python_version(), "torch": torch.__version__}
    path = root / "runs" / f"bench-{device.type}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(about | {"results": results, "tables": bench.tables}, indent=1))
    return int(any(result["verdict"] == "broken" for result in results))
