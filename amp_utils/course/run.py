"""Run lessons into `runs/`, where only a finished run gets the lesson's name.

A run under way is `.NAME.partial.ipynb`, a failed one `NAME.failed.ipynb`."""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from rich.progress import Progress

from amp_utils.course import CourseError, kernel, notebook, shown, write_whole

for name in ("papermill", "asyncio"):  # our sentences say what these would log
    logging.getLogger(name).setLevel(logging.CRITICAL)


def parse_value(text: str) -> int | float | bool | str:
    """A parameter's value as typed at the console: int, float, true or false, else text.

    >>> [parse_value(text) for text in ("100", "1e-3", "inf", "True", "bf16")]
    [100, 0.001, inf, True, 'bf16']
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def check_names(parameters: Mapping[str, Any], lesson: Path) -> dict[str, Any]:
    """What papermill knows of the lesson's parameters. Raises CourseError if it lacks one."""
    notebook.read(lesson)  # a damaged one ends here, in a sentence
    known = papermill.inspect_notebook(str(lesson))
    for name, value in parameters.items():
        if name not in known:
            problem = f"{lesson.stem} has no such parameter, give one of {', '.join(known)}"
            raise CourseError(f"{name} = {value!r} is not allowed: {problem}.", 2)
    return known


def failure(lesson: Path, error: Exception) -> str:
    """Why a lesson stopped, in one sentence."""
    if isinstance(error, DeadKernelError):
        return f"{lesson.stem}: the kernel died, most often for lack of memory."
    name = getattr(error, "ename", type(error).__name__)
    message = getattr(error, "evalue", str(error)).strip() or "no message"
    if name == "ParameterError":  # its message is a sentence already
        return message
    where = f", cell {error.exec_count}" if hasattr(error, "exec_count") else ""
    return f"{lesson.stem}{where}: {name}: {message}".splitlines()[0]


def run_lesson(
    path: Path, runs: Path, parameters: Mapping[str, Any], step: Callable[..., None]
) -> None:
    """Execute one lesson into `runs`, calling `step` after each cell. Raises CourseError."""
    finished, under_way = runs / path.name, runs / f".{path.stem}.partial.ipynb"
    failed = finished.with_suffix(".failed.ipynb")
    runs.mkdir(exist_ok=True)
    for older in (under_way, failed, finished):
        older.unlink(missing_ok=True)
    try:
        papermill.execute_notebook(
            path,
            under_way,
            parameters,
            cwd=path.parent,
            progress_bar=False,
            start_timeout=300,  # a crowded machine may need more than papermill's minute
            on_cell_executed=step,
            coalesce_streams=True,  # one output per stream, however often it was flushed
            **kernel.OPTIONS,
        )
        under_way.replace(finished)
    except Exception as error:  # also an unknown kernel or a full disk
        see = f" (see {shown(under_way.replace(failed))})" if under_way.exists() else ""
        raise CourseError(failure(path, error) + see) from None
    finally:
        under_way.unlink(missing_ok=True)


def keep_outputs(path: Path, run: Path) -> None:
    """Replace a lesson's saved outputs by those of a run with its default parameters."""
    saved = notebook.read(path)
    for cell, executed in zip(saved.cells, notebook.read(run).cells, strict=True):
        if cell.cell_type == "code":
            cell.update(outputs=executed.outputs, execution_count=executed.execution_count)
    write_whole(path, nbformat.writes(saved) + "\n")


@click.command(help="Run LESSONs (numbers or names; all if none is given), also after failures.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option("-p", "pairs", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter")
@click.option("--save", is_flag=True, help="run on the CPU and keep the outputs in notebooks/")
@click.pass_obj
def command(root: Path, lessons: Sequence[str], pairs: Sequence[Sequence[str]], save: bool) -> int:
    parameters = {name: parse_value(value) for name, value in pairs}
    if save and parameters:
        raise CourseError("--save takes no parameters: it keeps what the defaults give.", 2)
    chosen, runs, status = notebook.choose(lessons, root / "notebooks"), root / "runs", 0
    for path in chosen:
        check_names(parameters, path)
    if save:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    cells = sum(cell.is_code for path in chosen for cell in notebook.cells(path))
    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("cells", total=cells)
        for path in chosen:
            bar.update(task, description=path.stem)
            begin = time.perf_counter()
            try:
                run_lesson(path, runs, parameters, lambda **_: bar.advance(task))
                if save:
                    keep_outputs(path, runs / path.name)
                print(f"{path.stem}: done after {time.perf_counter() - begin:.1f} s", flush=True)
            except CourseError as error:
                status = 1
                print(error, file=sys.stderr)
    return status
