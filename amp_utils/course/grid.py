"""A grid of parameter values: read from the console, checked before any work, a name per point."""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from amp_utils.course import CourseError, notebook
from amp_utils.course.run import check_names, parameters_of, parse_value
from amp_utils.lesson import ParameterError

Parameters = dict[str, Any]
Grid = dict[str, list[Any]]  # values by parameter


def read(pairs: Sequence[str], lesson: Path) -> Grid:
    """The grid that `NAME=VALUE,VALUE` texts describe, in the lesson's own order of parameters.

    Raises CourseError for an unknown parameter and a repeated value; `refusals` has the rest.
    """
    known, grid = parameters_of(lesson), {}
    for pair in pairs:
        name, _, listed = (part.strip() for part in pair.partition("="))
        texts = [text.strip() for text in listed.split(",")]
        if not name or not all(texts):
            problem = "has an empty name or value: give NAME=VALUE,VALUE"
            raise CourseError(f"--set {pair!r} {problem}.", 2)
        if name in grid:
            raise CourseError(f"{name} is given twice: give all its values in one --set.", 2)
        kind = known.get(name, {}).get("inferred_type_name")
        values = grid[name] = texts if kind == "str" else [parse_value(text) for text in texts]
        check_names({name: values[0]}, lesson)
        for position, value in enumerate(values):
            if value in values[:position]:
                raise CourseError(f"{name} = {value!r} is given twice: give each value once.", 2)
    if not grid:
        raise CourseError("There is nothing to sweep: give at least one --set NAME=VALUE,VALUE.", 2)
    return {name: grid[name] for name in known if name in grid}


def points(grid: Grid) -> dict[str, Parameters]:
    """Each point's parameters by its folder's name; the last parameter varies fastest.

    >>> list(points({"precision": ["fp32", "bf16"], "width": [64]}))
    ['precision=fp32,width=64', 'precision=bf16,width=64']
    """
    found = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return {folder_name(parameters): parameters for parameters in found}


def folder_name(parameters: Mapping[str, Any]) -> str:
    """A name that tells the parameters apart on every file system, with a checksum where needed.

    >>> folder_name({"precision": "bf16", "lr": 0.001}), folder_name({"path": "../a"})
    ('precision=bf16,lr=0.001', 'path=.._a~c08fe364')
    """
    texts = {name: v if isinstance(v, str) else json.dumps(v) for name, v in parameters.items()}
    said = ",".join(f"{name}={text}" for name, text in texts.items())
    readable = len(said) <= 100 and all(
        re.fullmatch(r"[a-z0-9_]+=[a-z0-9_.+-]+", f"{name}={text}")
        and type(parse_value(text)) is type(parameters[name])  # "1" is not 1
        for name, text in texts.items()
    )
    if readable:
        return said
    checksum = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_=,.+-]", "_", said)[:100] + f"~{checksum}"


def refusals(lesson: Path, points: Iterable[Parameters]) -> list[str]:
    """The sentences with which the lesson's own validation refuses some of the points."""
    first, *rest = [cell.source for cell in notebook.cells(lesson) if cell.is_code]
    sentences = {}
    for parameters in points:
        namespace: dict[str, Any] = {}
        # Other errors are the run's to tell.
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(first, namespace)
                namespace |= parameters
                for source in rest:
                    if "validate(" not in source:
                        break
                    exec(source, namespace)
            except ParameterError as error:
                sentences[str(error)] = None
    return list(sentences)
