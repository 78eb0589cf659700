"""A grid of a lesson's parameters: read from the console, checked before any work, a readable name for each point."""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import nbformat
import papermill

from amp_utils.course import CourseError
from amp_utils.course.run import check_names, parse_value
from amp_utils.lesson import ParameterError

Parameters = dict[str, Any]
Grid = dict[str, list[Any]]  # values by name of the parameter
KINDS = {
    "int": ([int], "whole numbers"),
    "float": ([int, float], "numbers"),
    "bool": ([bool], "true or false"),
}


def read(pairs: Sequence[str], lesson: Path) -> Grid:
    """The grid that `NAME=VALUE,VALUE` texts describe, in the lesson's own order of parameters.

    Raises CourseError for what the lesson does not know, a value of another type, none at all, or one given twice.
    """
    known, grid = papermill.inspect_notebook(str(lesson)), {}
    for pair in pairs:
        name, _, listed = (part.strip() for part in pair.partition("="))
        texts = [text.strip() for text in listed.split(",")]
        if not name or not all(texts):
            raise CourseError(
                f"--set {pair!r} has an empty name or value: give NAME=VALUE,VALUE.", 2
            )
        if name in grid:
            raise CourseError(f"{name} is given twice: give all its values in one --set.", 2)
        kind = known.get(name, {}).get("inferred_type_name")
        values = grid[name] = texts if kind == "str" else [parse_value(text) for text in texts]
        types, allowed = KINDS.get(kind, (None, None))
        for position, value in enumerate(values):
            check_names({name: value}, [lesson])
            if types and type(value) not in types:
                raise CourseError(f"{name} = {value!r} is not allowed: give {allowed}.", 2)
            if value in values[:position]:
                raise CourseError(f"{name} = {value!r} is given twice: give each value once.", 2)
    if not grid:
        raise CourseError("There is nothing to sweep: give at least one --set NAME=VALUE,VALUE.", 2)
    return {name: grid[name] for name in known if name in grid}


def points(grid: Grid) -> dict[str, Parameters]:
    """The parameters of each point by its name; the last parameter varies fastest.

    >>> points({"precision": ["fp32", "bf16"], "width": [64]})
    {'precision=fp32,width=64': {'precision': 'fp32', 'width': 64}, 'precision=bf16,width=64': \
{'precision': 'bf16', 'width': 64}}
    """
    found = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return {folder_name(parameters): parameters for parameters in found}


def folder_name(parameters: Mapping[str, Any]) -> str:
    """The parameters as a folder's name. Where some file system would not like them, a checksum tells them apart.

    >>> folder_name({"precision": "bf16", "lr": 0.001}), folder_name({"path": "../a"})
    ('precision=bf16,lr=0.001', 'path=.._a-357e99f8')
    """
    said = ",".join(
        f"{name}={json.dumps(value).strip(chr(34))}" for name, value in parameters.items()
    )
    safe = re.sub(r"[^A-Za-z0-9_=,.+-]", "_", said)[:100]
    return (
        safe if safe == said.lower() else f"{safe}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"
    )


def refusals(lesson: Path, points: Iterable[Parameters]) -> list[str]:
    """The sentences with which the lesson itself refuses some of the points, in the cells before its work begins."""
    cells = [
        cell.source
        for cell in nbformat.read(lesson, as_version=4).cells
        if cell.cell_type == "code"
    ]
    sentences = {}
    for parameters in points:
        namespace: dict[str, Any] = {}
        with (
            contextlib.suppress(Exception),
            contextlib.redirect_stdout(io.StringIO()),
        ):  # the run tells of other errors
            try:
                exec(cells[0], namespace)
                namespace |= parameters
                for source in cells[1:]:
                    if "validate(" not in source:
                        break
                    exec(source, namespace)
            except ParameterError as error:
                sentences[str(error)] = None
    return list(sentences)
