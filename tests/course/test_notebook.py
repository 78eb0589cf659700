"""The reader of notebooks: lessons are chosen, definitions come out and nothing is run, what is damaged is named."""

import pytest
from nbformat.v4 import new_code_cell, new_notebook, writes

from amp_utils.course import CourseError, notebook


@pytest.fixture
def lesson(tmp_path):
    cells = [
        new_code_cell("steps: int = 3  # how many", metadata={"tags": ["parameters"]}),
        new_code_cell(
            "import math\n\nLIMIT = 2\ncounter = 1 / 0\n\n\ndef area(r):\n    return math.pi * r**LIMIT"
        ),
        new_code_cell("def far():\n    return width * steps"),
        new_code_cell(
            "def answer():\n    raise NotImplementedError", metadata={"tags": ["exercise"]}
        ),
        new_code_cell("def answer():\n    return 42\n\n\ncheck()", metadata={"tags": ["solution"]}),
    ]
    path = tmp_path / "06_grad_scaler.ipynb"
    path.write_text(writes(new_notebook(cells=cells)))
    return path


def test_definitions_are_loaded_and_statements_are_not(lesson):
    loaded = notebook.definitions(lesson)
    assert loaded.area(1) == pytest.approx(3.14159, abs=1e-5)
    assert not hasattr(loaded, "counter")


def test_a_solution_takes_the_place_of_its_stub(lesson):
    assert notebook.definitions(lesson).answer() == 42


def test_what_a_function_needs_of_the_lesson_can_be_given(lesson):
    loaded = notebook.definitions(lesson, width=5)
    assert loaded.far() == 15
    loaded.width = 7
    assert loaded.far() == 21


@pytest.mark.parametrize(
    "wanted", ["06", "6", "06_grad", "06_grad_scaler.ipynb", "notebooks/06_grad_scaler.ipynb"]
)
def test_a_lesson_is_chosen_by_number_or_beginning(lesson, wanted):
    assert notebook.choose([wanted], lesson.parent) == [lesson]


def test_an_unknown_lesson_is_named_and_what_there_is_listed(lesson):
    with pytest.raises(CourseError, match="'99' is not a lesson: give one of 06_grad_scaler"):
        notebook.choose(["99"], lesson.parent)


def test_an_empty_folder_is_a_sentence(tmp_path):
    with pytest.raises(CourseError, match="There are no lessons"):
        notebook.lessons(tmp_path)


DAMAGED = [
    "",
    "{",
    "[]",
    "{}",
    '{"cells": 3}',
    '{"nbformat": 4, "cells": [{"source": 1}]}',
    "\x00\xff",
]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("read", [notebook.cells, notebook.read, notebook.definitions])
def test_a_damaged_notebook_is_a_sentence(lesson, text, read):
    lesson.write_text(text, encoding="utf-8")
    with pytest.raises(CourseError, match=r"06_grad_scaler.ipynb is damaged or not a notebook"):
        read(lesson)
