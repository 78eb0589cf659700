"""The one reader of notebooks: which lessons there are, their cells and what they define."""

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from amp_utils.course import ROOT, CourseError, shown

_OUTLINE = tomllib.loads(Path(__file__).with_name("outline.toml").read_text("utf-8"))
PARTS, TAGS = _OUTLINE["parts"], _OUTLINE["tags"]


class Cell(NamedTuple):
    """What the author wrote into a cell, without its outputs."""

    is_code: bool
    source: str
    tags: set[str]
    id: str = ""


def lessons(notebooks: Path) -> list[Path]:
    """The written lessons in reading order. Raises CourseError if there are none."""
    paths = (notebooks / f"{name}.ipynb" for names in PARTS.values() for name in names)
    found = list(filter(Path.exists, paths))
    if not found:
        raise CourseError(f"There are no lessons in {shown(notebooks)}.", 2)
    return found


def choose(wanted: Sequence[str], notebooks: Path) -> list[Path]:
    """The lessons named by number or the beginning of their name, or all. Raises CourseError."""
    there = lessons(notebooks)
    chosen = []
    for text in wanted:
        name = Path(text).name.removesuffix(".ipynb").lower()
        exact = [path for path in there if path.stem.lower().split("_")[0] in (name, f"0{name}")]
        found = exact or [path for path in there if path.stem.lower().startswith(name)]
        if len(found) != 1:
            listing = ", ".join(path.stem for path in there)
            raise CourseError(f"{text!r} is not a lesson: give one of {listing}, or its number.", 2)
        chosen += found
    return chosen or there


def cells(path: Path) -> list[Cell]:
    """A lesson's cells, without the help of nbformat. Raises CourseError for a damaged file."""
    with _contents(path) as contents:
        return [
            Cell(c["cell_type"] == "code", "".join(c["source"]), tags(c), c.get("id", ""))
            for c in json.loads(contents)["cells"]
        ]


def read(path: Path) -> Any:
    """A valid notebook in nbformat's version 4. Raises CourseError for a damaged file."""
    import nbformat

    with _contents(path) as contents:
        node = nbformat.v4.reads(contents)
        nbformat.validate(node)
    return node


@contextmanager
def _contents(path: Path) -> Iterator[bytes]:
    contents = path.read_bytes()
    try:
        yield contents
    except Exception:  # a foreign file can make a reader stumble in any way
        raise CourseError(f"{shown(path)} is damaged or not a notebook.") from None


def tags(cell: Mapping[str, Any]) -> set[str]:
    """The tags of a cell."""
    return set(cell["metadata"].get("tags", []))


def definitions(path: Path, **given: Any) -> ModuleType:
    """A lesson's imports, functions, classes, UPPER_CASE constants and parameters, as a module.

    Nothing else runs: what the functions need (`device`, …) is `given`. Solutions replace stubs.
    """
    module = ModuleType(path.stem)
    for cell in cells(path):
        if cell.is_code and not cell.tags & {"exercise", "check"}:
            body = ast.parse(cell.source).body
            kept = body if "parameters" in cell.tags else list(filter(_defines, body))
            exec(compile(ast.Module(kept, type_ignores=[]), path.name, "exec"), vars(module))
            vars(module).update(given)
    return module


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(name, ast.Name) and name.id.isupper() for name in node.targets)
    return isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef)


def load(name: str, **given: Any) -> ModuleType:
    """The `definitions` of the lesson in this course that `name` chooses, for example "06"."""
    return definitions(choose([name], ROOT / "notebooks")[0], **given)
