"""Functions come out of a notebook, and nothing is run on the way."""

import nbformat
import notebook_code
import pytest
from nbformat.v4 import new_code_cell, new_notebook


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    cells = [
        new_code_cell("steps: int = 3  # how many", metadata={"tags": ["parameters"]}),
        new_code_cell("import math\n\nLIMIT = 2\ncounter = 1 / 0\n\n\ndef area(r):\n    return math.pi * r**LIMIT"),
        new_code_cell("def far():\n    return width * steps"),
        new_code_cell("def answer():\n    raise NotImplementedError", metadata={"tags": ["exercise"]}),
        new_code_cell("def answer():\n    return 42\n\n\ncheck()", metadata={"tags": ["solution"]}),
    ]
    nbformat.write(new_notebook(cells=cells), tmp_path / "77_test.ipynb")
    monkeypatch.setattr(notebook_code, "NOTEBOOKS", tmp_path)


def test_definitions_are_loaded_and_statements_are_not(notebook):
    lesson = notebook_code.load("77")
    assert lesson.area(1) == pytest.approx(3.14159, abs=1e-5)
    assert not hasattr(lesson, "counter")


def test_a_solution_takes_the_place_of_its_stub(notebook):
    assert notebook_code.load("77").answer() == 42


def test_what_a_function_needs_of_the_lesson_can_be_given(notebook):
    lesson = notebook_code.load("77", width=5)
    assert lesson.far() == 15
    lesson.width = 7
    assert lesson.far() == 21


def test_an_unknown_lesson_is_named(notebook):
    with pytest.raises(FileNotFoundError, match="99"):
        notebook_code.load("99")
