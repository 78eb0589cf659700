"""Run lessons: `python -m amp_utils.course run [LESSON ...] [-p NAME VALUE ...] [--save]`.

papermill executes a lesson of `notebooks/` into `runs/`. Only a finished run gets the lesson's
name: one under way is `.NAME.partial.ipynb`, a failed one `NAME.failed.ipynb`. With `--save` a
lesson runs on the CPU, and its outputs replace the saved ones in `notebooks/`.
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
from tempfile import TemporaryDirectory
from typing import Any

import click
import nbformat
import papermill
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from amp_utils.course import CourseError, notebook, shown, write_whole

Step = Callable[..., None]  # nbclient calls it with cell and cell_index after each executed cell
for name in ("papermill", "asyncio"):  # our sentences say what these would log
    logging.getLogger(name).setLevel(logging.CRITICAL)


class LessonFailed(Exception):
    """A lesson stopped: `outcome` is a word or two for a table, the message one sentence.

    `notebook` is the file that shows more, if any.
    """

    def __init__(self, outcome: str, sentence: str, notebook: Path | None = None):
        super().__init__(sentence)
        self.outcome, self.notebook = outcome, notebook


def parse_value(text: str) -> int | float | bool | str:
    """A parameter's value as typed at the console: int, float, true or false, else text.

    >>> [parse_value(text) for text in ("100", "1e-3", "inf", "True", "bf16")]
    [100, 0.001, inf, True, 'bf16']
    """
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


def parameters_of(lesson: Path) -> dict[str, Any]:
    """What papermill knows of each parameter. Raises CourseError for a damaged notebook."""
    notebook.read(lesson)
    return papermill.inspect_notebook(str(lesson))


def check_names(parameters: Mapping[str, Any], lesson: Path) -> None:
    """Raise CourseError for a parameter that the lesson lacks; papermill would only warn."""
    known = list(parameters_of(lesson))
    for name in [name for name in parameters if name not in known]:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        allowed = f"give one of {', '.join(known)}{hint}" if known else "it has none"
        problem = f"{lesson.stem} has no such parameter, {allowed}"
        raise CourseError(f"{name} = {parameters[name]!r} is not allowed: {problem}.", 2)


def run_lesson(
    path: Path, runs: Path, parameters: Mapping[str, Any], step: Step, save_each_cell: bool = True
) -> None:
    """Execute one lesson into `runs`, where an older result is removed first. Raises LessonFailed.

    Saving after each cell takes a tenth of a short run. Without it, a kernel that dies leaves no
    notebook to look at.
    """
    endings = ".{}.partial.ipynb", "{}.failed.ipynb", "{}.ipynb"
    under_way, failed, finished = (runs / ending.format(path.stem) for ending in endings)
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
            on_cell_executed=step,
            request_save_on_cell_execute=save_each_cell,
            coalesce_streams=True,  # one output per stream, however often it was flushed
            extra_arguments=["--IPKernelApp.log_level=50"],  # no traceback after Ctrl-C
        )
        os.replace(under_way, finished)
    except PapermillExecutionError as error:
        os.replace(under_way, failed)
        if error.ename == "ParameterError":  # its message is a sentence already
            raise LessonFailed("parameter refused", error.evalue) from None
        reason = (error.evalue.strip().splitlines() or ["no message"])[0]
        where = f"{path.stem}, cell {error.exec_count or error.cell_index + 1}"
        raise LessonFailed(error.ename, f"{where}: {error.ename}: {reason}", failed) from None
    except DeadKernelError:
        if under_way.exists():
            os.replace(under_way, failed)
        sentence = f"{path.stem}: the kernel died, most often for lack of memory."
        raise LessonFailed("kernel died", sentence) from None
    except Exception as error:  # such as an unknown kernel, or a full disk
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise LessonFailed("not run", f"{path.stem} could not be run: {reason}") from None
    finally:
        under_way.unlink(missing_ok=True)


def save_lesson(path: Path, step: Step) -> None:
    """Execute one lesson and replace its saved outputs, once all went well. Raises LessonFailed."""
    with TemporaryDirectory() as folder:
        try:
            run_lesson(path, Path(folder), {}, step, save_each_cell=False)
        except LessonFailed as error:
            sentence = f"{error} ({path.name} is as before)"
            raise LessonFailed(error.outcome, sentence) from None
        executed = notebook.read(Path(folder, path.name))
    saved = notebook.read(path)
    for cell, run in zip(saved.cells, executed.cells, strict=True):
        if cell.cell_type == "code":
            cell.update(outputs=run.outputs, execution_count=run.execution_count)
    write_whole(path, nbformat.writes(saved) + "\n")


def progress_bar(console: Console) -> Progress:
    """A bar that shows at a terminal only, and vanishes in the end."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    elapsed, hidden = TimeElapsedColumn(), not console.is_terminal
    return Progress(*columns, elapsed, console=console, disable=hidden, transient=True)


def run_all(lessons: Sequence[Path], execute: Callable[..., None]) -> int:
    """Call `execute(path, step=...)` for every lesson, also after failures, and show a table.

    Returns the exit status.
    """
    sizes = [sum(cell.is_code for cell in notebook.cells(path)) for path in lessons]
    console, failures = Console(), []
    seconds = Column("seconds", justify="right")
    table = Table("lesson", seconds, "outcome", box=SIMPLE_HEAD, pad_edge=False)
    with progress_bar(console) as bar:
        for number, (path, cells) in enumerate(zip(lessons, sizes, strict=True), 1):
            task = bar.add_task(f"{path.stem} ({number} of {len(lessons)}), cells", total=cells)
            begin, outcome = time.perf_counter(), "done"
            try:
                execute(path, step=lambda task=task, **_: bar.advance(task))
            except LessonFailed as error:
                failures.append(error)
                outcome = error.outcome
            bar.remove_task(task)
            took = f"{time.perf_counter() - begin:.1f}"
            table.add_row(path.stem, took, outcome)
            if len(lessons) > 1 and not console.is_terminal:
                print(f"{path.stem}: {outcome} after {took} s", flush=True)
    if len(lessons) > 1 or not failures:  # a single failure's sentence says it all
        console.print(table)
    for error in failures:
        more = f" (see {shown(error.notebook)})" if error.notebook else ""
        print(f"{error}{more}", file=sys.stderr)
    return int(bool(failures))


@click.command(help="Run LESSONs (numbers or names; all if none is given) and show how it went.")
@click.argument("lessons", nargs=-1, metavar="[LESSON]...")
@click.option("-p", "pairs", nargs=2, multiple=True, metavar="NAME VALUE", help="a parameter")
@click.option("--save", is_flag=True, help="run on the CPU and keep the outputs in notebooks/")
@click.pass_obj
def command(
    root: Path, lessons: tuple[str, ...], pairs: tuple[tuple[str, str], ...], save: bool
) -> int:
    parameters = {name: parse_value(value) for name, value in pairs}
    if save and parameters:
        raise CourseError("--save takes no parameters: it keeps what the defaults give.", 2)
    chosen = notebook.choose(lessons, root / "notebooks")
    for path in chosen:
        check_names(parameters, path)
    if save:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return run_all(chosen, save_lesson)
    return run_all(chosen, partial(run_lesson, runs=root / "runs", parameters=parameters))
