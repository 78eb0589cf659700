"""Lesson 0: its self-test knows what torch does, and sends every learner to the right entrance."""

import itertools
import math

import numpy as np
import pytest
import torch

from amp_utils.course import ROOT
from amp_utils.course.notebook import load, read

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


@pytest.fixture(scope="module")
def sources():
    """The cells' sources by the ids of the cells."""
    return {cell.id: cell.source for cell in read(ROOT / "notebooks/00_start_here.ipynb").cells}


def test_torch_gives_the_answers_that_can_be_worked_out(lesson):
    assert lesson.ask_torch() == TRUTH


def test_the_answers_cell_is_empty_and_asks_for_each_of_them(sources):
    namespace = {}
    exec(sources[ANSWERS], namespace)
    assert namespace["answers"] == dict.fromkeys(TRUTH)
    for line in sources[ANSWERS].splitlines():
        assert "None" not in line or line.rstrip().endswith(("?", "(2, 5)"))


def expected(missed: list[str]) -> str:
    if not missed:
        return "5 of 5 right. You know PyTorch: enter at lesson 1."
    if len(missed) == 1:
        where = f"enter at lesson 1, and look into {missed[0]} on the way."
        return f"4 of 5 right. You know PyTorch: {where}"
    right = f"{5 - len(missed)} of 5 right. New to PyTorch: enter at A1."
    return f"{right} Mind {', '.join(missed)}, skim the rest."


def test_every_combination_of_right_wrong_and_unknown_gets_its_entrance(lesson):
    choice = {True: TRUTH, False: WRONG, None: dict.fromkeys(TRUTH)}
    for right in itertools.product([True, False, None], repeat=5):
        given = {name: choice[r][name] for name, r in zip(TRUTH, right, strict=True)}
        said = lesson.entrance(given, TRUTH)
        if right == (None,) * 5:
            assert said.startswith("✎ no answers yet")
        else:
            missed = [name for name, r in zip(TRUTH, right, strict=True) if not r]
            assert said == expected(missed), f"answers: {given}"


@pytest.mark.parametrize("missed", [[], ["A4"], ["A1", "A6"], list(TRUTH)], ids=len)
def test_the_cells_run_again_with_answers_filled_in(sources, missed, capsys):
    filled = sources[ANSWERS]
    for name in TRUTH:
        answer = WRONG[name] if name in missed else TRUTH[name]
        filled = filled.replace(f'"{name}": None', f'"{name}": {answer!r}')
    namespace = {"torch": torch, "nn": torch.nn, "DataLoader": torch.utils.data.DataLoader}
    for source in (filled, *(sources[f"c00-{n}"] for n in (33, 38, 34, 35))):
        exec(source, namespace)
    assert capsys.readouterr().out == expected(missed) + "\n"


def test_an_answer_may_be_written_in_any_usual_way(lesson):
    for name, same in (
        ("A3", [[4, 3], torch.Size([4, 3]), (4, 3)]),
        ("A1", [6, 6.0, torch.tensor(6.0), torch.tensor([6])]),
    ):
        for answer in same:
            assert lesson.entrance({**TRUTH, name: answer}, TRUTH) == expected([]), answer


def test_an_odd_answer_is_wrong_and_stops_nothing(lesson):
    odd = ["6", "", "no idea", math.nan, [], torch.ones(2), np.ones(3), {}, print]
    for name, answer in itertools.product(TRUTH, [*odd, [[4], 3], (torch.ones(2), 3)]):
        said = lesson.entrance({**TRUTH, name: answer}, TRUTH)
        assert said == expected([name]), f"{name}: {answer!r}"


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
