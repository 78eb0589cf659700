"""A lesson as a presentation in one HTML file that needs no network.

The slide metadata that outline writes decides; what metadata cannot say is added here: text is cut
at its headings, a full slide continues below, and a predicted output comes one keystroke later.
"""

import re
import webbrowser
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click
import nbformat
from nbformat import NotebookNode

from amp_utils.course import notebook, outline, pages, shown, write_whole

# Pixels, on the template's slides of 1280 × 720: a guess, and what turns out longer scrolls.
FULL, TEXT, CODE, FIGURE, GAP = 700, 31, 22, 360, 10
REVEAL = files("pyreveal") / "revealjs/dist"


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


def is_heading(part: NotebookNode, bare: bool = False) -> bool:
    text = part.source if part.cell_type == "markdown" else ""
    return text.startswith(("# ", "## ")) and not (bare and "\n" in text.strip())


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
            if not column or ((full or own) and not is_heading(column[-1][-1], bare=True)):
                column.append([])
                first.metadata["later"] = False  # no slide begins empty
            column[-1] += group
        predicted = "predict" in notebook.tags(cell) or (predicted and kind is None)
    return columns


def render(slide: list[NotebookNode], folder: Path) -> str:
    """A slide as HTML, its answers unfolded."""
    cells = pages.cells(nbformat.v4.new_notebook(cells=slide), folder, False, False)
    return cells.replace("<details><summary>Answer", "<details open><summary>Answer")


@click.command(help="Show LESSON as a presentation in the browser.")
@click.argument("lesson")
@click.option("--no-browser", is_flag=True, help="only print where they are")
@click.pass_obj
def command(root: Path, lesson: str, no_browser: bool) -> None:
    (path,) = notebook.choose([lesson], root / "notebooks")
    lesson = notebook.read(path)
    title = outline.card(lesson.cells, path.name).title
    columns = [[render(slide, path.parent) for slide in column] for column in stacks(lesson)]
    file = root / "build" / "slides" / f"{path.stem}.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, pages.page("slides.html.j2", title=title, columns=columns, reveal=REVEAL))
    print(f"The slides are in {shown(file)}")
    if not no_browser and not webbrowser.open(file.as_uri()):
        print("No browser was found: open this file in one yourself.")
