"""Your own progress: the predictions you committed to and the exercises you solved.

Only JupyterLab tells a kernel which notebook and which cell it runs. Nothing is noted elsewhere:
not by papermill, nbval or a test. The file, `progress.json`, lies beside the lesson and stays on
this machine; delete it to begin again.
"""

import contextlib
import json
import os
import tempfile
from pathlib import Path


def load(file: Path) -> dict[str, str]:
    """The verdicts by place, `{"06/ex1": "correct", "06/predict2": "wrong"}`; empty if damaged."""
    try:
        verdicts = json.loads(file.read_text("utf-8"))
        return {place: verdict for place, verdict in verdicts.items() if isinstance(verdict, str)}
    except (OSError, ValueError, AttributeError):
        return {}


def note(kind: str, verdict: str) -> None:
    """Keep the verdict of the running cell's prediction or exercise; silent whatever happens.

    `kind` is "predict" or "ex". A prediction keeps its first verdict; an exercise, once "correct",
    stays so.
    """
    with contextlib.suppress(Exception):
        lesson = Path(os.environ["JPY_SESSION_NAME"])
        file, place = lesson.with_name("progress.json"), _running(kind, lesson)
        verdicts = load(file)
        if place is None or verdicts.get(place, "not yet") != "not yet":
            return
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as beside:
            json.dump(verdicts | {place: verdict}, beside, indent=1)
        os.replace(beside.name, file)


def _running(kind: str, lesson: Path) -> str | None:
    """Where the running cell stands, for example "06/ex1"; None in a solution."""
    from IPython import get_ipython

    running = get_ipython().get_parent()["metadata"]["cellId"]
    cells = json.loads(lesson.read_bytes())["cells"]
    tags = [set(cell["metadata"].get("tags", [])) for cell in cells]
    here = [cell["id"] for cell in cells].index(running)
    if "solution" in tags[here]:  # Run All runs the solutions; they are not the learner's
        return None
    number = sum({"predict": "predict", "ex": "exercise"}[kind] in group for group in tags[:here])
    return f"{lesson.stem.split('_')[0]}/{kind}{number}"
