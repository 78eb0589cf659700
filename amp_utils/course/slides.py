"""A lesson as a presentation in one HTML file that needs no network: `python -m amp_utils.course slides LESSON`.

Which cells begin a slide or are left out is the lessons' slide metadata, which `amp_utils.course` keeps. Here follows
what no metadata can say: a text is cut at its headings, a slide that is full goes on below, and what a predicted cell
puts out comes one keystroke later. reveal.js is that of the package pyreveal, where it lies unchanged.
"""

import importlib.metadata
import os
import re
import webbrowser
from collections.abc import Iterator
from pathlib import Path

import click
import nbformat
from nbformat import NotebookNode

from amp_utils.course import CourseError, outline, pages
from amp_utils.course.notebook import choose

WIDTH, HEIGHT = 1280, 720
FULL = (
    HEIGHT - 20
)  # pixels, as are the heights below: a guess, and a slide that is longer all the same scrolls
TEXT, CODE, FIGURE, GAP = 31, 22, 360, 10
# What a slide starts with when it is opened: no animation, its place in the address, so that a reload stays there.
START = f"""Reveal.initialize({{ width: {WIDTH}, height: {HEIGHT}, margin: 0.04, center: false, hash: true,
  transition: "none", slideNumber: "c/t", navigationMode: "linear" }});"""
STYLE = f"""{pages.BASE}
body {{ font: 22px/1.45 system-ui, sans-serif; color: #1f2328; background: #fff; margin: 0; }}
.reveal .slides {{ text-align: left; }}
.reveal .slides section:not(.stack) {{ height: {HEIGHT}px; overflow-y: auto; box-sizing: border-box; padding: 0 8px; }}
.reveal h1 {{ font-size: 44px; margin: 0 0 .4em; }}
.reveal h2 {{ font-size: 34px; margin: 0 0 .5em; color: var(--link); }}
.reveal h3 {{ font-size: 27px; margin: 0 0 .5em; }}
.reveal p, .reveal ul, .reveal ol {{ margin: .5em 0; }}
.reveal pre {{ font-size: 16px; }}
.reveal img {{ max-height: {FIGURE}px; }}
"""


def parts(cell: NotebookNode) -> Iterator[NotebookNode]:
    """A cell taken apart into what may stand on slides of its own: text from heading to heading, source, outputs."""
    if cell.cell_type == "markdown":
        for source in re.split(r"^(?=##+ )", cell.source, flags=re.M):
            if source.strip():
                yield nbformat.from_dict(cell | {"source": source})
    elif cell.cell_type == "code":
        yield nbformat.from_dict(cell | {"outputs": []})
        for output in cell.outputs:
            if "amp_utils_claims" in output.get("metadata", {}):
                continue  # a note to the ledger of claims, not to a class
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
    if "image/png" in output.get("data", {}):
        return FIGURE + GAP
    return (
        CODE * (output.get("text") or output.get("data", {}).get("text/plain", "")).count("\n")
        + CODE
        + GAP
    )


def stacks(notebook: NotebookNode) -> list[list[list[NotebookNode]]]:
    """The slides of a lesson from left to right, each a list of slides from top to bottom, each a list of parts."""
    columns: list[list[list[NotebookNode]]] = []
    predicted = False
    for cell in notebook.cells:
        kind = outline.slide_type(cell)
        if kind == "skip":
            continue
        new = list(parts(cell))
        for part in new:
            part.metadata["later"] = kind == "fragment" or (
                predicted and part.metadata.get("outputs_only", False)
            )
        # What a cell puts out stays with it where one slide can hold both.
        together = cell.cell_type == "code" and sum(map(height, new)) <= FULL
        for number, group in enumerate([new] if together else [[part] for part in new]):
            if is_heading(group[0]) or not columns:
                columns.append([])
            column = columns[-1]
            full = column and sum(map(height, column[-1] + group)) > FULL
            own = (kind == "subslide" and number == 0) or group[0].source.startswith("### ")
            if not column or ((full or own) and not is_bare_heading(column[-1])):
                column.append([])
                group[0].metadata["later"] = False  # a slide does not begin empty
            column[-1] += group
        predicted = "predict" in cell.metadata.get("tags", []) or (predicted and kind is None)
    return columns


def is_heading(part: NotebookNode) -> bool:
    return part.cell_type == "markdown" and part.source.startswith(("# ", "## "))


def is_bare_heading(slide: list[NotebookNode]) -> bool:
    """Whether a slide has only a section's name so far."""
    return len(slide) == 1 and is_heading(slide[0]) and "\n" not in slide[0].source.strip()


def section(slide: list[NotebookNode], folder: Path) -> str:
    """One slide as HTML. Lessons are not linked to, as their slides may not be there; an answer is unfolded."""
    cells = [
        nbformat.from_dict(part | {"id": f"{part.id}-{number}"})
        for number, part in enumerate(slide)
    ]
    html = pages.cells(nbformat.v4.new_notebook(cells=cells), folder, only_outside, anchors=False)
    return f"<section>{html.replace('<details><summary>Answer', '<details open><summary>Answer')}</section>"


def only_outside(url: str) -> str:
    """A link to a web page stays, every other becomes text."""
    return url if url.startswith("https://") else ""


def reveal(name: str) -> str:
    """The text of a file of reveal.js. Raises pages.PageError where the package that brings it is not complete."""
    try:
        path = importlib.metadata.distribution("pyreveal").locate_file(
            f"pyreveal/revealjs/dist/{name}"
        )
        return Path(path).read_text("utf-8")
    except (importlib.metadata.PackageNotFoundError, OSError):
        raise pages.PageError(
            f"reveal.js is not complete ({name}): install the package pyreveal again."
        ) from None


def build(path: Path, out: Path) -> Path:
    """Write a lesson's presentation into the folder `out`; returns the file. Raises pages.PageError."""
    notebook = nbformat.read(path, 4)
    columns = [
        "".join(section(slide, path.parent) for slide in column)
        if len(column) == 1
        else f"<section>{''.join(section(slide, path.parent) for slide in column)}</section>"
        for column in stacks(notebook)
    ]
    script = f"<script>{reveal('reveal.js')}</script>\n<script>{START}</script>"
    body = f'<div class="reveal"><div class="slides">\n{"".join(columns)}\n</div></div>\n{script}'
    style = reveal("reveal.css") + STYLE
    title = outline.read_card(notebook.cells[0].source).title
    out.mkdir(parents=True, exist_ok=True)
    under_way, file = out / f".{path.stem}.html", out / f"{path.stem}.html"
    under_way.write_text(pages.page(title, body, style), "utf-8")
    os.replace(under_way, file)
    return file


@click.command(
    help="Build LESSON's slides (a number or a name) into build/slides and open them in the browser."
)
@click.argument("lesson", required=False, metavar="LESSON")
@click.option("--no-browser", is_flag=True, help="only print where they are")
@click.pass_obj
def command(root: Path, lesson: str | None, no_browser: bool) -> None:
    if not lesson:
        raise CourseError("Which lesson? Give its number, for example make slides NB=06.", 2)
    (path,) = choose([lesson], root / "notebooks")
    file = build(path, root / "build" / "slides")
    print(f"The slides are in {file.relative_to(root)}")
    if not no_browser and not webbrowser.open(file.as_uri()):
        print("No browser was found: open this file in one yourself.")
