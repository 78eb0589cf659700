"""Every lesson is a presentation: its slide metadata decides, and one file holds all it needs."""

import re
import shutil
from pathlib import Path

import nbformat
from bs4 import BeautifulSoup

from amp_utils.course import notebook, outline, slides
from amp_utils.course.__main__ import main

ROOT = Path(__file__).parents[2]
LESSONS = notebook.lessons(ROOT / "notebooks")
LESSON = ROOT / "notebooks" / "06_grad_scaler.ipynb"


def cell(kind, source, *tags, output=None):
    """A cell with the slide metadata that `outline` gives it."""
    new = {"text": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}[kind]
    made = new(source, metadata={"tags": list(tags)})
    if output:
        made.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=output))
    made.metadata["slideshow"] = {"slide_type": outline.slide_type(made)}
    return made


def deck(*cells):
    return slides.stacks(nbformat.v4.new_notebook(cells=list(cells)))


def sources(columns):
    return [[[part.source for part in slide] for slide in column] for column in columns]


def test_a_section_is_a_column_and_a_text_is_cut_at_its_headings():
    columns = deck(
        cell("text", "# Title"),
        cell("text", "## A\nwords\n### B\nmore\n\n## C\nlast"),
        cell("code", "x"),
    )
    assert sources(columns) == [
        [["# Title"]],
        [["## A\nwords\n"], ["### B\nmore\n\n"]],
        [["## C\nlast", "x"]],
    ]


def test_the_stored_metadata_decides():
    left_out, begins = cell("text", "left out"), cell("text", "begins a slide")
    left_out.metadata["slideshow"] = {"slide_type": "skip"}
    begins.metadata["slideshow"] = {"slide_type": "subslide"}
    plain = cell("text", "### Here", "navigation")
    plain.metadata["slideshow"] = "damaged"
    columns = deck(cell("text", "## A\nx"), left_out, begins, plain)
    assert sources(columns) == [[["## A\nx"], ["begins a slide"], ["### Here"]]]


def test_a_lone_heading_waits_for_what_follows():
    columns = deck(
        cell("text", "## A"),
        cell("text", "**Predict.** x", "predict"),
        cell("text", "y", "exercise-text"),
    )
    assert sources(columns) == [[["## A", "**Predict.** x"], ["y"]]]


def test_a_predicted_output_and_its_answer_come_later():
    ((slide,),) = deck(
        cell("text", "**Predict.** x", "predict"),
        cell("code", "print(1)", output="1"),
        cell("text", "<details><summary>Answer</summary>One.</details>"),
        cell("code", "print(2)", output="2"),
    )
    later = [bool(part.metadata.get("later")) for part in slide]
    assert later == [False, False, True, True, False, False]
    page = BeautifulSoup(slides.render(slide, ROOT), "html.parser")
    assert [part.get_text().strip() for part in page(class_="fragment")] == ["1", "AnswerOne."]
    assert page.details.has_attr("open")


def test_a_full_slide_continues_below_and_keeps_source_and_output_together():
    def lines(count):
        return "\n".join(["x = 1"] * count)

    # The second source alone would still fit on the first slide.
    cells = [cell("code", lines(20)), cell("code", lines(8), output="seen")]
    ((first, second),) = deck(cell("text", "## A"), *cells)
    assert [len(first), len(second)] == [2, 2] and second[1].outputs[0].text == "seen"


def test_a_slide_loses_nothing_but_what_is_left_out():
    for path in LESSONS:
        lesson = nbformat.read(path, 4)
        kept = [c for c in lesson.cells if c.metadata.get("slideshow") != {"slide_type": "skip"}]
        shown = [part for column in slides.stacks(lesson) for slide in column for part in slide]
        said = [part.source for part in shown if not part.metadata.get("outputs_only")]
        assert "".join(said) == "".join(c.source for c in kept), path.name
        outputs = [output for c in kept for output in c.get("outputs", [])]
        assert [output for part in shown for output in part.get("outputs", [])] == outputs, (
            path.name
        )


def test_a_presentation_is_one_file_that_loads_nothing(tmp_path, monkeypatch, capsys):
    for name in ("notebooks", "imgs"):
        (tmp_path / "course").mkdir(exist_ok=True)
        (tmp_path / "course" / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    assert main(["--root", "course", "slides", "06", "--no-browser"]) == 0
    assert capsys.readouterr().out == "The slides are in course/build/slides/06_grad_scaler.html\n"
    (file,) = (tmp_path / "course" / "build" / "slides").iterdir()
    page = BeautifulSoup(file.read_text("utf-8"), "html.parser")

    columns = page.select(".slides > section")
    found = [len(column.find_all("section", recursive=False)) or 1 for column in columns]
    assert found == [len(column) for column in slides.stacks(nbformat.read(LESSON, 4))]
    assert page.title.string == outline.card(notebook.cells(LESSON), LESSON.name).title
    *figures, reveal, start = page("script", src=False)
    assert len(figures) == len(page.select(".touch + script")) > 0
    assert len(reveal.string) > 50_000 and "Reveal.initialize(" in start.string
    loaded = [tag[name] for tag in page(True) for name in ("src", "data-src") if tag.get(name)]
    loaded += [tag["href"] for tag in page("link")]
    assert loaded and all(url.startswith("data:") for url in loaded)
    assert not re.search(r"url\((?!['\"]?data:)|@import", page.style.string)
    assert all(tag["href"].startswith("https://") for tag in page("a", href=True))
    ids = [tag["id"] for tag in page(id=True)]
    assert len(ids) == len(set(ids))


def test_a_lesson_that_is_not_there_or_damaged_is_a_sentence(tmp_path, capsys):
    (tmp_path / "notebooks").mkdir()
    shutil.copy(LESSON, tmp_path / "notebooks")
    (tmp_path / "notebooks" / "05_gradient_underflow.ipynb").write_text('{"cells": [{}]}', "utf-8")
    no_card = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# No card")])
    nbformat.write(no_card, tmp_path / "notebooks" / "07_unscaled_clipping.ipynb")
    asked = {
        (): (2, "Missing argument 'LESSON'."),
        ("99",): (2, "'99' is not a lesson: give one of 05_gradient_underflow, "),
        ("05",): (1, "05_gradient_underflow.ipynb is damaged or not a notebook"),
        ("07",): (1, "07_unscaled_clipping.ipynb: the card has no "),
    }
    for lesson, (status, sentence) in asked.items():
        assert main(["--root", str(tmp_path), "slides", "--no-browser", *lesson]) == status
        said = capsys.readouterr().err
        assert sentence in said and said.count("\n") == 1
    assert not (tmp_path / "build" / "slides").exists()
