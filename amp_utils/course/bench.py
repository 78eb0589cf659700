"""Benchmarks: ratios of interleaved runs, each with a 95% interval of its median.

They need torch, matplotlib and click; sweeps are left out where papermill and joblib are missing.
Gains are measured by the wall clock with all threads. Overheads are measured with one thread, by the
wall clock and in CPU time, and whichever clock gives the narrower interval counts.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import linear_regression, median
from tempfile import TemporaryDirectory

import click
import torch
from torch import nn

from amp_utils import ledger, models
from amp_utils.course import ROOT, CourseError, notebook, write_whole
from amp_utils.course.step import Recipe, gain_by_parts, table
from amp_utils.device import choose_device, describe
from amp_utils.lesson import validate, whole
from amp_utils.scaler import FlightRecorder
from amp_utils.timing import Timing, compare, interval

Run = Callable[[], object]
INSTRUMENTS = "from amp_utils import formats, ledger, gradients, scaler, timing, device, lesson"
SWEEP = ("-m", "amp_utils.course", "sweep", "12", "--jobs", "2")
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
    bar: float = math.inf  # at most this
    floor: float = -math.inf  # at least this

    @cached_property
    def interval(self) -> tuple[float, float]:
        return interval(self.values)

    @property
    def verdict(self) -> str:
        """Broken where the whole interval is beyond a limit; one that straddles it cannot tell."""
        low, high = self.interval
        if low > self.bar or high < self.floor:
            return "broken"
        if low < self.floor or high > self.bar:
            return "cannot tell"
        return "kept" if math.isfinite(self.bar) else ""

    def row(self) -> dict[str, str | float]:
        """What is printed and written."""
        low, high = self.interval
        row = {"benchmark": self.name, "median": median(self.values), "low": low, "high": high}
        row |= {"bar": self.bar if math.isfinite(self.bar) else ""}
        return row | {"n": len(self.values), "clock": self.clock, "verdict": self.verdict}


class Bench:
    """Measures on one device, each benchmark in as many repeats as its patience allows."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats, self.on_cpu = device, repeats, device.type == "cpu"
        self.low = torch.bfloat16 if self.on_cpu else torch.float16
        self.size = (512, 256) if self.on_cpu else (4096, 512)
        self.tables: list[str] = []

    def time(self, runs, times=1, warmup=1, patience=20, overhead=False) -> list[Timing]:
        """Overheads get one thread, for in CPU time the others would count as they wait and spin."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if overhead else threads)
        try:
            taken = compare(runs, times * self.repeats, warmup, self.device, patience)
        finally:
            torch.set_num_threads(threads)
        return list(taken.values())

    def pair(self, name: str, a: Run, b: Run, bar=math.inf, overhead=False, **how) -> list[Result]:
        """How many times longer a takes than b."""
        taken = self.time({"a": a, "b": b}, overhead=overhead, **how)
        return [result(name, truediv, taken, overhead and self.on_cpu, bar=bar)]

    def growth(self, name: str, sizes, run: Callable, overhead=True, **how) -> list[Result]:
        """The exponent with which the time of `run(size)` grows."""
        taken = self.time({size: run(size) for size in sizes}, overhead=overhead, **how)
        statistic = partial(exponent, sizes)
        return [result(f"{name} {sizes}", statistic, taken, overhead and self.on_cpu, bar=1.1)]


def result(name: str, statistic: Callable, taken: Sequence[Timing], cpu=False, **bars) -> Result:
    """`statistic` of the times in each repeat, by the clock that gives the narrower interval."""
    clocks = {"wall": [timing.seconds for timing in taken]}
    clocks |= {"CPU": [timing.cpu_seconds for timing in taken]} if cpu else {}
    found = [Result(name, [*map(statistic, *times)], by, **bars) for by, times in clocks.items()]
    return min(found, key=lambda result: result.interval[1] - result.interval[0])


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
        steps = Recipe(bench.device, dtype, width, batch)
        runs |= {(dtype, part): run for part, run in steps.parts().items()}
    taken = bench.time(runs, **how)
    fp32, low = taken[: len(taken) // 2], taken[len(taken) // 2 :]
    bench.tables.append(table(name, [t.median for t in fp32], [t.median for t in low]))
    return [
        result(f"{name}: step, fp32 / 16 bits", truediv, [fp32[0], low[0]]),
        result(f"{name}: its products, fp32 / 16 bits", truediv, [fp32[1], low[1]]),
        result(f"{name}: gain by parts / gain", gain_by_parts, taken, bar=1.1, floor=0.9),
    ]


def painting(bench: Bench, dtype: torch.dtype, size: int) -> Run:
    """Ten training steps of the checkerboard net, in the form that lesson 12 takes on this device."""
    net = models.pixel_painter(64) if bench.on_cpu else models.conv_painter(256)
    net, target = net.to(bench.device), models.checkerboard(size).to(bench.device)
    grid = models.pixel_grid(size).to(bench.device)
    grid = grid if bench.on_cpu else grid.T.reshape(1, 2, size, size)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def run() -> None:
        for _ in range(10):
            optimizer.zero_grad()
            with torch.autocast(bench.device.type, dtype, enabled=dtype != torch.float32):
                loss = nn.functional.mse_loss(net(grid).reshape(target.shape), target)
            loss.backward()
            optimizer.step()

    return run


def checkerboard(bench: Bench) -> list[Result]:
    size = 40 if bench.on_cpu else 512
    runs = (painting(bench, dtype, size) for dtype in (torch.float32, bench.low))
    return bench.pair(f"checkerboard {size}²: fp32 / 16 bits", *runs)


def lesson_loop(bench: Bench, steps: Recipe, count: int) -> Run:
    """Training steps in the loop of lesson 10, read from its notebook."""
    lesson = notebook.load("10", device=bench.device, on_gpu=not bench.on_cpu)
    data = [(steps.inputs, steps.targets)]
    return partial(lesson.train, "fp32", steps.net, steps.optimizer, steps.scaler, data, count)


def loop(bench: Bench) -> list[Result]:
    """In float32, which is fast on every CPU: the faster the step, the more an overhead weighs."""
    taught, bare = (Recipe(bench.device, torch.float32, *bench.size) for _ in range(2))
    runs = lesson_loop(bench, taught, 4), partial(bare.train, 4)
    return bench.pair("lesson 10's loop / the same loop bare", *runs, 1.02, True, times=5)


def recorder(bench: Bench) -> list[Result]:
    """The same network with and without the instrument, so that only the instrument differs."""
    steps = Recipe(bench.device, torch.float32, *bench.size)
    bare = torch.amp.GradScaler(bench.device.type)
    runs = partial(steps.train, 4, FlightRecorder(bare)), partial(steps.train, 4, bare)
    return bench.pair("flight recorder / bare step", *runs, 1.05, True, times=5)


def with_ledger(bench: Bench) -> list[Result]:
    steps = Recipe(bench.device, bench.low, *bench.size)

    def recorded() -> None:
        with ledger.record():
            steps.train()

    return bench.pair("ledger / bare step", recorded, steps.train, overhead=True)


def command_line(*command: str) -> Run:
    """Run a Python command in the course's folder; an empty folder is its last argument."""

    def run() -> None:
        with TemporaryDirectory() as out:
            ended = subprocess.run(
                [sys.executable, *command, out], cwd=ROOT, capture_output=True, text=True
            )
        if ended.returncode:
            why = ended.stderr.strip().splitlines()[-1:]
            raise CourseError(f"python {' '.join(command)[:60]}… failed: {''.join(why)}")

    return run


def importing(bench: Bench) -> list[Result]:
    runs = command_line("-c", f"import torch; {INSTRUMENTS}"), command_line("-c", "import torch")
    return bench.pair("import torch, a lesson's modules / torch", *runs, 1.1, True, patience=30)


def sweep(bench: Bench) -> list[Result]:
    values = [f"--set={name}={','.join(map(str, listed))}" for name, listed in GRID.items()]
    runs = command_line(*SWEEP, "12", *values, "--out"), command_line("-c", LOOP)
    return bench.pair("sweep with 2 jobs / papermill loop", *runs, 0.666, warmup=0, patience=60)


def steps(bench: Bench) -> list[Result]:
    trained = Recipe(bench.device, torch.float32, *bench.size)
    return bench.growth("steps", (4, 8, 16), partial(lesson_loop, bench, trained))


def pixels(bench: Bench) -> list[Result]:
    sides = (32, 64, 128) if bench.on_cpu else (256, 512, 1024)
    runs = {side**2: painting(bench, torch.float32, side) for side in sides}
    return bench.growth("pixels", tuple(runs), runs.get)


def points(bench: Bench) -> list[Result]:
    """Sweeps of a lesson that does nothing, so that what is measured is the sweep."""
    with TemporaryDirectory() as folder:
        cell = {"cell_type": "code", "execution_count": None, "id": "a", "outputs": []}
        cell |= {"metadata": {"tags": ["parameters"]}, "source": "n: int = 0  # a point"}
        about = {"metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        path = Path(folder, "notebooks", "12_empty.ipynb")
        path.parent.mkdir()
        path.write_text(json.dumps({"cells": [cell], **about}))

        def run(count: int) -> Run:
            values = f"--set=n={','.join(map(str, range(count)))}"
            return command_line(*SWEEP[:2], "--root", folder, *SWEEP[2:], values, "--out")

        how = {"overhead": False, "warmup": 0, "patience": 20}
        return bench.growth("points of a sweep", (2, 4, 8), run, **how)


SWEEPS = {"sweep": sweep, "points": points}
PAIRS = {
    "recipe": partial(recipe, width=512, batch=256),
    "large": partial(recipe, width=2048, batch=512, warmup=0, patience=30),
    "checkerboard": checkerboard,
    "loop": loop,
    "recorder": recorder,
    "ledger": with_ledger,
    "import": importing,
    "steps": steps,
    "pixels": pixels,
    **SWEEPS,
}
FORMAT = "{benchmark:<46}{median:>8}  {low:>7} {high:>8}{bar:>7}{n:>5}  {clock:<5} {verdict}"


@click.command(help=f"Measure speed-ups and overheads, as ratios. PAIRS: {', '.join(PAIRS)}.")
@click.argument("pairs", nargs=-1)
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--repeats", type=int, default=21, help="how often each of a pair is run, at most")
@click.pass_obj
def command(root: Path, pairs: Sequence[str], device: str, repeats: int) -> int:
    device = choose_device(device)
    validate({"repeats": repeats}, repeats=whole(2))
    for pair in pairs:
        if pair not in PAIRS:
            raise CourseError(f"{pair!r} is not a benchmark: give {', '.join(PAIRS)}.", 2)
    pairs = pairs or tuple(PAIRS)
    if any(find_spec(name) is None for name in ("papermill", "joblib")) or os.cpu_count() < 2:
        print("Sweeps are not measured: that needs papermill, joblib and two cores.")
        pairs = [pair for pair in pairs if pair not in SWEEPS]
    bench, rows = Bench(device, repeats), []
    print(FORMAT.format(**{name: name for name in Result("", [1.0, 1.0]).row()}))
    for pair in pairs:
        for result in PAIRS[pair](bench):
            rows.append(result.row())
            print(
                FORMAT.format(
                    **{k: f"{v:.3f}" if isinstance(v, float) else v for k, v in rows[-1].items()}
                ).rstrip(),
                flush=True,
            )
    print(*bench.tables, sep="\n")
    about = {
        "device": describe(device),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "results": rows,
        "tables": bench.tables,
    }
    path = root / "runs" / f"bench-{device.type}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(about, indent=1))
    return int(any(row["verdict"] == "broken" for row in rows))
