"""Import functions from a notebook without running the lesson."""

import ast
from pathlib import Path
from types import ModuleType

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def load(name: str, **given: object) -> ModuleType:
    """Imports, functions, classes, UPPER_CASE constants and parameters of notebooks/`name`*.ipynb, as a module.

    Nothing else is run. What the functions use of the rest of the lesson (`device`, `target`, …) is `given` by name.
    Exercises have their solutions, not their stubs. Raises FileNotFoundError for an unknown lesson.
    """
    paths = sorted(NOTEBOOKS.glob(f"{name}*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no notebook {name}*.ipynb in {NOTEBOOKS.name}/")
    lesson = ModuleType(paths[0].stem)
    for cell in nbformat.read(paths[0], as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and not {"exercise", "check"} & set(tags):
            body = ast.parse(cell.source).body
            kept = body if "parameters" in tags else [node for node in body if _defines(node)]
            exec(compile(ast.Module(kept, type_ignores=[]), paths[0].name, "exec"), vars(lesson))
            vars(lesson).update(given)
    return lesson


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id.isupper() for target in node.targets)
    return isinstance(node, DEFINITIONS)
