"""A grid of parameter values: read from the console, checked before any work, a name per point."""

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product, takewhile
from pathlib import Path
from typing import Any

from amp_utils.course import CourseError, notebook
from amp_utils.course.run import check_names, parse_value
from amp_utils.lesson import ParameterError

Parameters = dict[str, Any]
Grid = dict[str, list[Any]]  # values by parameter


def read(pairs: Sequence[str], lesson: Path) -> Grid:
    """The grid that NAME=VALUE,VALUE texts describe, in the lesson's order. Raises CourseError."""
    given: dict[str, list[str]] = {}
    for pair in pairs:
        name, _, listed = (part.strip() for part in pair.partition("="))
        texts = [text.strip() for text in listed.split(",")]
        if not name or not all(texts):
            raise CourseError(
                f"--set {pair!r} has an empty name or value: give NAME=VALUE,VALUE.", 2
            )
        if name in given:
            raise CourseError(f"{name} is given twice: give all its values in one --set.", 2)
        given[name] = texts
    if not given:
        raise CourseError("There is nothing to sweep: give at least one --set NAME=VALUE,VALUE.", 2)
    known = check_names({name: parse_value(texts[0]) for name, texts in given.items()}, lesson)
    grid = {}
    for name in sorted(given, key=list(known).index):
        is_text = known[name]["inferred_type_name"] == "str"
        grid[name] = given[name] if is_text else [*map(parse_value, given[name])]
        for position, value in enumerate(grid[name]):
            if value in grid[name][:position]:
                raise CourseError(f"{name} = {value!r} is given twice: give each value once.", 2)
    return grid


def points(grid: Grid) -> dict[str, Parameters]:
    """Each point's parameters by its folder's name; the last parameter varies fastest.

    >>> list(points({"precision": ["fp32", "bf16"], "width": [64]}))
    ['precision=fp32,width=64', 'precision=bf16,width=64']
    """
    found = (dict(zip(grid, values, strict=True)) for values in product(*grid.values()))
    return {folder_name(parameters): parameters for parameters in found}


def folder_name(parameters: Mapping[str, Any]) -> str:
    """A name that tells the parameters apart on every file system, with a checksum where needed.

    >>> folder_name({"precision": "bf16", "lr": 0.001}), folder_name({"path": "../a"})
    ('precision=bf16,lr=0.001', 'path=.._a~c08fe364')
    """
    texts = [v if isinstance(v, str) else json.dumps(v) for v in parameters.values()]
    pairs = ["=".join(pair) for pair in zip(parameters, texts, strict=True)]
    said = ",".join(pairs)
    plain = all(re.fullmatch(r"[a-z0-9_]+=[a-z0-9_.+-]+", pair) for pair in pairs)
    same = [type(parse_value(text)) for text in texts] == [*map(type, parameters.values())]
    if plain and same and len(said) <= 100:  # `same`: "1" is not 1
        return said
    checksum = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:8]
    return re.sub(r"[^A-Za-z0-9_=,.+-]", "_", said)[:100] + f"~{checksum}"


def refusals(lesson: Path, points: Iterable[Parameters]) -> list[str]:
    """The sentences with which the lesson's own validation refuses some of the points."""
    first, *rest = [cell.source for cell in notebook.cells(lesson) if cell.is_code]
    checks = "\n".join(takewhile(lambda source: "validate(" in source, rest))
    found = []
    for parameters in points:
        namespace: dict[str, Any] = {}
        # Other errors are the run's to tell.
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            try:
                exec(first, namespace)
                namespace |= parameters
                exec(checks, namespace)
            except ParameterError as error:
                found.append(str(error))
    return list(dict.fromkeys(found))
