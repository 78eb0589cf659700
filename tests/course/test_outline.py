"""The course map, the navigation and the slide metadata follow from the lessons."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from amp_utils.course import CourseError, notebook, outline
from amp_utils.course.__main__ import main

ROOT = Path(__file__).parents[2]
CARD = """# 5 · Title
*Why.*

| | |
| --- | --- |
| **You will learn** | 1. a<br>2. b |
| **You need** | [1](x.ipynb) |
| **Minutes** | 40 |
| **Runs on** | CPU |"""


FEW = ("00", "01", "04", "05", "06", "A2", "A3", "A6")  # lessons with and without neighbours


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A course of a few lessons, up to date; the current folder is another one."""
    course = tmp_path / "course"
    (course / "notebooks").mkdir(parents=True)
    for path in notebook.choose(FEW, ROOT / "notebooks"):
        shutil.copy(path, course / "notebooks")
    shutil.copytree(ROOT / ".github", course / ".github")
    shutil.copy(ROOT / "README.md", course)
    monkeypatch.chdir(tmp_path)
    assert run(course) == 0
    return course


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(folder, *options):
    return main(["--root", str(folder), "outline", *options])


def navigation(path):
    return outline.generated("navigation", path.parent, lesson=path.stem)


def test_a_card_is_taken_apart():
    assert outline.card([new_markdown_cell(CARD)], "x") == outline.Card(
        "5 · Title", "Why.", ["a", "b"], "40"
    )


@pytest.mark.parametrize("row", ["You will learn", "You need", "Minutes", "Runs on"])
def test_a_missing_row_is_named(row):
    with pytest.raises(CourseError, match=rf"^Cell 0: the card has no row \*\*{row}\*\*\.$"):
        outline.card([new_markdown_cell(CARD.replace(row, "Other"))], "Cell 0")


def test_everything_generated_is_up_to_date(capsys):
    assert run(ROOT, "--check") == 0, capsys.readouterr().out


def test_a_lesson_links_to_its_neighbours():
    there = notebook.lessons(ROOT / "notebooks")
    for before, after in zip(there, there[1:], strict=False):
        assert f"]({after.name}) →" in navigation(before)
        assert f"]({before.name})" in navigation(after)
    assert "←" not in navigation(there[0]) and "→" not in navigation(there[-1])


def test_both_entrances_lead_to_the_first_lesson_and_one_through_the_first_appendices(copy):
    def ways():
        rows = outline.generated("entrances", copy / "notebooks").splitlines()[2:]
        return [re.findall(r"\]\((\w+)\.ipynb\)", row) for row in rows]

    there = [path.stem for path in notebook.lessons(copy / "notebooks")]
    appendices = [name for name in there if name.startswith(("A1", "A2", "A3"))]
    assert appendices and ways() == [[*appendices, "01_float_formats"], ["01_float_formats"]]
    (copy / "notebooks" / f"{appendices[0]}.ipynb").unlink()
    assert ways()[0] == [*appendices[1:], "01_float_formats"]


def test_what_is_up_to_date_is_not_touched_and_a_mistyped_option_rewrites_nothing(copy, capsys):
    before = contents(copy)
    assert run(copy) == 0 and contents(copy) == before
    (copy / "notebooks" / "05_gradient_underflow.ipynb").unlink()
    assert run(copy, "--chek") == 2
    said = capsys.readouterr().err
    assert "--chek" in said and said.count("\n") == 1
    assert contents(copy).items() < before.items()


def test_a_lesson_that_goes_away_leaves_no_link_behind(copy, capsys):
    gone = copy / "notebooks" / "05_gradient_underflow.ipynb"
    gone.unlink()
    before = contents(copy)
    assert run(copy, "--check") == 1 and contents(copy) == before
    stale = ["00_start_here.ipynb", "04_custom_autograd_functions.ipynb", "06_grad_scaler.ipynb"]
    advice = "is out of date: run python -m amp_utils.course outline"
    expected = [f"{name} {advice}" for name in [*stale, "README.md"]]
    assert capsys.readouterr().out.splitlines() == expected
    assert run(copy) == 0 and run(copy, "--check") == 0
    assert f"]({gone.name}" not in navigation(copy / "notebooks" / stale[1])
    assert gone.name not in (copy / "README.md").read_text("utf-8")


BEGIN, END = outline.BEGIN.format("course map"), outline.END.format("course map")
MARKERS = {"no begin": [END], "no end": [BEGIN], "turned round": [END, BEGIN]}
MARKERS |= {"two begins": [BEGIN, BEGIN, END], "two maps": [BEGIN, END, BEGIN, END]}


@pytest.mark.parametrize("markers", MARKERS.values(), ids=MARKERS)
def test_without_markers_in_order_the_readme_and_all_else_is_left_alone(copy, markers, capsys):
    (copy / "notebooks" / "05_gradient_underflow.ipynb").unlink()
    (copy / "README.md").write_text("\nwords\n".join(["", *markers, ""]), "utf-8")
    before = contents(copy)
    assert run(copy) == 1
    said = capsys.readouterr().err
    assert said == f"README.md must hold {BEGIN} and, after it, {END}, each once.\n"
    assert contents(copy) == before


def test_a_damaged_lesson_is_a_sentence_and_nothing_is_rewritten(copy, capsys):
    (copy / "notebooks" / "05_gradient_underflow.ipynb").unlink()
    (copy / "notebooks" / "A6_data_loading.ipynb").write_text("{", "utf-8")
    before = contents(copy)
    assert run(copy) == 1
    said = capsys.readouterr().err
    assert "A6_data_loading.ipynb is damaged or not a notebook" in said and said.count("\n") == 1
    assert contents(copy) == before


def test_a_lesson_without_a_card_is_named():
    for cells in ([], [new_code_cell("x = 1")]):
        with pytest.raises(CourseError, match=r"^05.ipynb: the card has no "):
            outline.card(cells, "05.ipynb")


SLIDE_TYPES = [
    ("slide", new_markdown_cell, "# 5 · Title\n*Why.*", None),
    ("slide", new_markdown_cell, "## Section", None),
    ("slide", new_markdown_cell, "The end of one.\n\n## Another", None),
    (None, new_markdown_cell, "Only words, and `## no heading`", None),
    ("subslide", new_markdown_cell, "### Detail", None),
    ("subslide", new_markdown_cell, "**Predict.** Which?", "predict"),
    ("subslide", new_markdown_cell, "### Exercise 1 · Title (●○○, 5 min)", "exercise-text"),
    ("fragment", new_markdown_cell, "<details><summary>Answer</summary>\nx\n</details>", None),
    (None, new_markdown_cell, "<details><summary>Hint</summary></details>", "hint"),
    ("skip", new_markdown_cell, "---\n[Contents](00_start_here.ipynb)", "navigation"),
    (None, new_code_cell, "def f(): ...", "exercise"),
    ("skip", new_code_cell, "@lesson.check", "check"),
    ("skip", new_code_cell, "## no heading\nx = 1", "solution"),
    (None, new_code_cell, "## no heading\nx = 1", None),
    ("skip", new_code_cell, "steps: int = 3  # steps", "parameters"),
    ("skip", new_code_cell, "import torch\n\nlesson.validate(\n    globals(),\n)", None),
    ("skip", new_code_cell, "# For tests\nlesson.record(x=1)", "record"),
]


def test_tags_and_headings_decide_what_a_cell_is_in_a_presentation():
    for kind, new, source, tag in SLIDE_TYPES:
        cell = new(source, metadata={"tags": [tag] if tag else []})
        assert outline.slide_type(cell) == kind, (source, tag)


def test_sources_that_only_the_curious_read_are_folded(tmp_path):
    path = tmp_path / "01_float_formats.ipynb"
    given = [new_code_cell("x = 1", metadata={"tags": [tag]}) for tag in ("check", "exercise")]
    nbformat.write(new_notebook(cells=given), path)
    check, stub = nbformat.reads(outline.up_to_date(path), 4).cells
    assert check.metadata.jupyter == {"source_hidden": True} and "jupyter" not in stub.metadata


def test_every_lesson_makes_a_presentation():
    for path in notebook.lessons(ROOT / "notebooks"):
        kinds = [outline.slide_type(cell) for cell in nbformat.read(path, 4).cells]
        assert kinds[:3] == ["slide", "skip", "skip"] and kinds[-1] == "skip", path.name
        assert kinds.count("slide") >= 4 and kinds.count("subslide") >= 2, path.name
