"""Sweep a lesson over parameters: `python -m amp_utils.course sweep LESSON --set NAME=VALUE,VALUE`.

Each point of the grid is a run in a folder of its own. Finished notebooks are the only record of
what is done, so the same command finishes what is missing, however the last one ended.
"""

import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import click
import joblib
from filelock import FileLock, Timeout
from joblib.externals.loky.process_executor import BrokenProcessPool
from rich.console import Console

from amp_utils.course import CourseError, notebook, shown, write_whole
from amp_utils.course import grid as grids
from amp_utils.course.grid import Grid, Parameters
from amp_utils.course.run import LessonFailed, progress_bar, run_lesson
from amp_utils.lesson import validate, whole

Result = tuple[str, str | None]  # the name of a run, and why it failed
LARGE = 100  # runs; more are rarely meant
NOTE = "sweep.json"  # what is swept in a folder
LOCK = ".lock"  # of a sweep's folder, and of each run's


class Abandoned(BaseException):
    """The sweep that a run belongs to is gone."""


@contextlib.contextmanager
def taken(out: Path, lesson: Path, grid: Grid) -> Iterator[None]:
    """Hold the folder of a sweep, and note in it what is swept.

    The operating system releases the lock when this process ends, however it ends. Raises
    CourseError for a folder that is in use, or that holds anything else.
    """
    source = [(cell.is_code, cell.source) for cell in notebook.cells(lesson)]
    version = hashlib.sha256(json.dumps(source).encode()).hexdigest()
    wanted, found = {"lesson": lesson.stem, "version": version, "grid": grid}, {}
    out.mkdir(parents=True, exist_ok=True)
    note = out / NOTE
    if not note.exists() and any(path.name[0] != "." for path in out.iterdir()):
        raise CourseError(f"{shown(out)} holds something else: give another --out.", 2)
    try:
        lock = FileLock(out / LOCK).acquire(timeout=1)  # a killed sweep's worker may be trying it
    except Timeout:
        sentence = f"{shown(out)} is in use by another sweep: give another --out, or wait."
        raise CourseError(sentence, 2) from None
    with lock:
        with contextlib.suppress(ValueError):  # of a damaged note
            found = json.loads(note.read_text() if note.exists() else json.dumps(wanted))
        for what in wanted:
            if found.get(what) != wanted[what]:
                remedy = "give another --out, or remove that folder"
                sentence = f"{shown(out)} holds the sweep of another {what}: {remedy}."
                raise CourseError(sentence, 2)
        write_whole(note, json.dumps(wanted, indent=1))
        yield


def execute(lesson: Path, folder: Path, parameters: Parameters, jobs: int) -> Result:
    """Execute one run unless it is finished; returns its name, and the reason if it failed."""

    def go_on(**_: Any) -> None:
        with contextlib.suppress(Timeout), FileLock(folder.parent / LOCK, blocking=False):
            raise Abandoned  # nobody holds the sweep's lock: it was killed, or lost its cluster

    # Kernels side by side with more threads than cores would spin against each other.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, joblib.cpu_count() // jobs)))
    with FileLock(folder / LOCK):  # a worker of a killed sweep may still be at its last cell
        go_on()
        try:
            if not (folder / lesson.name).exists():
                run_lesson(lesson, folder, parameters, go_on, save_each_cell=False)
        except LessonFailed as error:
            return folder.name, str(error)
    return folder.name, None


def sweep(lesson: Path, grid: Grid, out: Path) -> int:
    """Execute what is missing, with joblib's current backend, and write the report.

    Returns the exit status. Raises CourseError if the lesson refuses a value or `out` is taken.
    """
    runs, failures = grids.points(grid), {}
    console = Console(highlight=False, markup=False, soft_wrap=True)
    eager = {"batch_size": 1, "pre_dispatch": "n_jobs", "return_as": "generator_unordered"}
    with joblib.Parallel(**eager) as parallel:
        checked = parallel([joblib.delayed(grids.refusals)(lesson, list(runs.values()))])
        from amp_utils.course import report  # takes seconds, while the first worker checks

        (refused,) = checked
        if refused:
            raise CourseError("\n".join(refused), 2)
        with taken(out, lesson, grid), progress_bar(console) as bar:
            missing = [name for name in runs if not (out / name / lesson.name).exists()]
            task = bar.add_task("runs", total=len(runs), completed=len(runs) - len(missing))
            run, jobs = joblib.delayed(execute), parallel.n_jobs
            tasks = [run(lesson, out / name, runs[name], jobs) for name in missing]
            try:
                for name, reason in parallel(tasks):
                    failures |= {name: reason} if reason else {}
                    console.print(f"{name}: {'failed' if reason else 'done'}")
                    bar.advance(task)
                    report.page(lesson, out / name)
            except (BrokenProcessPool, CancelledError):
                lost = "A worker was killed or the cluster lost"
                failures[lost] = "the same command finishes what is missing."
            page, finished = report.write(out, lesson, runs, failures)
    for name, reason in failures.items():
        print(f"{name}: {reason}", file=sys.stderr)
    print(f"{finished} of {len(runs)} runs are finished: see {shown(page)}")
    return int(finished < len(runs))


def connect(scheduler: str) -> Any:
    """A client of a Dask cluster. Raises CourseError if there is none that can be used."""
    try:
        from distributed import Client
        from distributed.comm import get_address_host_port
    except ImportError:
        sentence = "--scheduler needs Dask: install it with pip install distributed."
        raise CourseError(sentence, 2) from None
    try:
        get_address_host_port(scheduler)
        client = Client(scheduler, timeout=10, set_as_default=False)
    except (OSError, ValueError):
        sentence = f"No Dask scheduler answers at {scheduler!r}: give HOST:PORT."
        raise CourseError(sentence, 2) from None
    threads = client.nthreads().values()
    if set(threads) != {1}:  # a run changes the working folder of its process
        cluster = f"The cluster has {len(threads)} workers with {sum(threads)} threads"
        remedy = f"give each worker one, as dask worker {scheduler} --nthreads 1 does"
        raise CourseError(f"{cluster}: {remedy}.", 2)
    return client


@click.command(help="Run LESSON (a number or name) for every combination of the --set values.")
@click.argument("lesson")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE,VALUE", help="a parameter")
@click.option("--out", type=Path, metavar="DIR", help="folder of the runs and their report")
@click.option("--jobs", type=int, metavar="N", help="runs at a time (as many as there are cores)")
@click.option("--scheduler", metavar="ADDRESS", help="let this Dask cluster execute the runs")
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
    (path,) = notebook.choose([lesson], root / "notebooks")
    grid = grids.read(pairs, path)
    count = math.prod(map(len, grid.values()))
    if count > LARGE and not yes:
        raise CourseError(f"This grid has {count} runs: add --yes if you mean it.", 2)
    if scheduler and jobs:
        raise CourseError("--jobs is not for a cluster: a worker has one run at a time.", 2)
    jobs = min(count, joblib.cpu_count()) if jobs is None else jobs
    validate({"jobs": jobs}, jobs=whole(1))
    out = out.absolute() if out else root / "runs" / f"sweep-{path.stem}"
    backend: dict[str, Any] = {"backend": "loky", "n_jobs": jobs, "idle_worker_timeout": 10}
    with connect(scheduler) if scheduler else contextlib.nullcontext() as client:
        if client:
            backend = {"backend": "dask", "client": client, "n_jobs": len(client.nthreads())}
        try:
            with joblib.parallel_config(**backend):
                return sweep(path, grid, out)
        except KeyboardInterrupt:
            sentence = "Interrupted: the same command finishes what is missing."
            raise CourseError(sentence, 130) from None
