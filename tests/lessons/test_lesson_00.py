"""Lesson 0: its experiment keeps its promise, and its five questions show the right entrance."""

import math

import numpy as np
import pytest
import torch
from support.each import each

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
WRONG = {"A1": 9, "A2": 6, "A3": (4, 1), "A4": 7, "A6": 2}
ANSWERS, VERDICT, DATA = "c00-31", "c00-35", "c00-40"


@pytest.fixture(scope="module")
def sources():
    """The cells' sources by the ids of the cells."""
    return {cell.id: cell.source for cell in read(ROOT / "notebooks/00_start_here.ipynb").cells}


@each(
    "missed, said",
    [
        ([], "5 of 5 right. Your way: lesson 1."),
        (["A4"], "4 of 5 right. Your way: lesson 1; A4 when a lesson sends you there."),
        (
            ["A1", "A6"],
            "3 of 5 right. Your way: A1 → lesson 1; A6 when a lesson sends you there.",
        ),
        (
            list(TRUTH),
            "0 of 5 right. Your way: A1 → A2 → A3 → lesson 1; "
            "A4 and A6 when a lesson sends you there.",
        ),
    ],
)
def test_the_answers_lead_to_an_entrance(sources, capsys, missed, said):
    filled = sources[ANSWERS]
    for name in TRUTH:
        answer = WRONG[name] if name in missed else TRUTH[name]
        filled = filled.replace(f'"{name}": None', f'"{name}": {answer!r}')
    namespace = {"torch": torch, "nn": torch.nn, "DataLoader": torch.utils.data.DataLoader}
    exec(filled, namespace)
    exec(sources[VERDICT], namespace)
    way, *corrected = capsys.readouterr().out.splitlines()
    assert way == said
    assert corrected == [
        f"{name}: you wrote {WRONG[name]}; PyTorch says {namespace['right'][name]}"
        for name in missed
    ]
    assert namespace["right"] == TRUTH


def test_only_the_scaled_fp16_network_learns(sources):
    lesson = load("00", device=torch.device("cpu"), seed=3, steps=20)
    exec(sources[DATA], vars(lesson))
    runs = {scaled: lesson.train(torch.float16, scaled)[1] for scaled in (False, True)}
    assert set(runs[False]) == {runs[False][0]}, "an unscaled step changed a weight"
    assert runs[True][-1] < 0.7 * runs[True][0]


def test_the_solution_of_the_first_exercise_leaves_no_region_open():
    matrix = torch.ones(3, 3)
    assert load("00").autocast_dtype(matrix, matrix) == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
