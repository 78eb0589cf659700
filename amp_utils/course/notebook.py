"""The one reader of notebooks: the table of lessons, their cells and tags, and what they define."""

import ast
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from amp_utils.course import ROOT, CourseError, shown

if TYPE_CHECKING:
    from nbformat import NotebookNode

PARTS = {
    "Start": ["00_start_here"],
    "1 · Numbers": ["01_float_formats", "02_numerical_stability"],
    "2 · Autocast": ["03_autocast_dtypes", "04_custom_autograd_functions"],
    "3 · Gradient scaling": [
        "05_gradient_underflow",
        "06_grad_scaler",
        "07_unscaled_clipping",
        "08_accumulation_and_penalty",
        "09_multiple_optimizers",
    ],
    "4 · Training": [
        "10_amp_recipe",
        "11_checkpoint_and_inference",
        "12_checkerboard_cnn",
        "13_data_parallel",
    ],
    "5 · Mastery": ["14_debugging_clinic", "15_precision_ladder", "16_small_language_model"],
    "Appendices": [
        "A1_tensors_and_autograd",
        "A2_modules",
        "A3_broadcasting",
        "A4_operators",
        "A5_compile",
        "A6_data_loading",
    ],
}
ORDER = [name for names in PARTS.values() for name in names]
START = ORDER[0]
# Every tag that a cell may carry; the table in .github/CONTRIBUTING.md is made from this one.
TAGS = {
    "parameters": "the first code cell: `name: type = value  # help`, one a line; papermill sets them",
    "predict": "a question that begins with **Predict.**; code and a folded `Answer` follow it",
    "exercise-text": "heading, difficulty and minutes of an exercise; its four cells follow",
    "exercise": "the stub, which raises `NotImplementedError`; tests use the solution instead",
    "check": "a `@lesson.check` function, which prints ✎, ✗ with the reason, or ✓",
    "hint": "a folded hint",
    "solution": "the solution, which must pass the check; left out of what students get",
    "navigation": "the last cell: previous, contents, next; written by `outline`",
    "course-map": "the table of lessons in lesson 0; written by `outline`",
    "entrances": "the two ways into the course in lesson 0; written by `outline`",
    "old-names": "may name a part of torch that has been renamed or removed",
    "claim:…": "shows a claim of notebooks/claims.toml, whose `measure` is evaluated after this cell",
    "nbval-ignore-output": "differs by machine (times, memory, device), so nobody compares its output",
}


@dataclass(frozen=True)
class Cell:
    """What the author wrote into a cell, without its outputs."""

    is_code: bool
    source: str
    tags: frozenset[str]


def lessons(notebooks: Path) -> list[Path]:
    """The written lessons in reading order; other files count for nothing.

    Raises CourseError if there are none.
    """
    found = [path for name in ORDER if (path := notebooks / f"{name}.ipynb").exists()]
    if not found:
        raise CourseError(f"There are no lessons in {shown(notebooks)}.", 2)
    return found


def choose(wanted: Sequence[str], notebooks: Path) -> list[Path]:
    """The lessons named by number or by the beginning of their name, or all if none is named.

    Raises CourseError for a name that fits no lesson, or several.
    """
    there = lessons(notebooks)
    chosen = []
    for text in wanted:
        name = Path(text).name.removesuffix(".ipynb").lower()
        exact = [path for path in there if path.stem.lower().split("_")[0] in (name, f"0{name}")]
        found = exact or [path for path in there if path.stem.lower().startswith(name)]
        if len(found) != 1:
            why = "is the beginning of several lessons" if found else "is not a lesson"
            listing = ", ".join(path.stem for path in there)
            raise CourseError(f"{text!r} {why}: give one of {listing}, or its number.", 2)
        chosen += found
    return chosen or there


def cells(path: Path) -> list[Cell]:
    """A lesson's cells, without the help of nbformat. Raises CourseError for a damaged file."""
    found = []
    with _damage_named(path):
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            tags = frozenset(cell["metadata"].get("tags", []))
            found.append(Cell(cell["cell_type"] == "code", "".join(cell["source"]), tags))
    return found


def read(path: Path) -> "NotebookNode":
    """A valid notebook in nbformat's version 4. Raises CourseError for a damaged file."""
    import nbformat

    with _damage_named(path):
        node = nbformat.v4.reads(path.read_text("utf-8"))
        nbformat.validate(node)
    return node


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # a foreign file can make a reader stumble in any way
        problem = f"is damaged or not a notebook: {type(error).__name__}"
        raise CourseError(f"{shown(path)} {problem}.") from None


def tags(cell: "NotebookNode") -> set[str]:
    """The tags of an nbformat cell."""
    return set(cell.metadata.get("tags", []))


def definitions(path: Path, **given: Any) -> ModuleType:
    """A lesson's imports, functions, classes, UPPER_CASE constants and parameters, as a module.

    No other statement runs: what the functions need of the lesson (`device`, …) is `given` by name.
    Exercises contribute their solutions, not their stubs. Raises CourseError for a damaged file.
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
