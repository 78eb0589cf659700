"""Lesson 0: its self-test knows what torch does, and sends every learner to the right entrance."""

import itertools
import math

import nbformat
import numpy as np
import pytest
import torch

from amp_utils.course import ROOT
from amp_utils.course.notebook import load

CELLS = {
    cell.id: cell.source
    for cell in nbformat.read(ROOT / "notebooks" / "00_start_here.ipynb", 4).cells
}
# What the questions ask, worked out without torch.
TRUTH = {
    "A1": 2 * 3.0,
    "A2": 3 * 2 + 2,
    "A3": np.broadcast_shapes((4, 1), (3,)),
    "A4": 6 & 3,
    "A6": math.ceil(10 / 4),
}
WRONG = {"A1": 9, "A2": 6, "A3": (4, 1), "A4": True, "A6": 2}
ANSWERS = "c00-31"


@pytest.fixture(scope="module")
def lesson():
    return load("00")


def test_torch_gives_the_answers_that_can_be_worked_out(lesson):
    assert lesson.ask_torch() == TRUTH


def test_the_answers_cell_is_empty_and_asks_for_each_of_them():
    namespace = {}
    exec(CELLS[ANSWERS], namespace)
    assert namespace["answers"] == dict.fromkeys(TRUTH)
    assert all(
        line.rstrip().endswith(("?", "(2, 5)"))
        for line in CELLS[ANSWERS].splitlines()
        if "None" in line
    )


def expected(missed: list[str]) -> str:
    if not missed:
        return "5 of 5 right. You know PyTorch: enter at lesson 1."
    if len(missed) == 1:
        return f"4 of 5 right. You know PyTorch: enter at lesson 1, and look into {missed[0]} on the way."
    return f"{5 - len(missed)} of 5 right. New to PyTorch: enter at A1. Mind {', '.join(missed)}, skim the rest."


@pytest.mark.parametrize("right", list(itertools.product([True, False, None], repeat=5)))
def test_every_combination_of_right_wrong_and_unknown_gets_its_entrance(lesson, right):
    choice = {True: TRUTH, False: WRONG, None: dict.fromkeys(TRUTH)}
    said = lesson.entrance(
        {name: choice[r][name] for name, r in zip(TRUTH, right, strict=True)}, TRUTH
    )
    if right == (None,) * 5:
        assert said.startswith("✎ no answers yet")
    else:
        assert said == expected([name for name, r in zip(TRUTH, right, strict=True) if not r])


@pytest.mark.parametrize("right", list(itertools.product([True, False], repeat=5)))
def test_the_cells_run_again_with_every_combination_filled_in(right, capsys):
    filled = CELLS[ANSWERS]
    for name, r in zip(TRUTH, right, strict=True):
        filled = filled.replace(f'"{name}": None', f'"{name}": {(TRUTH if r else WRONG)[name]!r}')
    namespace = {"torch": torch, "nn": torch.nn, "DataLoader": torch.utils.data.DataLoader}
    for source in (filled, *(CELLS[f"c00-{n}"] for n in (33, 38, 34, 35))):
        exec(source, namespace)
    assert (
        capsys.readouterr().out
        == expected([n for n, r in zip(TRUTH, right, strict=True) if not r]) + "\n"
    )


@pytest.mark.parametrize("same", [[4, 3], torch.Size([4, 3]), (4, 3)])
def test_a_shape_may_be_written_in_any_usual_way(lesson, same):
    assert lesson.entrance({**TRUTH, "A3": same}, TRUTH) == expected([])


@pytest.mark.parametrize("same", [6, 6.0, torch.tensor(6.0), torch.tensor([6])])
def test_a_number_may_be_written_as_torch_prints_it(lesson, same):
    assert lesson.entrance({**TRUTH, "A1": same}, TRUTH) == expected([])


@pytest.mark.parametrize(
    "odd",
    [
        "6",
        "",
        "no idea",
        math.nan,
        [],
        torch.ones(2),
        np.ones(3),
        {},
        print,
        [[4], 3],
        (torch.ones(2), 3),
    ],
)
@pytest.mark.parametrize("name", TRUTH)
def test_an_odd_answer_is_wrong_and_stops_nothing(lesson, name, odd):
    assert lesson.entrance({**TRUTH, name: odd}, TRUTH) == expected([name])


def test_a_missing_answer_is_one_that_is_not_known(lesson):
    assert lesson.entrance({"A1": 6}, TRUTH) == expected(["A2", "A3", "A4", "A6"])
    assert lesson.entrance({}, TRUTH).startswith("✎ no answers yet")


def test_the_solutions_of_the_exercises(lesson):
    matrix = torch.ones(3, 3)
    assert lesson.autocast_dtype(matrix, matrix) == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    for dtype in (torch.float16, torch.bfloat16):
        digits = 1 - int(math.log2(torch.finfo(dtype).eps))  # of the significand
        assert lesson.first_gap(dtype) == 2**digits
