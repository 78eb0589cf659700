"""The course as files for a class: students/ without solutions and outputs, so that no prediction
is given away; solutions/, the lessons as they are; and pages/ with an index, a small book that
needs no network and no server, with contents, a search, and the ledger of claims.
"""

import json
import re
import shutil
import tempfile
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click
import nbformat
from nbconvert import NotebookExporter
from nbconvert.filters.markdown_mistune import MarkdownWithMath
from nbconvert.preprocessors import ClearOutputPreprocessor, TagRemovePreprocessor
from nbformat import NotebookNode

from amp_utils.course import CourseError, claims, notebook, outline, pages, shown, write_whole

LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")  # the relative path that a link or picture leads to
WITHOUT_SOLUTIONS = TagRemovePreprocessor(enabled=True, remove_cell_tags={"solution"})
WITHOUT_OUTPUTS = ClearOutputPreprocessor(enabled=True)
FOR_STUDENTS = NotebookExporter(preprocessors=[WITHOUT_OUTPUTS, WITHOUT_SOLUTIONS])
SCRIPT = Path(__file__).parent / "templates" / "book.js"
# Links, of which the text is kept, and the marks of Markdown, tables and formulas.
MARKS = re.compile(r"!?\[([^\]\n]*)\]\([^)\s]*\)|<[^>\n]+>|\*\*|[`$|]|&nbsp;")


def copy_linked(path: Path, lesson: NotebookNode, folder: Path) -> None:
    """Copy linked files so that relative links still work from `folder`. Raises CourseError."""
    texts = [cell.source for cell in lesson.cells if cell.cell_type == "markdown"]
    for target in LINK.findall("\n".join(re.sub(r"`[^`]*`", "", text) for text in texts)):
        source, copy = (path.parent / target).resolve(), (folder / target).resolve()
        if not source.is_file() or folder.parent.resolve() not in copy.parents:
            raise CourseError(f"{path.name} links to {target}, which is no file of the course.")
        a_page = folder.name == "pages" and pages.as_page(target) != target
        if source.suffix != ".ipynb" and not a_page and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def sections(lesson: NotebookNode) -> list[dict[str, str]]:
    """A lesson's sections for the search: level, heading, id on the page, and text.

    What is folded away on the page is left out, so that the search gives no answer away.
    """
    found = [{"level": "", "heading": "", "id": "", "text": ""}]
    for cell in lesson.cells:
        if notebook.tags(cell) & {"solution", "navigation"}:
            continue
        if cell.cell_type == "code":
            found[-1]["text"] += f"\n{cell.source}"
            continue
        shown_at_once = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.S)
        first, *parts = re.split(r"^(#{1,3}) (.+)$", MARKS.sub(r"\1", shown_at_once), flags=re.M)
        found[-1]["text"] += f"\n{first}"
        for level, heading, text in zip(*[iter(parts)] * 3, strict=True):
            place = quote(heading.replace(" ", "-"), safe="?/:@!$&'()*+,;=")  # as nbconvert does
            found.append({"level": level, "heading": heading, "id": place, "text": text})
    for section in found:
        section["text"] = unicodedata.normalize("NFKC", " ".join(section["text"].split()))
    return found[1:]


def write_lesson(
    path: Path, lesson: NotebookNode, out: Path, ledger: Mapping[str, Any], book: Mapping[str, Any]
) -> list[dict[str, str]]:
    """Write a lesson's three files, and what they link to, below `out`; returns its sections.

    Raises CourseError.
    """
    files = {
        f"students/{path.name}": FOR_STUDENTS.from_notebook_node(lesson)[0],
        f"solutions/{path.name}": nbformat.writes(lesson) + "\n",
    }
    try:
        body = pages.cells(lesson, path.parent, True)
    except CourseError as error:
        raise CourseError(f"{path.name} cannot be handed out: {error}") from None
    name, title = f"{path.stem}.html", book["cards"][path.stem].title
    found = [{"page": name, "title": title} | section for section in sections(lesson)]
    headings = [(part["id"], part["heading"]) for part in found if part["level"] == "##"]
    both = [c for key in ("claims", "checks") for c in ledger.get(key, []) if c.lesson == path.stem]
    values = {"title": title, "body": body, "here": path.stem, "headings": headings}
    values |= {"claims": both, "sources": ledger.get("sources")}
    files[f"pages/{name}"] = pages.page("lesson.html.j2", layout="book.html.j2", **book, **values)
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
        copy_linked(path, lesson, (out / name).parent)
    return found


def write_all(notebooks: Path, out: Path) -> int:
    """Write the whole handout into a folder; returns how many lessons there are."""
    lessons = {path: notebook.read(path) for path in notebook.lessons(notebooks)}
    cards = {path.stem: outline.card(lesson.cells, path.name) for path, lesson in lessons.items()}
    ledger = claims.shown(notebooks) if (notebooks / "claims.toml").exists() else {}
    book = {"parts": notebook.PARTS, "cards": cards, "ledger": bool(ledger)}
    inside, outside = book | {"up": "../", "down": ""}, book | {"up": "", "down": "pages/"}
    places = []
    for path, lesson in lessons.items():
        places += write_lesson(path, lesson, out, ledger, inside)
    markdown = MarkdownWithMath(pages.Renderer(notebooks)).render
    files = {
        "index.html": pages.page("index.html.j2", markdown=markdown, here="index", **outside),
        "pages/book.js": f"const places = {json.dumps(places)};\n{SCRIPT.read_text('utf-8')}",
    }
    if ledger:
        values = ledger | inside | {"here": "claims"}
        files["pages/claims.html"] = pages.page("claims.html.j2", **values)
    for name, text in files.items():
        write_whole(out / name, text)
    return len(lessons)


def build(notebooks: Path, out: Path) -> int:
    """Put a handout of all lessons in the place of an older one; returns how many there are."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        new, old = Path(beside, "new"), Path(beside, "old")
        count = write_all(notebooks, new)
        try:  # no single call replaces a folder that is not empty
            if out.exists():
                out.rename(old)
            new.rename(out)
        finally:
            if old.exists() and not out.exists():
                old.rename(out)
    return count


@click.command(help="Build what a class gets: notebooks and offline pages.")
@click.pass_obj
def command(root: Path) -> None:
    out = root / "build" / "handout"
    print(f"{build(root / 'notebooks', out)} lessons are in {shown(out)}: open index.html there.")
