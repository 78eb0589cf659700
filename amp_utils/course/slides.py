"""A lesson as a presentation in one HTML file that needs no network.

A lesson's slide metadata decides which cells begin a slide, come later or are left out; the command
outline writes it. This module adds what metadata cannot say: text is cut at its headings, a full
slide continues below, and the output of a predicted cell comes one keystroke later.
"""

import re
import webbrowser
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click
import nbformat
from nbformat import NotebookNode

from amp_utils.course import CourseError, html, notebook, outline, pages, shown, write_whole

# Pixels, on the template's slides of 1280 × 720: a guess, and what turns out longer scrolls.
FULL, TEXT, CODE, FIGURE, GAP = 700, 31, 22, 360, 10


def parts(cell: NotebookNode) -> Iterator[NotebookNode]:
    """What may stand on different slides: text from heading to heading, source, each output."""
    if cell.cell_type == "markdown":
        for source in re.split(r"^(?=##+ )", cell.source, flags=re.M):
            if source.strip():
                yield nbformat.from_dict(cell | {"source": source})
    elif cell.cell_type == "code":
        yield nbformat.from_dict(cell | {"outputs": []})
        metadata = cell.metadata | {"outputs_only": True}
        for output in cell.outputs:
            yield nbformat.from_dict(cell | {"outputs": [output], "metadata": metadata})


def height(part: NotebookNode) -> int:
    """Roughly how many pixels a part takes on a slide."""
    if part.cell_type == "markdown":
        lines = [line for line in part.source.replace("<br>", "\n").splitlines() if line.strip()]
        pictures = part.source.count("](../imgs/")
        return sum(TEXT * -(-len(line) // 110) + GAP // 2 for line in lines) + FIGURE * pictures
    if not part.outputs:
        return CODE * (part.source.count("\n") + 1) + 2 * GAP
    data = part.outputs[0].get("data", {})
    lines = (part.outputs[0].get("text") or data.get("text/plain", "")).count("\n") + 1
    return (FIGURE if "image/png" in data else CODE * lines) + GAP


def is_heading(part: NotebookNode) -> bool:
    return part.cell_type == "markdown" and part.source.startswith(("# ", "## "))


def is_bare_heading(slide: list[NotebookNode]) -> bool:
    return is_heading(slide[-1]) and "\n" not in slide[-1].source.strip()


def stacks(lesson: NotebookNode) -> list[list[list[NotebookNode]]]:
    """The columns of slides from left to right; a slide is a list of parts."""
    columns, predicted = [], False
    for cell in lesson.cells:
        kind = getattr(cell.metadata.get("slideshow"), "slide_type", None)
        if kind == "skip":
            continue
        new = list(parts(cell))
        for number, part in enumerate(new):
            answers = predicted and "outputs_only" in part.metadata
            part.metadata["later"] = answers or kind == "fragment"
            part.id += f"-{number}"
        # A cell's source and outputs stay together if one slide can hold both.
        together = cell.cell_type == "code" and sum(map(height, new)) <= FULL
        for group in [new] if together else [[part] for part in new]:
            if is_heading(first := group[0]) or not columns:
                columns.append([])
            column = columns[-1]
            full = column and sum(map(height, column[-1] + group)) > FULL
            own = (kind == "subslide" and first is new[0]) or first.source.startswith("### ")
            if not column or ((full or own) and not is_bare_heading(column[-1])):
                column.append([])
                first.metadata["later"] = False  # no slide begins empty
            column[-1] += group
        predicted = "predict" in notebook.tags(cell) or (predicted and kind is None)
    return columns


def render(slide: list[NotebookNode], folder: Path) -> str:
    """A slide as HTML, its answers unfolded."""
    cells = pages.cells(nbformat.v4.new_notebook(cells=slide), folder, pages.outward, False)
    return cells.replace("<details><summary>Answer", "<details open><summary>Answer")


def reveal(name: str) -> str:
    """A file of reveal.js. Raises CourseError if the package that brings it is incomplete."""
    try:
        return (files("pyreveal") / "revealjs/dist" / name).read_text("utf-8")
    except (ImportError, OSError):
        raise CourseError(f"reveal.js lacks {name}: install the package pyreveal again.") from None


@click.command(help="Build LESSON's slides into build/slides and open them in the browser.")
@click.argument("lesson", required=False, metavar="LESSON")
@click.option("--no-browser", is_flag=True, help="only print where they are")
@click.pass_obj
def command(root: Path, lesson: str | None, no_browser: bool) -> None:
    if not lesson:
        raise CourseError("Which lesson? Give its number, for example make slides NB=06.", 2)
    (path,) = notebook.choose([lesson], root / "notebooks")
    slides, title = stacks(notebook.read(path)), outline.card(path).title
    columns = [[render(slide, path.parent) for slide in column] for column in slides]
    values = {"title": title, "columns": columns, "reveal": reveal}
    text = html.page("slides.html.j2", highlighting=pages.HIGHLIGHTING, **values)
    file = root / "build" / "slides" / f"{path.stem}.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, text)
    print(f"The slides are in {shown(file)}")
    if not no_browser and not webbrowser.open(file.as_uri()):
        print("No browser was found: open this file in one yourself.")
