"""Run a lesson's cells in this process, without Jupyter: `python -m amp_utils.course.cells`.

What a cell prints and shows is kept in a notebook, which is written again after every cell, so
that a run that is cut off leaves what it did. `gpu` starts one process for each lesson.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from amp_utils.course import write_whole

Output = dict[str, Any]


@contextlib.contextmanager
def outputs() -> Iterator[list[Output]]:
    """Collect what a block prints and displays, as a notebook's outputs.

    The collector stands in for IPython: figures and `lesson.record` ask for its `display`.
    """
    collected: list[Output] = []

    class Stream(io.TextIOBase):
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, text: str) -> int:
            last = collected[-1] if collected else {}
            if last.get("name") != self.name:
                last = {"output_type": "stream", "name": self.name, "text": ""}
                collected.append(last)
            last["text"] += text
            return len(text)

    def display(shown: Any, raw: bool = False, metadata: Mapping | None = None, **_: Any) -> None:
        data = shown if raw else {"text/plain": repr(shown)}
        metadata = {**(metadata or {})}
        collected.append({"output_type": "display_data", "data": data, "metadata": metadata})

    stand_in, module = ModuleType("IPython"), ModuleType("IPython.display")
    stand_in.version_info, stand_in.get_ipython = (9, 0, 0), lambda: None
    stand_in.display, module.display = module, display
    before = {name: sys.modules.get(name) for name in ("IPython", "IPython.display")}
    sys.modules |= {"IPython": stand_in, "IPython.display": module}
    try:
        with (
            contextlib.redirect_stdout(Stream("stdout")),
            contextlib.redirect_stderr(Stream("stderr")),
        ):
            yield collected
    finally:
        for name, was in before.items():
            sys.modules.pop(name) if was is None else sys.modules.update({name: was})


def execute(source: str, name: str, namespace: dict[str, Any]) -> list[Output]:
    """Run one cell; its outputs, with the value of a last expression. An error is an output too."""
    linecache.cache[name] = len(source), None, source.splitlines(True), name  # for tracebacks
    with outputs() as collected:
        try:
            body = ast.parse(source, name).body
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            exec(compile(ast.Module(body, []), name, "exec"), namespace)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
                if value is not None:
                    sys.modules["IPython.display"].display(value)
        except BaseException as error:  # a lesson may fail in any way; the parent goes on
            lines = "".join(traceback.format_exception(error)).splitlines()
            about = {"ename": type(error).__name__, "evalue": str(error), "traceback": lines}
            collected.append({"output_type": "error", **about})
    return collected


def run(
    lesson: Path, out: Path, parameters: Mapping[str, Any], after: Callable[[Mapping, dict], None]
) -> dict[str, Any]:
    """Run a lesson's cells until one fails, into the notebook `out`; returns that notebook.

    `after(cell, namespace)` is called after each code cell. The notebook's metadata have the
    lesson's seconds and the `error` that ended it, or None.
    """
    notebook = json.loads(lesson.read_bytes())
    module = ModuleType("__main__")  # where pickle looks for what cells define
    sys.modules["__main__"] = module
    about = notebook["metadata"]["amp_utils"] = {"error": "cut off", "parameters": parameters}
    begin, codes = time.perf_counter(), [c for c in notebook["cells"] if c["cell_type"] == "code"]
    for cell in codes:
        cell |= {"outputs": [], "execution_count": None}
    for count, cell in enumerate(codes, 1):
        source = "".join(cell["source"])
        cell["outputs"] = execute(source, f"<cell {count}>", vars(module))
        cell["execution_count"] = count
        if "parameters" in cell["metadata"].get("tags", []):
            vars(module).update(parameters)
        failed = [item for item in cell["outputs"] if item["output_type"] == "error"]
        if failed:
            about["error"] = f"cell {count}: {failed[0]['ename']}: {failed[0]['evalue']}"
        else:
            after(cell, vars(module))
        about |= {"cells": count, "seconds": round(time.perf_counter() - begin, 2)}
        if not failed and count == len(codes):
            about["error"] = None
        write_whole(out, json.dumps(notebook, indent=1))
        if failed:
            break
    return notebook


def evaluate(measure: Callable[[Callable], Any]) -> str:
    """A claim's value as JSON; runs beside a lesson and leaves its random numbers alone."""

    def raised(function: Callable[[], Any]) -> str:
        try:
            function()
        except Exception as error:  # a claim may be about any error
            return f"{type(error).__name__}: {error}"
        return ""

    with torch.random.fork_rng():
        return json.dumps(measure(raised))


def decoded(text: str) -> Any:
    """The value that `evaluate` wrote; NaN and Infinity, which JSON lacks, become words."""
    return json.loads(text, parse_constant=lambda constant: str(float(constant)))


def measuring(lesson: Path, values: dict[str, Any]) -> Callable[[Mapping, dict], None]:
    """An `after` for `run` that evaluates the lesson's claims into `values`, where it can."""
    entries = tomllib.loads((lesson.parent / "claims.toml").read_text("utf-8"))
    both = [*entries["claims"].items(), *entries.get("checks", {}).items()]
    ours = {name: entry for name, entry in both if entry.get("lesson") == lesson.stem}

    def after(cell: Mapping, namespace: dict[str, Any]) -> None:
        for name, entry in ours.items():
            if entry["cell"] in cell["metadata"].get("tags", []):
                with contextlib.suppress(Exception):  # it then counts as not measured
                    function = eval(f"lambda raised: ({entry['measure']})", namespace)
                    values[name] = decoded(evaluate(function))

    return after


def main(lesson: str, out: str, parameters: str) -> None:
    """Run a lesson into `out`, where the claims' values join the metadata in the end."""
    values: dict[str, Any] = {}
    os.chdir(Path(lesson).parent)  # as in a notebook
    notebook = run(Path(lesson), Path(out), json.loads(parameters), measuring(Path(lesson), values))
    peak = torch.cuda.max_memory_allocated()  # 0 where the lesson used no GPU
    notebook["metadata"]["amp_utils"] |= {"claims": values, "peak": peak}
    write_whole(Path(out), json.dumps(notebook, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
