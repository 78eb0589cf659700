"""Benchmarks: ratios of interleaved runs, each with a 95% interval of its median.

They need torch, matplotlib and click; sweeps are left out where papermill and joblib are missing.
With one thread, times are taken by the wall clock and in CPU time, and the clock with the narrower
interval counts. More threads spin while they wait, and sweeps run beside themselves: wall clock only.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property, partial
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from amp_utils import ledger, models
from amp_utils.course import ROOT, CourseError, notebook, write_whole
from amp_utils.course.step import Run, Steps, gain_by_parts, table
from amp_utils.device import choose_device, describe
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

    def row(self) -> dict[str, Any]:
        """What is printed and written."""
        low, high = self.interval
        numbers = {"median": median(self.values), "low": low, "high": high, "bar": self.bar}
        about = {"repeats": len(self.values), "clock": self.clock, "verdict": self.verdict}
        return {"benchmark": self.name, **numbers, **about}


@dataclass
class Bench:
    """Measures on a device, each benchmark in as many repeats as its patience in seconds allows."""

    device: torch.device
    repeats: int
    tables: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.on_cpu = self.device.type == "cpu"
        self.low = torch.bfloat16 if self.on_cpu else torch.float16
        self.clocks = ["wall", "CPU"] if self.on_cpu and torch.get_num_threads() == 1 else ["wall"]

    def time(self, runs: dict[Any, Run], times=1, warmup=1, patience=20) -> list[Timing]:
        repeats = times * self.repeats
        return list(compare(runs, repeats, warmup, self.device, patience).values())

    def result(
        self, name: str, statistic: Callable, taken: Sequence[Timing], wall=False, **limits
    ) -> Result:
        """`statistic` of the times in each repeat, by the clock that gives the narrower interval."""
        results = []
        for clock in ["wall"] if wall else self.clocks:
            times = [t.seconds if clock == "wall" else t.cpu_seconds for t in taken]
            results.append(Result(name, [*map(statistic, *times)], clock, **limits))
        return min(results, key=lambda result: result.interval[1] - result.interval[0])

    def pair(self, name: str, a: Run, b: Run, bar=None, wall=False, **how) -> list[Result]:
        """How many times longer a takes than b."""
        return [self.result(name, truediv, self.time({"a": a, "b": b}, **how), wall, bar=bar)]

    def growth(self, name: str, runs: dict[int, Run], wall=False, **how) -> list[Result]:
        """The exponent with which time grows with a size."""
        name = f"exponent: time against {name}"
        return [
            self.result(name, partial(exponent, [*runs]), self.time(runs, **how), wall, bar=1.1)
        ]

    def perceptron(self, dtype: torch.dtype, width: int = 0, batch: int = 0) -> Steps:
        """The recipe's steps: three linear layers, of a size that suits the device where none is given."""
        width, batch = (
            width or (512 if self.on_cpu else 4096),
            batch or (256 if self.on_cpu else 512),
        )
        data = torch.randn(2, batch, width, device=self.device)
        return Steps(models.mlp(width, width, width), *data, dtype, torch.optim.SGD)

    def painter(self, dtype: torch.dtype, size: int) -> Steps:
        """The checkerboard's steps, in the form that lesson 12 takes on this device."""
        grid, board = (
            models.pixel_grid(size).to(self.device),
            models.checkerboard(size).to(self.device),
        )
        if self.on_cpu:
            return Steps(models.pixel_painter(64), grid, board, dtype, torch.optim.Adam)
        grid, board = grid.T.reshape(1, 2, size, size), board.reshape(1, 1, size, size)
        return Steps(models.conv_painter(256), grid, board, dtype, torch.optim.Adam)

    def taught(self, steps: Steps, count: int) -> Run:
        """Steps in the training loop of lesson 10, read from its notebook."""
        train = notebook.load("10", device=self.device, on_gpu=not self.on_cpu).train
        data = [(steps.inputs, steps.targets)]
        return partial(train, "fp32", steps.net, steps.optimizer, steps.scaler, data, count)


def exponent(sizes: Sequence[int], *seconds: float) -> float:
    """The slope of the straight line through log(seconds) over log(sizes).

    >>> exponent([1, 2, 4], 3.0, 12.0, 48.0)
    2.0
    """
    return linear_regression([*map(math.log, sizes)], [*map(math.log, seconds)]).slope


def recipe(bench: Bench, width: int, batch: int, **how) -> list[Result]:
    """What 16 bits gain in a step and in its products alone, and whether its parts explain that."""
    name, runs = f"recipe {width}/{batch}", {}
    for dtype in (torch.float32, bench.low):
        steps = bench.perceptron(dtype, width, batch)
        runs |= {(dtype, part): run for part, run in {"": steps.train, **steps.parts()}.items()}
    taken = bench.time(runs, **how)
    bench.tables.append(table(name, [timing.median for timing in taken]))
    (fp32, fp32_products), (low, low_products) = taken[:2], taken[len(taken) // 2 :][:2]
    return [
        bench.result(f"{name}: step, fp32 / 16 bits", truediv, [fp32, low]),
        bench.result(f"{name}: products alone", truediv, [fp32_products, low_products]),
        bench.result(f"{name}: gain by parts / gain", gain_by_parts, taken, bar=1.1, floor=0.9),
    ]


def checkerboard(bench: Bench) -> list[Result]:
    size = 40 if bench.on_cpu else 512
    runs = [partial(bench.painter(dtype, size).train, 10) for dtype in (torch.float32, bench.low)]
    return bench.pair("checkerboard: fp32 / 16 bits", *runs)


def loop(bench: Bench) -> list[Result]:
    steps = bench.perceptron(torch.float32)  # fast on every CPU, so that an overhead weighs most
    runs = bench.taught(steps, 4), partial(steps.train, 4)
    return bench.pair("lesson 10's loop / the same loop bare", *runs, bar=1.02, times=5)


def recorder(bench: Bench) -> list[Result]:
    bare = bench.perceptron(torch.float32)
    bare.scaler = torch.amp.GradScaler(bench.device.type)
    recorded = copy(bare)  # the same network, so that only the instrument differs
    recorded.scaler = FlightRecorder(bare.scaler)
    runs = partial(recorded.train, 4), partial(bare.train, 4)
    return bench.pair("flight recorder / bare step", *runs, bar=1.05, times=5)


def under_ledger(bench: Bench) -> list[Result]:
    steps = bench.perceptron(bench.low)
    return bench.pair("ledger / bare step", ledger.record()(steps.train), steps.train)


def command_line(*command: str) -> Run:
    """Run a Python command in the course's folder, with an empty folder as its last argument."""

    def run() -> None:
        with TemporaryDirectory() as out:
            ended = subprocess.run(
                [sys.executable, *command, out], cwd=ROOT, capture_output=True, text=True
            )
        if ended.returncode:
            raise CourseError(f"{command} failed: {ended.stderr.strip().splitlines()[-1:]}")

    return run


def imports(bench: Bench) -> list[Result]:
    runs = command_line("-c", f"import torch; {INSTRUMENTS}"), command_line("-c", "import torch")
    return bench.pair("import what a lesson imports / torch", *runs, bar=1.1, patience=30)


def sweep_of(number: str, values: dict[str, Sequence], root: str | Path = ROOT) -> Run:
    sets = [f"--set={name}={','.join(map(str, listed))}" for name, listed in values.items()]
    options = ["sweep", number, *sets, "--jobs", "2", "--out"]
    return command_line("-m", "amp_utils.course", "--root", str(root), *options)


def sweep(bench: Bench) -> list[Result]:
    how = {"bar": 0.666, "wall": True, "warmup": 0, "patience": 40}
    runs = sweep_of("12", GRID), command_line("-c", LOOP)
    return bench.pair("sweep with 2 jobs / papermill loop", *runs, **how)


def steps(bench: Bench) -> list[Result]:
    trained = bench.perceptron(torch.float32)
    counts = 4, 8, 16
    return bench.growth(
        f"steps, {counts}", {count: bench.taught(trained, count) for count in counts}
    )


def pixels(bench: Bench) -> list[Result]:
    sides = (32, 64, 128) if bench.on_cpu else (256, 512, 1024)
    runs = {side**2: bench.painter(torch.float32, side).train for side in sides}
    return bench.growth(f"pixels, {[*runs]}", runs)


def points(bench: Bench) -> list[Result]:
    """A sweep over a lesson without work, so that nothing but the sweep takes time."""
    cell = {"cell_type": "code", "source": "n: int = 0  # point", "outputs": [], "id": "n"}
    cell |= {"execution_count": None, "metadata": {"tags": ["parameters"]}}
    lesson = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    with TemporaryDirectory() as root:
        (notebooks := Path(root, "notebooks")).mkdir()
        (notebooks / "12_checkerboard_cnn.ipynb").write_text(json.dumps(lesson))
        runs = {count: sweep_of("12", {"n": range(count)}, root) for count in (2, 4, 8)}
        return bench.growth(f"points, {[*runs]}", runs, wall=True, warmup=0)


PAIRS = {
    "recipe": partial(recipe, width=512, batch=256),
    "large": partial(recipe, width=2048, batch=512, warmup=0),
    "checkerboard": checkerboard,
    "loop": loop,
    "recorder": recorder,
    "ledger": under_ledger,
    "imports": imports,
    "steps": steps,
    "pixels": pixels,
    "sweep": sweep,
    "points": points,
}


def show(benchmark, median, low, high, bar, repeats, clock, verdict) -> None:
    numbers = [f"{x:.3f}" if isinstance(x, float) else x or "" for x in (median, low, high, bar)]
    print("{:<42}{:>8}{:>8}{:>8}{:>7}".format(benchmark, *numbers), end="")
    print(f"{repeats:>4}  {clock:<5}{verdict}".rstrip(), flush=True)


@click.command(help=f"Measure gains and overheads as ratios: {', '.join(PAIRS)}, or all.")
@click.argument("pairs", nargs=-1, metavar="[PAIR]...")
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--repeats", type=int, default=21, help="at most so many of each run")
@click.option("--threads", type=int, default=1, help="threads to compute with on a CPU")
@click.pass_obj
def command(root: Path, pairs: Sequence[str], device: str, repeats: int, threads: int) -> int:
    device = choose_device(device)
    validate({"repeats": repeats, "threads": threads}, repeats=whole(2), threads=whole(1))
    for pair in pairs:
        if pair not in PAIRS:
            raise CourseError(f"{pair!r} is not a benchmark: give {', '.join(PAIRS)}.", 2)
    chosen = list(pairs or PAIRS)
    if any(find_spec(name) is None for name in ("papermill", "joblib")) or os.cpu_count() < 2:
        print("Sweeps are not measured: that needs papermill, joblib and two cores.")
        chosen = [pair for pair in chosen if pair not in ("sweep", "points")]
    torch.set_num_threads(threads)
    bench, rows = Bench(device, repeats), []
    show("", "median", "low", "high", "bar", "n", "clock", "")
    for pair in chosen:
        for result in PAIRS[pair](bench):
            rows.append(result.row())
            show(*rows[-1].values())
    print(*bench.tables, sep="\n")
    about = {"device": describe(device), "threads": threads, "torch": torch.__version__}
    about |= {"date": date.today().isoformat(), "results": rows, "tables": bench.tables}
    path = root / "runs" / f"bench-{device.type}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(about, indent=1, ensure_ascii=False))
    return int(any(row["verdict"] == "broken" for row in rows))
