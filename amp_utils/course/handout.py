"""The course as files to hand to a class, in build/handout/.

students/   the lessons without solutions and without outputs, so that no prediction is given away
solutions/  the lessons as they are
pages/      each lesson as one HTML file that needs no network, its solutions folded away
index.html  links to all of them
"""

import os
import re
import shutil
import tempfile
from copy import deepcopy
from pathlib import Path

import click
import nbformat
from nbconvert.filters.markdown_mistune import MarkdownWithMath
from nbconvert.preprocessors import ClearOutputPreprocessor, TagRemovePreprocessor
from nbformat import NotebookNode

from amp_utils.course import CourseError, html, notebook, outline, pages, write_whole

LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")  # the relative path that a link or picture leads to


def for_students(lesson: NotebookNode) -> NotebookNode:
    """A copy of a lesson without solutions and outputs; stubs, checks and hints stay."""
    copy, _ = ClearOutputPreprocessor().preprocess(deepcopy(lesson), {})
    copy, _ = TagRemovePreprocessor(remove_cell_tags={"solution"}).preprocess(copy, {})
    return copy


def copy_linked(path: Path, lesson: NotebookNode, folder: Path) -> None:
    """Copy linked files so that the lesson's relative links still work from `folder`.

    Raises CourseError for a link to a file that does not exist or lies outside the course.
    """
    texts = (cell.source for cell in lesson.cells if cell.cell_type == "markdown")
    for target in (link for text in texts for link in LINK.findall(re.sub(r"`[^`]*`", "", text))):
        source, copy = (path.parent / target).resolve(), (folder / target).resolve()
        if not source.is_file():
            raise CourseError(f"{path.name} links to {target}, which does not exist.")
        if folder.parent.resolve() not in copy.parents:
            raise CourseError(f"{path.name} links to {target}, which lies outside the course.")
        if source.suffix != ".ipynb" and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def as_html(url: str) -> str:
    """A link to a lesson's notebook becomes one to its page.

    >>> as_html("00_start_here.ipynb#The-course"), as_html("https://pytorch.org"), as_html("#Recap")
    ('00_start_here.html#The-course', 'https://pytorch.org', '#Recap')
    """
    return url if "://" in url else re.sub(r"\.ipynb(?=#|$)", ".html", url)


def write_lesson(path: Path, out: Path) -> outline.Card:
    """Write a lesson's three files, and what they link to, below `out`. Raises CourseError."""
    lesson, card = notebook.read(path), outline.card(path)
    try:
        body = pages.cells(lesson, path.parent, as_html)
    except CourseError as error:
        raise CourseError(f"{path.name} cannot be handed out: {error}") from None
    files = {
        f"students/{path.name}": nbformat.writes(for_students(lesson)) + "\n",
        f"solutions/{path.name}": nbformat.writes(lesson) + "\n",
        f"pages/{path.stem}.html": pages.page(card.title, body),
    }
    for name, text in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        write_whole(out / name, text)
        copy_linked(path, lesson, (out / name).parent)
    return card


def build(notebooks: Path, out: Path) -> int:
    """Build the handout of all written lessons into `out`; returns how many lessons there are.

    It takes the place of an older one only when it is complete. Raises CourseError.
    """
    lessons = notebook.lessons(notebooks)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        new, old = Path(beside, "new"), Path(beside, "old")
        new.mkdir()
        cards = {path.stem: write_lesson(path, new) for path in lessons}
        markdown = MarkdownWithMath(pages.Renderer(Path(), str, anchors=False)).render
        index = html.page("index.html.j2", parts=notebook.PARTS, cards=cards, markdown=markdown)
        write_whole(new / "index.html", index)
        try:  # no single call replaces a folder that is not empty
            if out.exists():
                out.rename(old)
            new.rename(out)
        finally:
            if old.exists() and not out.exists():
                old.rename(out)
    return len(lessons)


@click.command(help="Build what a class gets into build/handout: notebooks and offline pages.")
@click.pass_obj
def command(root: Path) -> None:
    out = root / "build" / "handout"
    number = build(root / "notebooks", out)
    where = os.path.relpath(out)
    print(f"{number} lessons are in {where}: open {where}/index.html")
