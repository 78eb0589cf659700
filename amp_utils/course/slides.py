"""A lesson as a presentation in one HTML file that needs no network.

A lesson's slide metadata decides which cells begin a slide, come later or are left out; the command
outline writes it. This module adds what metadata cannot say: text is cut at its headings, a full
slide continues below, and the output of a predicted cell comes one keystroke later.
"""

import os
import re
import webbrowser
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click
import nbformat
from markupsafe import Markup
from nbformat import NotebookNode

from amp_utils.course import CourseError, html, notebook, outline, pages, write_whole

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
        for output in cell.outputs:
            metadata = cell.metadata | {"outputs_only": True}
            yield nbformat.from_dict(cell | {"outputs": [output], "metadata": metadata})


def height(part: NotebookNode) -> int:
    """Roughly how many pixels a part takes on a slide."""
    if part.cell_type == "markdown":
        lines = [line for line in part.source.replace("<br>", "\n").splitlines() if line.strip()]
        pictures = sum("](../imgs/" in line for line in lines)
        return sum(TEXT * -(-len(line) // 110) + GAP // 2 for line in lines) + FIGURE * pictures
    if not part.metadata.get("outputs_only"):
        return CODE * (part.source.count("\n") + 1) + 2 * GAP
    (output,) = part.outputs
    data = output.get("data", {})
    lines = (output.get("text") or data.get("text/plain", "")).count("\n") + 1
    return (FIGURE if "image/png" in data else CODE * lines) + GAP


def stacks(lesson: NotebookNode) -> list[list[list[NotebookNode]]]:
    """The columns of slides from left to right; a slide is a list of parts."""
    columns: list[list[list[NotebookNode]]] = []
    predicted = False
    for cell in lesson.cells:
        kind = getattr(cell.metadata.get("slideshow"), "slide_type", None)
        if kind == "skip":
            continue
        new = list(parts(cell))
        for number, part in enumerate(new):
            is_output = "outputs_only" in part.metadata
            part.metadata["later"] = kind == "fragment" or (predicted and is_output)
            part.id += f"-{number}"
        # A cell's source and outputs stay together if one slide can hold both.
        together = cell.cell_type == "code" and sum(map(height, new)) <= FULL
        for group in [new] if together else [[part] for part in new]:
            if is_heading(group[0]) or not columns:
                columns.append([])
            column = columns[-1]
            full = column and sum(map(height, column[-1] + group)) > FULL
            own = (kind == "subslide" and group[0] is new[0]) or group[0].source.startswith("### ")
            if not column or ((full or own) and not is_bare_heading(column[-1])):
                column.append([])
                group[0].metadata["later"] = False  # no slide begins empty
            column[-1] += group
        predicted = "predict" in notebook.tags(cell) or (predicted and kind is None)
    return columns


def is_heading(part: NotebookNode) -> bool:
    return part.cell_type == "markdown" and part.source.startswith(("# ", "## "))


def is_bare_heading(slide: list[NotebookNode]) -> bool:
    """Whether a slide holds only a section's name so far."""
    return len(slide) == 1 and is_heading(slide[0]) and "\n" not in slide[0].source.strip()


def render(slide: list[NotebookNode], folder: Path) -> Markup:
    """A slide as HTML, its answers unfolded."""
    cells = pages.cells(nbformat.v4.new_notebook(cells=slide), folder, web_only, anchors=False)
    return Markup(str(cells).replace("<details><summary>Answer", "<details open><summary>Answer"))


def web_only(url: str) -> str:
    """Keep web links; drop links to other lessons, whose slides may not have been built."""
    return url if url.startswith("https://") else ""


def reveal(name: str) -> Markup:
    """A file of reveal.js. Raises CourseError if the package that brings it is incomplete."""
    try:
        return Markup((files("pyreveal") / "revealjs/dist" / name).read_text("utf-8"))
    except (ImportError, OSError):
        raise CourseError(f"reveal.js lacks {name}: install the package pyreveal again.") from None


def build(path: Path, out: Path) -> Path:
    """Write a lesson's presentation into the folder `out`; returns the file. Raises CourseError."""
    lesson, title = notebook.read(path), outline.card(path).title
    columns = [[render(slide, path.parent) for slide in column] for column in stacks(lesson)]
    libraries = {"reveal": reveal, "highlighting": pages.HIGHLIGHTING}
    text = html.page("slides.html.j2", title=title, columns=columns, **libraries)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / f"{path.stem}.html", text)
    return out / f"{path.stem}.html"


@click.command(help="Build LESSON's slides into build/slides and open them in the browser.")
@click.argument("lesson", required=False, metavar="LESSON")
@click.option("--no-browser", is_flag=True, help="only print where they are")
@click.pass_obj
def command(root: Path, lesson: str | None, no_browser: bool) -> None:
    if not lesson:
        raise CourseError("Which lesson? Give its number, for example make slides NB=06.", 2)
    (path,) = notebook.choose([lesson], root / "notebooks")
    file = build(path, root / "build" / "slides")
    print(f"The slides are in {os.path.relpath(file)}")
    if not no_browser and not webbrowser.open(file.as_uri()):
        print("No browser was found: open this file in one yourself.")
