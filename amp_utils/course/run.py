"""Run lessons from the console, with parameters: `python -m amp_utils.course run [LESSON ...] [-p NAME VALUE ...] [--save]`.

A lesson is executed by papermill, from `notebooks/` into `runs/`, where only a finished run gets the lesson's name: one
under way is `.NAME.partial.ipynb`, one that failed `NAME.failed.ipynb`. With `--save`, nbclient executes it on the CPU
and its outputs take the place of the saved ones in `notebooks/`.
"""

import contextlib
import difflib
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import nbclient
import nbformat
import papermill
from nbclient.exceptions import CellExecutionError, DeadKernelError
from papermill.exceptions import PapermillExecutionError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from amp_utils.course import CourseError
from amp_utils.course.notebook import choose

Step = Callable[
    ..., None
]  # called by nbclient with cell and cell_index when a cell has been executed
# For both ways to execute: one output per stream, however it was flushed; a kernel that keeps its own log to itself
# (a warning at its start, a traceback when Ctrl-C ends it).
CLIENT = {"coalesce_streams": True, "extra_arguments": ["--IPKernelApp.log_level=50"]}


class LessonFailed(Exception):
    """A lesson stopped: `outcome` is a word or two for the table, the message one sentence for the console."""

    def __init__(self, outcome: str, sentence: str):
        super().__init__(sentence)
        self.outcome = outcome


def parse_value(text: str) -> int | float | bool | str:
    """A parameter's value as typed at the console: whole number, number, true or false, else text.

    >>> [parse_value(text) for text in ("100", "1e-3", "inf", "True", "bf16")]
    [100, 0.001, inf, True, 'bf16']
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def check_names(parameters: Mapping[str, Any], lessons: Sequence[Path]) -> None:
    """Raise CourseError where a lesson has no parameter of a given name; papermill itself would only warn."""
    for path in lessons if parameters else []:
        known = list(papermill.inspect_notebook(str(path)))
        for name, value in parameters.items():
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                allowed = f"give one of {', '.join(known)}{hint}" if known else "it has none"
                raise CourseError(
                    f"{name} = {value!r} is not allowed: {path.stem} has no such parameter, {allowed}.",
                    2,
                )


def run_lesson(
    path: Path, runs: Path, parameters: Mapping[str, Any], step: Step, save_each_cell: bool = True
) -> None:
    """Execute one lesson through papermill into `runs`. Raises LessonFailed.

    Only a finished run gets the lesson's name, and an older result is removed first. To save at each cell takes a tenth
    of a short run; without it nothing is left to look at where the kernel dies.
    """
    under_way, failed, finished = (
        runs / name.format(path.stem)
        for name in (".{}.partial.ipynb", "{}.failed.ipynb", "{}.ipynb")
    )
    runs.mkdir(exist_ok=True)
    for older in (under_way, failed, finished):  # an older result must not pass for this run's
        older.unlink(missing_ok=True)
    try:
        papermill.execute_notebook(
            path,
            under_way,
            parameters,
            cwd=path.parent,
            progress_bar=False,
            on_cell_executed=step,
            request_save_on_cell_execute=save_each_cell,
            **CLIENT,
        )
        os.replace(under_way, finished)
    except PapermillExecutionError as error:
        os.replace(under_way, failed)
        where = f"cell {error.exec_count or error.cell_index + 1}; see {failed.parent.name}/{failed.name}"
        raise explained(path.stem, error.ename, error.evalue, where) from None
    except DeadKernelError:
        if under_way.exists():
            os.replace(under_way, failed)
        raise dead(path.stem) from None
    finally:
        under_way.unlink(missing_ok=True)


def save_lesson(path: Path, step: Step) -> None:
    """Execute one lesson and store its outputs in its own file, which changes only when all went well.

    Source, cell ids, metadata and the results that `lesson.record` left stay; times of execution are not stored.
    """
    notebook = nbformat.read(path, as_version=4)
    metadata = nbformat.from_dict(notebook.metadata)
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(
        notebook, resources=resources, record_timing=False, on_cell_executed=step, **CLIENT
    )
    try:
        with client.setup_kernel():
            for index, cell in enumerate(notebook.cells):
                client.execute_cell(cell, index)
    except CellExecutionError as error:
        count = max(cell.get("execution_count") or 0 for cell in notebook.cells)
        raise explained(
            path.stem, error.ename, error.evalue, f"cell {count}; {path.name} is as before"
        ) from None
    except DeadKernelError:
        raise dead(path.stem) from None
    notebook.metadata = metadata
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    under_way = path.with_name(f".{path.stem}.partial.ipynb")
    try:
        nbformat.write(notebook, under_way)
        os.replace(under_way, path)
    finally:
        under_way.unlink(missing_ok=True)


def explained(lesson: str, name: str, message: str, where: str) -> LessonFailed:
    """What to say of an exception in a lesson; a ParameterError's message is a sentence already."""
    if name == "ParameterError":
        return LessonFailed("parameter refused", message)
    first_line = (message.strip().splitlines() or ["no message"])[0]
    return LessonFailed(name, f"{lesson}: {name}: {first_line} ({where})")


def dead(lesson: str) -> LessonFailed:
    """What to say of a kernel that ended in the middle of a lesson."""
    return LessonFailed(
        "kernel died", f"{lesson}: the kernel died, which is most often a lack of memory."
    )


@click.command(help="Run LESSONs (numbers or names; all where none is given) and show how it went.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option(
    "-p", "pairs", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter; may be repeated"
)
@click.option("--save", is_flag=True, help="run on the CPU and keep the outputs in notebooks/")
@click.pass_obj
def command(
    root: Path, lessons: tuple[str, ...], pairs: tuple[tuple[str, str], ...], save: bool
) -> int:
    logging.getLogger("papermill").setLevel(
        logging.CRITICAL
    )  # what it logs is said here in a sentence
    parameters = {name: parse_value(value) for name, value in pairs}
    if save and parameters:
        raise CourseError(
            "--save takes no parameters: the saved outputs are those of the notebook's own.", 2
        )
    chosen = choose(lessons, root / "notebooks")
    check_names(parameters, chosen)
    if save:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return run_all(chosen, save_lesson)
    return run_all(chosen, partial(run_lesson, runs=root / "runs", parameters=parameters))


def run_all(lessons: Sequence[Path], execute: Callable[..., None]) -> int:
    """Call `execute(path, step=...)` for each lesson, whatever became of the one before; returns the exit status.

    A terminal shows a progress bar and then a table; elsewhere there is a line for each lesson, then the table.
    """
    console = Console()
    table = Table(
        "lesson", Column("seconds", justify="right"), "outcome", box=SIMPLE_HEAD, pad_edge=False
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells"),
        TimeElapsedColumn(),
    )
    failures = []
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        for number, path in enumerate(lessons, 1):
            cells = sum(
                cell.cell_type == "code" for cell in nbformat.read(path, as_version=4).cells
            )
            task = progress.add_task(f"{path.stem} ({number} of {len(lessons)})", total=cells)
            begin, outcome = time.perf_counter(), "done"
            try:
                execute(path, step=lambda task=task, **_: progress.advance(task))
            except LessonFailed as error:
                failures.append(error)
                outcome = error.outcome
            progress.remove_task(task)
            table.add_row(path.stem, f"{time.perf_counter() - begin:.1f}", outcome)
            if len(lessons) > 1 and not console.is_terminal:
                print(
                    f"{path.stem}: {outcome} after {time.perf_counter() - begin:.1f} s", flush=True
                )
    if len(lessons) > 1 or not failures:  # of a single failure the sentence says it all
        console.print(table)
    for error in failures:
        print(error, file=sys.stderr)
    return 1 if failures else 0
