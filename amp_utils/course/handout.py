"""The course as files for a class: an index; students/ without solutions and outputs, so that no
prediction is given away; solutions/, the lessons as they are; pages/ to read without a network.
"""

import re
import shutil
import tempfile
from pathlib import Path

import click
import nbformat
from nbconvert import NotebookExporter
from nbconvert.filters.markdown_mistune import MarkdownWithMath
from nbconvert.preprocessors import ClearOutputPreprocessor, TagRemovePreprocessor
from nbformat import NotebookNode

from amp_utils.course import CourseError, notebook, outline, pages, shown, write_whole

LINK = re.compile(r"\]\((?!\w+:)([^)\s#]+)")  # the relative path that a link or picture leads to
WITHOUT_SOLUTIONS = TagRemovePreprocessor(enabled=True, remove_cell_tags={"solution"})
WITHOUT_OUTPUTS = ClearOutputPreprocessor(enabled=True)
FOR_STUDENTS = NotebookExporter(preprocessors=[WITHOUT_OUTPUTS, WITHOUT_SOLUTIONS])


def copy_linked(path: Path, lesson: NotebookNode, folder: Path) -> None:
    """Copy linked files so that relative links still work from `folder`. Raises CourseError."""
    texts = [cell.source for cell in lesson.cells if cell.cell_type == "markdown"]
    for target in LINK.findall("\n".join(re.sub(r"`[^`]*`", "", text) for text in texts)):
        source, copy = (path.parent / target).resolve(), (folder / target).resolve()
        if not source.is_file() or folder.parent.resolve() not in copy.parents:
            raise CourseError(f"{path.name} links to {target}, which is no file of the course.")
        if source.suffix != ".ipynb" and not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def write_lesson(path: Path, out: Path) -> outline.Card:
    """Write a lesson's three files, and what they link to, below `out`. Raises CourseError."""
    lesson = notebook.read(path)
    card = outline.card(lesson.cells, path.name)
    try:
        body = pages.cells(lesson, path.parent, True)
    except CourseError as error:
        raise CourseError(f"{path.name} cannot be handed out: {error}") from None
    files = {
        f"students/{path.name}": FOR_STUDENTS.from_notebook_node(lesson)[0],
        f"solutions/{path.name}": nbformat.writes(lesson) + "\n",
        f"pages/{path.stem}.html": pages.page("lesson.html.j2", title=card.title, body=body),
    }
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(out / name, text)
        copy_linked(path, lesson, (out / name).parent)
    return card


def build(notebooks: Path, out: Path) -> int:
    """Put a handout of all lessons in the place of an older one; returns how many there are."""
    lessons = notebook.lessons(notebooks)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        new, old = Path(beside, "new"), Path(beside, "old")
        cards = {path.stem: write_lesson(path, new) for path in lessons}
        markdown = MarkdownWithMath(pages.Renderer(notebooks)).render
        index = pages.page("index.html.j2", parts=notebook.PARTS, cards=cards, markdown=markdown)
        write_whole(new / "index.html", index)
        try:  # no single call replaces a folder that is not empty
            if out.exists():
                out.rename(old)
            new.rename(out)
        finally:
            if old.exists() and not out.exists():
                old.rename(out)
    return len(lessons)


@click.command(help="Build what a class gets: notebooks and offline pages.")
@click.pass_obj
def command(root: Path) -> None:
    out = root / "build" / "handout"
    print(f"{build(root / 'notebooks', out)} lessons are in {shown(out)}: open index.html there.")
