"""Import functions from a notebook without running the lesson."""

import ast
from pathlib import Path
from types import SimpleNamespace

import nbformat

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def load(name: str, **given: object) -> SimpleNamespace:
    """Imports, functions, classes, UPPER_CASE constants and parameters of notebooks/`name`*.ipynb, as attributes.

    Nothing else is run. What the functions use of the rest of the lesson (`device`, `target`, …) is `given` by name.
    Exercises have their solutions, not their stubs. Raises FileNotFoundError for an unknown lesson.
    """
    paths = sorted(NOTEBOOKS.glob(f"{name}*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no notebook {name}*.ipynb in {NOTEBOOKS.name}/")
    namespace: dict[str, object] = {}
    for cell in nbformat.read(paths[0], as_version=4).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "code" and not {"exercise", "check"} & set(tags):
            body = ast.parse(cell.source).body
            kept = body if "parameters" in tags else [node for node in body if _defines(node)]
            exec(compile(ast.Module(kept, type_ignores=[]), paths[0].name, "exec"), namespace)
    namespace.update(given)
    return _Namespace(namespace)


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) and target.id.isupper() for target in node.targets)
    return isinstance(node, DEFINITIONS)


class _Namespace(SimpleNamespace):
    """Attributes that are the functions' own globals, so that a test can set one and the functions see it."""

    def __init__(self, namespace: dict[str, object]) -> None:
        self.__dict__ = namespace
