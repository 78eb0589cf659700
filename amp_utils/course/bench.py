"""Benchmarks as ratios from interleaved runs, with their spread: `python -m amp_utils.course bench [--device cuda]`.

Needs torch only; sweeps are left out where papermill and joblib are not installed. Prints a table and writes it, with
machine and versions, to runs/bench-DEVICE.json.
A ratio's spread is its interquartile range; a single time is worth little on a shared machine, a ratio more.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import click
import torch
from torch import nn

from amp_utils import ledger, models
from amp_utils.course import ROOT, write_whole
from amp_utils.device import choose_device, describe
from amp_utils.lesson import validate, whole
from amp_utils.scaler import FlightRecorder
from amp_utils.timing import compare, ratio

Run = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """How many times longer (or faster) something is, the spread of that ratio, and the bar it must keep."""

    name: str
    ratio: float
    spread: float
    bar: float | None = None  # at most this, where there is one

    @property
    def verdict(self) -> str:
        return "" if self.bar is None else "kept" if self.ratio <= self.bar else "broken"


def recipe_steps(
    device: torch.device, dtype: torch.dtype, steps: int = 8
) -> Callable[[object], None]:
    """A few training steps of the recipe's perceptron, with the scaler that is given; small on a CPU."""
    width, batch = (512, 256) if device.type == "cpu" else (4096, 512)
    net = models.mlp(width, width, width).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    inputs, targets = (torch.randn(batch, width, device=device) for _ in range(2))

    def run(scaler: object) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = nn.functional.mse_loss(net(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    return run


def lesson_loop(device: torch.device, steps: int = 8) -> tuple[Run, Run]:
    """The training loop of lesson 10, read from its notebook, and the same loop bare, on equal networks in bf16."""
    notebook = json.loads((ROOT / "notebooks" / "10_amp_recipe.ipynb").read_text("utf-8"))
    source = "\n".join(
        "".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"
    )
    wanted = [
        n for n in ast.parse(source).body if getattr(n, "name", "") in ("train", "float32_products")
    ]
    taught: dict = {
        "torch": torch,
        "nn": nn,
        "contextmanager": contextmanager,
        "Iterator": Iterator,
        "device": device,
    }
    taught |= {"on_gpu": device.type == "cuda", "DTYPES": {"bf16": torch.bfloat16}}
    exec(compile(ast.Module(wanted, []), "10_amp_recipe", "exec"), taught)

    width, batch = (512, 256) if device.type == "cpu" else (4096, 512)
    nets = [models.mlp(width, width, width).to(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in nets]
    data = [tuple(torch.randn(batch, width, device=device) for _ in range(2))]

    def bare() -> None:
        for _ in range(steps):
            for inputs, targets in data:
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    loss = nn.functional.mse_loss(nets[0](inputs), targets)
                loss.backward()
                optimizers[0].step()
                optimizers[0].zero_grad()

    scaler = torch.amp.GradScaler(device.type, enabled=False)
    return partial(taught["train"], "bf16", nets[1], optimizers[1], scaler, data, steps), bare


def checkerboard_step(device: torch.device, dtype: torch.dtype, steps: int = 10) -> Run:
    """A few training steps of the checkerboard net, in the form and size that lesson 12 takes on this device."""
    on_cpu = device.type == "cpu"
    size, width = (40, 64) if on_cpu else (512, 256)
    net = (models.pixel_painter if on_cpu else models.conv_painter)(width).to(device)
    batch, target = models.pixel_grid(size).to(device), models.checkerboard(size).to(device)
    batch = batch if on_cpu else batch.T.reshape(1, 2, size, size)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
                loss = nn.functional.mse_loss(net(batch).reshape(target.shape), target)
            loss.backward()
            optimizer.step()

    return run


def importing(module: str) -> Run:
    """Import a module in a fresh interpreter."""
    return lambda: subprocess.run([sys.executable, "-c", f"import {module}"], check=True)


# The same grid as one sweep with two jobs, and as a plain loop: four seeds in two precisions, small as they come.
GRID = {"size": [16], "steps": [60], "precision": ["fp32", "bf16"], "seed": [0, 1, 2, 3]}
LOOP = f"""
import itertools, papermill, sys
grid = {GRID}
for i, values in enumerate(itertools.product(*grid.values())):
    point = dict(zip(grid, values))
    papermill.execute_notebook(sys.argv[1], f"{{sys.argv[2]}}/{{i}}.ipynb", point, cwd="notebooks", progress_bar=False)
"""


def executing(*command: str) -> Run:
    """Execute lesson 12 over the grid with a Python command, to which an empty folder is added."""

    def run() -> None:
        with TemporaryDirectory() as out:
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            subprocess.run([sys.executable, *command, out], check=True, cwd=ROOT, **quiet)

    return run


def sweep_and_loop() -> tuple[Run, Run] | None:
    """The grid as a sweep, and as a plain loop; None, and a sentence, where that cannot be measured."""
    if (
        any(find_spec(name) is None for name in ("papermill", "joblib"))
        or (os.cpu_count() or 1) < 2
    ):
        print("Sweeps are not measured: that needs papermill, joblib and two cores.")
        return None
    values = [
        word
        for name, listed in GRID.items()
        for word in ("--set", f"{name}={','.join(map(str, listed))}")
    ]
    sweep = executing("-m", "amp_utils.course", "sweep", "12", *values, "--jobs", "2", "--out")
    return sweep, executing("-c", LOOP, "notebooks/12_checkerboard_cnn.ipynb")


def recorded(run: Run) -> Run:
    """The same steps under the ledger."""

    def with_ledger() -> None:
        with ledger.record():
            run()

    return with_ledger


def measure(device: torch.device, repeats: int) -> list[Result]:
    """Run all benchmarks; every pair is timed in turn, a b a b …"""

    def pair(
        name: str, a: Run, b: Run, bar: float | None = None, times: int = repeats, warmup: int = 2
    ) -> Result:
        taken = compare({"a": a, "b": b}, repeats=times, warmup=warmup, device=device)
        return Result(name, *ratio(taken["a"], taken["b"]), bar)

    def scaler(enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(device.type, enabled=enabled)

    low, fp32 = torch.bfloat16 if device.type == "cpu" else torch.float16, torch.float32
    # The same network with and without an instrument: only the instrument differs.
    steps = recipe_steps(device, low)
    step, watched = partial(steps, scaler(True)), partial(steps, FlightRecorder(scaler(True)))
    results = [
        pair(
            "recipe: fp32 / low precision", partial(recipe_steps(device, fp32), scaler(False)), step
        ),
        pair(
            "checkerboard: fp32 / low precision",
            checkerboard_step(device, fp32),
            checkerboard_step(device, low),
        ),
        # Bars of 2 and 5% are finer than the noise of so few repeats.
        pair("lesson 10's loop / the same loop bare", *lesson_loop(device), 1.02, 10 * repeats),
        pair("flight recorder / bare step", watched, step, 1.05, 5 * repeats),
        pair("ledger / bare step", recorded(step), step),
        pair(
            "import amp_utils / import torch",
            importing("torch, amp_utils"),
            importing("torch"),
            1.1,
        ),
    ]
    if swept := sweep_and_loop():
        results.append(
            pair("sweep with 2 jobs / papermill loop", *swept, 0.666, min(3, repeats), warmup=0)
        )
    return results


@click.command(help="Measure speed-ups and the cost of the instruments, as ratios.")
@click.option("--device", default="auto", help="auto, cpu or cuda")
@click.option("--repeats", type=int, default=21, help="how often each of a pair is run")
@click.pass_obj
def command(root: Path, device: str, repeats: int) -> int:
    device = choose_device(device)
    validate({"repeats": repeats}, repeats=whole(1))
    results = measure(device, repeats)
    print(f"{'benchmark':<40}{'ratio':>8}{'spread':>8}{'bar':>8}")
    for r in results:
        print(f"{r.name:<40}{r.ratio:8.3f}{r.spread:8.3f}{r.bar or '':>8}  {r.verdict}".rstrip())
    about = {
        "device": describe(device),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    path = root / "runs" / f"bench-{device.type}.json"
    path.parent.mkdir(exist_ok=True)
    write_whole(path, json.dumps(about | {"results": [asdict(r) for r in results]}, indent=1))
    return int(any(r.verdict == "broken" for r in results))
