"""Run a lesson over a grid of parameters: `python -m amp_utils.course sweep LESSON --set NAME=VALUE,VALUE … [--out DIR]`.

Each point of the grid is a run with a folder of its own in DIR, executed as `amp_utils.run` does it: by papermill, and
only a finished run's notebook has the lesson's name. Nothing else is noted of what has been done, so the same command
finishes what is missing, however the last one ended. `amp_utils.report` reads the finished notebooks back.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import click
import joblib
import nbformat
from joblib.externals.loky.process_executor import BrokenProcessPool
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from amp_utils.course import CourseError, report, write_whole
from amp_utils.course import grid as grids
from amp_utils.course.grid import Grid, Parameters
from amp_utils.course.notebook import choose
from amp_utils.course.run import LessonFailed, run_lesson
from amp_utils.lesson import validate, whole

LARGE = 100  # runs; more than these are rarely meant
NOTE = "sweep.json"  # what is swept in a folder


class Abandoned(BaseException):
    """The sweep that a run belongs to is gone."""


@contextlib.contextmanager
def locked(folder: Path, patience: float) -> Iterator[None]:
    """Hold a folder's lock, which the operating system releases when this process ends, however it ends.

    Raises BlockingIOError where another process holds it for more than `patience` seconds.
    """
    deadline = time.monotonic() + patience
    with (folder / ".lock").open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
        yield


def take_folder(out: Path, lesson: Path, grid: Grid) -> None:
    """Note in `out` what is swept; raises CourseError where it is the folder of another sweep."""
    cells = [(cell.cell_type, cell.source) for cell in nbformat.read(lesson, as_version=4).cells]
    source = hashlib.sha256(json.dumps(cells).encode()).hexdigest()
    wanted, note = {"lesson": lesson.stem, "version": source, "grid": grid}, out / NOTE
    found = json.loads(note.read_text()) if note.exists() else wanted
    for what in wanted:
        if found[what] != wanted[what]:
            raise CourseError(
                f"{out} holds the sweep of another {what}: give another --out, or remove that folder.",
                2,
            )
    write_whole(note, json.dumps(wanted, indent=1))


def execute(
    lesson: Path, folder: Path, parameters: Parameters, jobs: int
) -> tuple[str, str | None]:
    """Execute one run where it is not finished yet; returns its name, and the reason where it failed."""

    def go_on(**_: Any) -> None:
        with contextlib.suppress(BlockingIOError), locked(folder.parent, 0):
            raise Abandoned  # nobody holds the sweep's lock: it was killed, or has lost its cluster

    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # what it logs is said in a sentence
    # Kernels side by side with more threads than cores would spin against each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, joblib.cpu_count() // jobs)))
    folder.mkdir(exist_ok=True)
    with locked(folder, math.inf):  # a worker of a killed sweep may still be at its last cell
        go_on()
        try:
            if not (folder / lesson.name).exists():
                run_lesson(lesson, folder, parameters, go_on, save_each_cell=False)
        except LessonFailed as error:
            return folder.name, str(error)
        except Exception as error:
            return (
                folder.name,
                f"{lesson.stem} could not be run: {type(error).__name__}: {error}".splitlines()[0],
            )
    return folder.name, None


def sweep(lesson: Path, grid: Grid, out: Path) -> int:
    """Execute what is missing, with the current backend of joblib, and write the report; returns the exit status.

    Raises CourseError where the lesson refuses a value, or `out` is not this sweep's.
    """
    runs = grids.points(grid)
    failures: dict[str, str] = {}
    stopped: list[str] = []
    with (
        joblib.Parallel(
            batch_size=1, pre_dispatch="n_jobs", return_as="generator_unordered"
        ) as parallel,
        contextlib.ExitStack() as until_the_end,
    ):
        checked = parallel([joblib.delayed(grids.refusals)(lesson, list(runs.values()))])
        report.prepare()  # while the first worker comes up and checks
        (refused,) = checked
        if refused:
            raise CourseError("\n".join(refused), 2)
        out.mkdir(parents=True, exist_ok=True)
        if not (out / NOTE).exists() and any(path.name[0] != "." for path in out.iterdir()):
            raise CourseError(f"{out} holds something that is not a sweep: give another --out.", 2)
        try:
            until_the_end.enter_context(
                locked(out, patience=1)
            )  # a killed sweep's worker may just be trying it
        except BlockingIOError:
            raise CourseError(
                f"{out} is in use by another sweep: give another --out, or wait.", 2
            ) from None
        take_folder(out, lesson, grid)
        missing = [name for name in runs if not (out / name / lesson.name).exists()]
        tasks = [
            joblib.delayed(execute)(lesson, out / name, runs[name], parallel.n_jobs)
            for name in missing
        ]
        try:
            for name, reason in progress(parallel(tasks), len(runs), len(missing)):
                failures |= {name: reason} if reason else {}
                report.page(lesson, out / name)
        except (BrokenProcessPool, CancelledError):
            stopped = [
                "A worker was killed or the cluster lost: the same command finishes what is missing."
            ]
        page, finished = report.write(out, lesson, runs, failures)
    for sentence in [*(f"{name}: {reason}" for name, reason in failures.items()), *stopped]:
        print(sentence, file=sys.stderr)
    print(f"{finished} of {len(runs)} runs are finished: see {os.path.relpath(page)}")
    return int(finished < len(runs))


def progress(
    results: Iterable[tuple[str, str | None]], total: int, missing: int
) -> Iterator[tuple[str, str | None]]:
    """Pass the results on as they come, with a line for each, and a progress bar at a terminal."""
    console = Console(highlight=False, markup=False, soft_wrap=True)
    columns = TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task("", total=total, completed=total - missing)
        for name, reason in results:
            console.print(f"{name}: {'failed' if reason else 'done'}")
            bar.advance(task)
            yield name, reason


def connect(scheduler: str) -> Any:
    """A client of the Dask cluster. Raises CourseError where there is none that can be used."""
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ImportError:
        raise CourseError(
            "--scheduler needs Dask: install it with pip install distributed.", 2
        ) from None
    try:
        get_address_host_port(scheduler)
        client = Client(scheduler, timeout=10, set_as_default=False)
    except (OSError, ValueError):
        raise CourseError(
            f"No Dask scheduler answers at {scheduler!r}: give HOST:PORT.", 2
        ) from None
    threads = client.nthreads().values()
    if set(threads) != {1}:  # a run changes the working folder of its process
        raise CourseError(
            f"The cluster has {len(threads)} workers with {sum(threads)} threads: give each worker one, "
            f"as dask worker {scheduler} --nthreads 1 does.",
            2,
        )
    return client


@click.command(
    help="Run LESSON (a number or name) for every combination of the values that are --set."
)
@click.argument("lesson")
@click.option(
    "--set", "pairs", multiple=True, metavar="NAME=VALUE,VALUE", help="a parameter; may be repeated"
)
@click.option(
    "--out", type=Path, metavar="DIR", help="folder for the runs and the report (runs/sweep-LESSON)"
)
@click.option("--jobs", type=int, metavar="N", help="runs at a time (as many as there are cores)")
@click.option(
    "--scheduler", metavar="ADDRESS", help="hand the runs to the Dask cluster at this address"
)
@click.option("--yes", is_flag=True, help=f"start a grid of more than {LARGE} runs")
@click.pass_obj
def command(
    root: Path,
    lesson: str,
    pairs: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    scheduler: str | None,
    yes: bool,
) -> int:
    (path,) = choose([lesson], root / "notebooks")
    grid = grids.read(pairs, path)
    count = math.prod(map(len, grid.values()))
    if count > LARGE and not yes:
        raise CourseError(f"This grid has {count} runs: add --yes if you mean it.", 2)
    if scheduler and jobs:
        raise CourseError(
            "--jobs is not for a cluster: each of its workers has one run at a time.", 2
        )
    jobs = min(count, joblib.cpu_count()) if jobs is None else jobs
    validate({"jobs": jobs}, jobs=whole(1))
    out = out.absolute() if out else root / "runs" / f"sweep-{path.stem}"
    with connect(scheduler) if scheduler else contextlib.nullcontext() as client:
        on_cluster = (
            {"backend": "dask", "client": client, "n_jobs": len(client.nthreads())}
            if client
            else {}
        )
        with joblib.parallel_config(
            **on_cluster or {"backend": "loky", "n_jobs": jobs, "idle_worker_timeout": 10}
        ):
            return sweep(path, grid, out)
