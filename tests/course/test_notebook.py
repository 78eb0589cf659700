"""The reader of notebooks: what is chosen, what is defined without being run, what is damaged."""

import pytest
from nbformat.v4 import new_code_cell, new_notebook, writes

from amp_utils.course import CourseError, notebook

DEFINING = """
import math
LIMIT = 2
counter = 1 / 0
first = SECOND = 1 / 0
def area(r):
    return math.pi * r**LIMIT
"""


@pytest.fixture
def lesson(tmp_path):
    def code(source: str, *tags: str):
        return new_code_cell(source, metadata={"tags": list(tags)})

    cells = [
        code("steps: int = 3  # how many", "parameters"),
        code(DEFINING),
        code("def far():\n    return width * steps"),
        code("def answer():\n    raise NotImplementedError", "exercise"),
        code("def answer():\n    return 42\ncheck()", "solution"),
    ]
    path = tmp_path / "06_grad_scaler.ipynb"
    path.write_text(writes(new_notebook(cells=cells)))
    return path


def test_definitions_are_loaded_and_other_statements_are_not_run(lesson):
    loaded = notebook.definitions(lesson, width=5)
    assert loaded.area(1) == pytest.approx(3.14159, abs=1e-5)
    assert loaded.answer() == 42, "a solution takes the place of its stub"
    assert not hasattr(loaded, "counter") and not hasattr(loaded, "first")
    assert loaded.far() == 15, "what a function needs of the lesson can be given"
    loaded.width = 7
    assert loaded.far() == 21


def test_cells_and_tags_are_read_by_both_readers(lesson):
    plain, nodes = notebook.cells(lesson), notebook.read(lesson).cells
    assert [cell.source for cell in plain] == [cell.source for cell in nodes]
    assert [set(cell.tags) for cell in plain] == [notebook.tags(cell) for cell in nodes]
    assert all(cell.is_code for cell in plain) and plain[0].tags == {"parameters"}


def test_lessons_are_chosen_by_number_or_beginning_and_foreign_files_are_not(lesson):
    folder = lesson.parent
    names = [
        "00_start_here",
        "06_grad_scaler",
        "11_checkpoint_and_inference",
        "A1_tensors_and_autograd",
    ]
    for name in [*reversed(names), "06_grad_scaler-Copy1", "my_own"]:
        (folder / f"{name}.ipynb").touch()

    def chosen(*wanted: str) -> list[str]:
        return [path.stem for path in notebook.choose(wanted, folder)]

    assert chosen() == names, "all, in reading order"
    for wanted in ["06", "6", "06_grad", "06_GRAD_scaler.ipynb", "notebooks/06_grad_scaler.ipynb"]:
        assert chosen(wanted) == ["06_grad_scaler"], wanted
    assert chosen("a1", "0") == ["A1_tensors_and_autograd", "00_start_here"]
    for wanted in ["99", "my_own", "06_grad_scaler-Copy1", "1x"]:
        with pytest.raises(CourseError, match=f"'{wanted}' is not a lesson: give one of 00_start"):
            notebook.choose([wanted], folder)
    with pytest.raises(CourseError, match="'' is not a lesson: give one of"):
        notebook.choose([""], folder)


def test_an_empty_folder_is_a_sentence(tmp_path):
    with pytest.raises(CourseError, match="There are no lessons in"):
        notebook.lessons(tmp_path)


DAMAGED = ["", "{", "[]", "{}", '{"cells": 3}', '{"cells": [{"source": 1}]}', "\x00\udcff"]


@pytest.mark.parametrize("text", DAMAGED)
@pytest.mark.parametrize("read", [notebook.cells, notebook.read, notebook.definitions])
def test_a_damaged_notebook_is_a_sentence(lesson, text, read):
    lesson.write_text(text, errors="surrogateescape")
    with pytest.raises(CourseError, match=r"06_grad_scaler.ipynb is damaged or not a notebook"):
        read(lesson)


def test_a_notebook_that_nbformat_only_complains_of_is_damaged(lesson, capfd):
    saved = writes(new_notebook(cells=[new_code_cell("1")])).replace('"outputs": [],', "")
    lesson.write_text(saved)
    with pytest.raises(CourseError, match="damaged"):
        notebook.read(lesson)
    assert capfd.readouterr() == ("", "")
