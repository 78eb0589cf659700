"""Every lesson is a presentation: its structure decides what a slide is, and one file holds all that it needs."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from amp_utils.course import notebook, outline, pages, slides

ROOT = Path(__file__).parents[2]
LESSONS = notebook.lessons(ROOT / "notebooks")
text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell


class Deck(HTMLParser):
    """The <section>s of a presentation as nested lists of their texts, and what the page loads."""

    def __init__(self, html: str):
        super().__init__()
        self.root, self.loads = [], []
        self.open = [self.root]
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag == "section":
            self.open[-1].append([])
            self.open.append(self.open[-1][-1])
        if tag != "a":
            self.loads += [
                attributes[name] for name in ("src", "href", "data-src") if attributes.get(name)
            ]

    def handle_endtag(self, tag):
        if tag == "section":
            self.open.pop()

    def handle_data(self, data):
        if len(self.open) > 1:
            self.open[-1].append(data)


def cell(kind, source, *tags, outputs=()):
    made = text(source) if kind == "text" else code(source)
    made.metadata["tags"] = list(tags)
    for words in outputs:
        made.outputs.append(nbformat.v4.new_output("stream", name="stdout", text=words))
    return made


def deck(*cells):
    return slides.stacks(nbformat.v4.new_notebook(cells=list(cells)))


def sources(columns):
    return [[[part.source for part in slide] for slide in column] for column in columns]


@pytest.mark.parametrize(
    ("kind", "source", "tags", "expected"),
    [
        ("text", "# 5 · Title\n*Why.*", [], "slide"),
        ("text", "## Section", [], "slide"),
        ("text", "The end of one.\n\n## Another", [], "slide"),
        ("text", "Only words, and `## no heading`", [], None),
        ("text", "### Detail", [], "subslide"),
        ("text", "**Predict.** Which?", ["predict"], "subslide"),
        ("text", "<details><summary>Answer</summary>\n\nThis.\n</details>", [], "fragment"),
        ("text", "### Exercise 1 · Title (●○○, 5 min)", ["exercise-text"], "subslide"),
        ("code", "def f(): ...", ["exercise"], None),
        ("code", "@lesson.check", ["check"], "skip"),
        ("text", "<details><summary>Hint</summary></details>", ["hint"], None),
        ("code", "## no heading\nx = 1", ["solution"], "skip"),
        ("code", "## no heading\nx = 1", [], None),
        ("code", "steps: int = 3  # steps", ["parameters"], "skip"),
        ("code", "import torch\n\nlesson.validate(\n    globals(),\n)", [], "skip"),
        ("code", "lesson.record(x=1)", [], "skip"),
        ("text", "---\n[Contents](00_start_here.ipynb)", ["navigation"], "skip"),
    ],
)
def test_the_structure_decides_what_a_cell_is(kind, source, tags, expected):
    assert outline.slide_type(cell(kind, source, *tags)) == expected


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_every_lesson_has_its_slide_metadata(path):
    stored = [
        c.metadata.get("slideshow", {}).get("slide_type") for c in nbformat.read(path, 4).cells
    ]
    assert stored == [outline.slide_type(c) for c in nbformat.read(path, 4).cells], (
        "run python -m amp_utils.course outline"
    )
    assert stored[0] == "slide" and stored.count("slide") >= 4 and stored.count("subslide") >= 2
    assert stored[1:3] == ["skip", "skip"] and stored[-1] == "skip"


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


def test_a_lone_heading_waits_for_what_follows():
    columns = deck(
        cell("text", "## A"),
        cell("text", "**Predict.** x", "predict"),
        cell("text", "y", "exercise-text"),
    )
    assert sources(columns) == [[["## A", "**Predict.** x"], ["y"]]]


def test_what_was_predicted_and_its_answer_come_later():
    columns = deck(
        cell("text", "**Predict.** x", "predict"),
        cell("code", "print(1)", outputs=["1"]),
        cell("text", "<details><summary>Answer</summary>One.</details>"),
        cell("code", "print(2)", outputs=["2"]),
    )
    ((slide,),) = columns
    assert [bool(part.metadata.get("later")) for part in slide] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    html = slides.section(slide, ROOT)
    assert html.count('class="fragment"') == 2 and "<details open><summary>Answer" in html


def test_a_full_slide_goes_on_below_and_keeps_source_and_output_together():
    long = "\n".join(["x = 1"] * 20)
    columns = deck(cell("text", "## A"), cell("code", long), cell("code", long, outputs=["seen"]))
    ((first, second),) = columns
    assert [len(first), len(second)] == [2, 2] and second[1].outputs[0].text == "seen"


def test_nothing_is_lost_but_what_is_left_out():
    for path in LESSONS:
        kept = [c for c in nbformat.read(path, 4).cells if outline.slide_type(c) != "skip"]
        shown = [
            part
            for column in slides.stacks(nbformat.read(path, 4))
            for slide in column
            for part in slide
        ]
        said = "".join(part.source for part in shown if not part.metadata.get("outputs_only"))
        assert said == "".join(c.source for c in kept)
        pictures = sum(
            "image/png" in output.get("data", {}) for c in kept for output in c.get("outputs", [])
        )
        assert sum("image/png" in str(part.get("outputs", "")) for part in shown) == pictures


def test_a_presentation_is_one_file_that_loads_nothing(tmp_path):
    file = slides.build(ROOT / "notebooks" / "06_grad_scaler.ipynb", tmp_path / "slides")
    html = file.read_text("utf-8")
    found = Deck(html)
    columns = slides.stacks(nbformat.read(ROOT / "notebooks" / "06_grad_scaler.ipynb", 4))
    assert len(found.root) == len(columns) > 6
    for section, column in zip(found.root, columns, strict=True):
        assert sum(isinstance(child, list) for child in section) == (
            len(column) if len(column) > 1 else 0
        )
    assert found.loads and all(load.startswith("data:") for load in found.loads)
    assert (
        html.count("</script>") == 2
        and "Reveal.initialize(" in html
        and "raise NotImplementedError" not in html[:99]
    )
    assert not re.search(
        r"url\((?!['\"]?data:)|@import", re.search(r"<style>(.*?)</style>", html, re.S)[1]
    )
    assert 'href="0' not in html and [path.name for path in (tmp_path / "slides").iterdir()] == [
        file.name
    ]


def test_a_package_without_reveal_is_a_sentence():
    with pytest.raises(
        pages.PageError,
        match=r"^reveal.js is not complete \(gone.js\): install the package pyreveal",
    ):
        slides.reveal("gone.js")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Which lesson? Give its number, for example make slides NB=06."),
        (["99"], "'99' is not a lesson: give one"),
    ],
)
def test_a_lesson_that_is_not_there_is_a_sentence(arguments, sentence):
    command = [sys.executable, "-m", "amp_utils.course", "slides", "--no-browser", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (
        done.returncode == 2 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    )
