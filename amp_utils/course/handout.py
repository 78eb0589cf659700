"""The course as files to hand to a class: `python -m amp_utils.course handout` builds build/handout/ from notebooks/.

students/   the lessons without solutions, and without outputs: a prediction is not answered before it is made
solutions/  the lessons as they are
pages/      each lesson as one HTML file that needs no network, solutions folded away
index.html  links to them all
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import nbformat
from nbformat import NotebookNode

from amp_utils.course import CourseError, notebook, outline, pages

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
INTRODUCTION = """# Mixed Precision, Hands On: handout

| for | what | needs |
| --- | --- | --- |
| **students** | notebooks with exercises and their checks; no solutions, no outputs | the course's environment |
| **solutions** | the same notebooks with solutions and outputs | the course's environment |
| **page** | the lesson to read; solutions are folded away | a browser, no network |

"""


class HandoutError(CourseError):
    """A lesson cannot be handed out; the message is one sentence."""


def for_students(notebook: NotebookNode) -> NotebookNode:
    """A copy of a lesson without its solutions and without any output; stubs, checks and hints stay."""
    lesson = nbformat.from_dict(notebook)
    lesson.cells = [
        cell for cell in lesson.cells if "solution" not in cell.metadata.get("tags", [])
    ]
    for cell in lesson.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return lesson


def linked_files(notebook: NotebookNode) -> Iterator[str]:
    """What a lesson's text links to or shows, other than web pages and places in itself; anchors are cut off."""
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for target in LINK.findall(re.sub(r"`[^`]*`", "", cell.source)):
                if "://" not in target and not target.startswith(("#", "data:", "attachment:")):
                    yield target.partition("#")[0]


def copy_linked(path: Path, notebook: NotebookNode, folder: Path) -> None:
    """Put each file that a lesson links to where the same link, taken from `folder`, finds it. Raises HandoutError."""
    for target in linked_files(notebook):
        source, copy = (path.parent / target).resolve(), (folder / target).resolve()
        if not source.is_file():
            raise HandoutError(f"{path.name} links to {target}, which is not there.")
        if folder.parent.resolve() not in copy.parents:
            raise HandoutError(
                f"{path.name} links to {target}, which lies outside of what is handed out."
            )
        if source.suffix != ".ipynb" and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def write_lesson(path: Path, out: Path) -> outline.Card:
    """Write one lesson's three files below `out`, and what they link to. Raises HandoutError."""
    try:
        notebook = nbformat.read(path, 4)
        card = outline.read_card(notebook.cells[0].source)
        body = pages.cells(notebook, path.parent, pages.as_html)
    except (nbformat.reader.NotJSONError, pages.PageError, ValueError) as error:
        raise HandoutError(f"{path.name} cannot be handed out: {error}") from None
    files = {
        f"students/{path.name}": nbformat.writes(for_students(notebook)) + "\n",
        f"solutions/{path.name}": nbformat.writes(notebook) + "\n",
        f"pages/{path.stem}.html": pages.page(card.title, body),
    }
    for name, text in files.items():
        file = out / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, "utf-8")
        copy_linked(path, notebook, file.parent)
    return card


def index(cards: dict[str, outline.Card]) -> str:
    """The page that links to every file; `cards` by the lesson's file name without its ending."""
    lines = [
        "| part | lesson | minutes | page | students | solutions |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for part, names in notebook.PARTS.items():
        for name in filter(cards.get, names):
            links = f"[read](pages/{name}.html) | [notebook](students/{name}.ipynb) | [notebook](solutions/{name}.ipynb)"
            lines.append(
                f"| {part} | **{cards[name].title}**<br>{cards[name].why} | {cards[name].minutes} | {links} |"
            )
            part = ""  # named once
    text = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell(INTRODUCTION + "\n".join(lines), id="index")]
    )
    return pages.page("Mixed Precision, Hands On", pages.cells(text, Path(), anchors=False))


def build(notebooks: Path, out: Path) -> int:
    """Build the handout of all written lessons beside `out`, then put it in its place. Returns how many there are.

    A failed or interrupted build leaves the handout that was there. Raises HandoutError.
    """
    lessons = notebook.lessons(notebooks)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        new, old = Path(beside, "new"), Path(beside, "old")
        new.mkdir()
        cards = {path.stem: write_lesson(path, new) for path in lessons}
        (new / "index.html").write_text(index(cards), "utf-8")
        if out.exists():
            os.rename(
                out, old
            )  # two renames, as no single one replaces a folder that holds something
        os.rename(new, out)
    return len(lessons)


@click.command(help="Build what a class gets into build/handout: notebooks and offline pages.")
@click.pass_obj
def command(root: Path) -> None:
    number = build(root / "notebooks", root / "build" / "handout")
    print(f"{number} lessons are in build/handout: open build/handout/index.html")
