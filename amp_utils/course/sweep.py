"""Sweep a lesson over a grid of parameters; each run has a folder of its own.

Finished notebooks are the only record, so the same command finishes what is missing."""

import contextlib
import hashlib
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import product, takewhile
from pathlib import Path
from typing import Any

import click
import joblib
from filelock import FileLock, Timeout
from joblib.externals.loky.process_executor import BrokenProcessPool
from rich.progress import track

from amp_utils.course import CourseError, notebook, shown, write_whole
from amp_utils.course.run import check_names, parse_value, run_lesson
from amp_utils.lesson import ParameterError

Parameters = Mapping[str, Any]
Grid = dict[str, list[Any]]  # values by parameter
LARGE = 100  # runs; more are rarely meant
NOTE = "sweep.json"  # what is swept in a folder
LOCK = ".lock"  # of a sweep's folder, and of each run's
AGAIN = "the same command finishes what is missing."


class Abandoned(BaseException):
    """The sweep that a run belongs to is gone."""


def read_grid(pairs: Sequence[str], lesson: Path) -> Grid:
    """The grid that NAME=VALUE,VALUE texts describe, in the lesson's order. Raises CourseError."""
    given: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, listed = (part.strip() for part in pair.partition("="))
        texts = [text.strip() for text in listed.split(",")]
        if not name or not all(texts) or name in given:
            raise CourseError(f"--set {pair!r}: give NAME=VALUE,VALUE, and each NAME once.", 2)
        given[name] = texts
    known = check_names({name: parse_value(texts[0]) for name, texts in given.items()}, lesson)
    grid = {}
    for name in sorted(given, key=list(known).index):
        is_text = known[name]["inferred_type_name"] == "str"
        grid[name] = given[name] if is_text else [*map(parse_value, given[name])]
        if len(set(grid[name])) < len(grid[name]):
            raise CourseError(f"--set {name} has the same value twice: give each value once.", 2)
    return grid


def folder_name(parameters: Parameters) -> str:
    """A name that tells the parameters apart on every file system, with a checksum where needed.

    >>> folder_name({"precision": "bf16", "lr": 0.001}), folder_name({"path": "../a"})
    ('precision=bf16,lr=0.001', 'path=.._a~c08fe364')
    """
    # A text that reads as a number or a truth value keeps its quotes, and so gets a checksum.
    values = parameters.values()
    texts = [v if parse_value(str(v)) == v == str(v) else json.dumps(v) for v in values]
    said = ",".join(map("=".join, zip(parameters, texts, strict=True)))
    if len(said) <= 100 and all(re.fullmatch(r"[a-z0-9_.+-]+", text) for text in texts):
        return said
    checksum = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_=,.+-]", "_", said)[:100] + f"~{checksum}"


def refusals(lesson: Path, points: Sequence[Parameters]) -> list[str]:
    """The sentences with which the lesson's own validation refuses some of the points."""
    first, *rest = [cell.source for cell in notebook.cells(lesson) if cell.is_code]
    checks = "\n".join(takewhile(lambda source: "validate(" in source, rest))
    found = {}
    for parameters in points:
        namespace: dict[str, Any] = {}
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(first, namespace)
                exec(checks, namespace | parameters)
        except ParameterError as error:
            found[str(error)] = parameters
        except Exception:  # other errors are the run's to tell
            pass
    return list(found)


@contextlib.contextmanager
def taken(out: Path, lesson: Path, grid: Grid) -> Iterator[None]:
    """Hold a sweep's folder by a lock that dies with this process; note what is swept in it."""
    source = [(cell.is_code, cell.source) for cell in notebook.cells(lesson)]
    version = hashlib.sha256(json.dumps(source).encode()).hexdigest()
    wanted = json.dumps({"lesson": lesson.stem, "version": version, "grid": grid}, indent=1)
    out.mkdir(parents=True, exist_ok=True)
    names = [path.name for path in out.iterdir() if path.name[0] != "."]
    if names and (NOTE not in names or (out / NOTE).read_text("utf-8", "replace") != wanted):
        problem = "holds something else, or the sweep of another lesson, version or grid"
        raise CourseError(f"{shown(out)} {problem}: give another --out, or remove it.", 2)
    try:
        lock = FileLock(out / LOCK).acquire(timeout=1)  # a killed sweep's worker may be trying it
    except Timeout:
        problem = "is in use by another sweep: give another --out, or wait"
        raise CourseError(f"{shown(out)} {problem}.", 2) from None
    with lock:
        write_whole(out / NOTE, wanted)
        yield


def execute(
    lesson: Path, folder: Path, parameters: Parameters, jobs: int
) -> tuple[str, str | None]:
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
                run_lesson(lesson, folder, parameters, go_on)
        except CourseError as error:
            return folder.name, str(error)
    return folder.name, None


def sweep(lesson: Path, grid: Grid, out: Path) -> int:
    """Execute what is missing with joblib's current backend, write the report; the exit status."""
    points = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    runs, failures = {folder_name(point): point for point in points}, {}
    eager = {"batch_size": 1, "pre_dispatch": "n_jobs", "return_as": "generator_unordered"}
    with joblib.Parallel(**eager) as parallel:
        checked = parallel([joblib.delayed(refusals)(lesson, points)])
        from amp_utils.course import report  # takes seconds, while the first worker checks

        (refused,) = checked
        if refused:
            raise CourseError("\n".join(refused), 2)
        with taken(out, lesson, grid):
            missing = [name for name in runs if not (out / name / lesson.name).exists()]
            run, jobs = joblib.delayed(execute), parallel.n_jobs
            results = parallel(run(lesson, out / name, runs[name], jobs) for name in missing)
            look = {"total": len(missing), "transient": True, "disable": not sys.stdout.isatty()}
            try:
                for name, reason in track(results, "runs", **look):
                    failures |= {name: reason} if reason else {}
                    print(f"{name}: {'failed' if reason else 'done'}", flush=True)
                    report.page(lesson, out / name)
            except (BrokenProcessPool, CancelledError):
                failures["A worker was killed or the cluster lost"] = AGAIN
            finished = report.write(out, lesson, runs, failures)
    for name, reason in failures.items():
        print(f"{name}: {reason}", file=sys.stderr)
    print(f"{finished} of {len(runs)} runs are finished: see {shown(out / 'report.html')}")
    return int(finished < len(runs))


def connect(scheduler: str) -> Any:
    """A client of a Dask cluster. Raises CourseError if there is none that can be used."""
    try:
        from distributed import Client

        client = Client(scheduler, timeout=10, set_as_default=False)
    except ImportError:
        raise CourseError("--scheduler needs Dask: pip install distributed.", 2) from None
    except (OSError, ValueError):
        raise CourseError(f"No Dask scheduler answers at {scheduler!r}.", 2) from None
    if set(client.nthreads().values()) != {1}:  # a run changes the working folder of its process
        raise CourseError("Give each worker one thread: dask worker HOST:PORT --nthreads 1.", 2)
    return client


@click.command(help="Run LESSON (a number or name) for every combination of the --set values.")
@click.argument("lesson")
@click.option("--set", "pairs", multiple=True, required=True, metavar="NAME=VALUE,VALUE")
@click.option("--out", type=Path, metavar="DIR", help="folder of the runs and their report")
@click.option("--jobs", type=click.IntRange(1), help="runs at a time (as many as there are cores)")
@click.option("--scheduler", metavar="HOST:PORT", help="let this Dask cluster execute the runs")
@click.option("--yes", is_flag=True, help=f"start a grid of more than {LARGE} runs")
@click.pass_obj
def command(root: Path, lesson: str, pairs, out, jobs, scheduler, yes) -> int:
    (path,) = notebook.choose([lesson], root / "notebooks")
    grid = read_grid(pairs, path)
    count = math.prod(map(len, grid.values()))
    if count > LARGE and not yes:
        raise CourseError(f"This grid has {count} runs: add --yes if you mean it.", 2)
    if scheduler and jobs:
        raise CourseError("--jobs is not for a cluster: a worker has one run at a time.", 2)
    out = out.absolute() if out else root / "runs" / f"sweep-{path.stem}"
    jobs = jobs or min(count, joblib.cpu_count())
    backend: dict[str, Any] = {"backend": "loky", "n_jobs": jobs, "idle_worker_timeout": 10}
    with connect(scheduler) if scheduler else contextlib.nullcontext() as client:
        if client:
            backend = {"backend": "dask", "client": client, "n_jobs": len(client.nthreads())}
        try:
            with joblib.parallel_config(**backend):
                return sweep(path, grid, out)
        except KeyboardInterrupt:
            raise CourseError(f"Interrupted: {AGAIN}", 130) from None
