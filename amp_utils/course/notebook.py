"""The one reader of notebooks: which lessons there are, their cells and tags, and what they define.

`cells` and `definitions` need the standard library only; `read` gives the nbformat node that tools of Jupyter want.
"""

import ast
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from amp_utils.course import ROOT, CourseError

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
    """What a lesson's author wrote into a cell; its outputs are not kept."""

    is_code: bool
    source: str
    tags: frozenset[str]


def lessons(notebooks: Path) -> list[Path]:
    """The lessons that are written, in reading order. Raises CourseError where there is none."""
    found = [path for name in ORDER if (path := notebooks / f"{name}.ipynb").exists()]
    if not found:
        raise CourseError(f"There are no lessons in {notebooks}.", 2)
    return found


def choose(wanted: Sequence[str], notebooks: Path) -> list[Path]:
    """The lessons named by number or by the beginning of their name: "12", "A1", "12_check".

    All lessons where none is named. Raises CourseError for a name that fits no lesson, or several.
    """
    there = lessons(notebooks)
    chosen = []
    for text in wanted:
        name = Path(text).name.removesuffix(".ipynb").lower()
        numbers = name, name.zfill(2)
        found = [path for path in there if path.stem.lower().partition("_")[0] in numbers]
        found = found or [path for path in there if path.stem.lower().startswith(name)]
        if len(found) != 1:
            why = "is the beginning of several lessons" if found else "is not a lesson"
            listing = ", ".join(path.stem for path in there)
            raise CourseError(f"{text!r} {why}: give one of {listing}, or its number.", 2)
        chosen += found
    return chosen or there


def cells(path: Path) -> list[Cell]:
    """A lesson's cells in order. Raises CourseError for a file that is not a notebook."""
    try:
        raw = json.loads(path.read_text("utf-8"))["cells"]
        return [
            Cell(
                cell["cell_type"] == "code",
                "".join(cell["source"]),
                frozenset(cell["metadata"].get("tags", [])),
            )
            for cell in raw
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_a_notebook(path, error) from None


def read(path: Path) -> "NotebookNode":
    """A notebook as nbformat reads it, in version 4. Raises CourseError for a file that is not a notebook."""
    import nbformat

    try:
        return nbformat.read(path, as_version=4)
    except OSError:
        raise
    except Exception as error:  # nbformat lets through whatever a foreign file makes it trip over
        raise _not_a_notebook(path, error) from None


def _not_a_notebook(path: Path, error: Exception) -> CourseError:
    return CourseError(f"{path} is damaged or not a notebook: {type(error).__name__}.")


def tags(cell: "NotebookNode") -> set[str]:
    """The tags of an nbformat cell."""
    return set(cell.metadata.get("tags", []))


def definitions(path: Path, **given: Any) -> ModuleType:
    """A lesson's imports, functions, classes, UPPER_CASE constants and parameters, as a module.

    Nothing else is run. What the functions use of the rest of the lesson (`device`, `target`, …) is `given` by name.
    Exercises have their solutions, not their stubs. Raises CourseError for a file that is not a notebook.
    """
    module = ModuleType(path.stem)
    for cell in cells(path):
        if cell.is_code and not cell.tags & {"exercise", "check"}:
            body = ast.parse(cell.source).body
            kept = body if "parameters" in cell.tags else list(_defining(body))
            exec(compile(ast.Module(kept, type_ignores=[]), path.name, "exec"), vars(module))
            vars(module).update(given)
    return module


def _defining(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
            yield node
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if len(names) == len(node.targets) and all(map(str.isupper, names)):
                yield node


def load(name: str, **given: Any) -> ModuleType:
    """`definitions` of the lesson in this course that `name` chooses, for example "06"."""
    return definitions(choose([name], ROOT / "notebooks")[0], **given)
