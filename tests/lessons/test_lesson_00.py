"""Lesson 0: its experiment keeps its promise, and its three questions show the right entrance."""

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
}
WRONG = {"A1": 9, "A2": 6, "A3": (4, 1)}
ANSWERS, VERDICT, DATA = "c00-31", "c00-35", "c00-40"


@pytest.fixture(scope="module")
def sources():
    """The cells' sources by the ids of the cells."""
    return {cell.id: cell.source for cell in read(ROOT / "notebooks/00_start_here.ipynb").cells}


@each(
    "missed, said",
    [
        ([], "3 of 3 right. Your way: lesson 1"),
        (["A2"], "2 of 3 right. Your way: A2 → lesson 1"),
        (list(TRUTH), "0 of 3 right. Your way: A1 → A2 → A3 → lesson 1"),
    ],
)
def test_the_answers_lead_to_an_entrance(sources, capsys, missed, said):
    filled = sources[ANSWERS]
    for name in TRUTH:
        answer = WRONG[name] if name in missed else TRUTH[name]
        filled = filled.replace(f'"{name}": None', f'"{name}": {answer!r}')
    namespace = {"torch": torch, "nn": torch.nn}
    exec(filled, namespace)
    exec(sources[VERDICT], namespace)
    *corrected, way = capsys.readouterr().out.splitlines()
    assert way == said
    assert corrected == [
        f"{name}: you wrote {WRONG[name]}; PyTorch says {namespace['right'][name]}"
        for name in missed
    ]
    assert namespace["right"] == TRUTH


def test_an_omitted_answer_is_not_given_away(sources, capsys):
    namespace = {"torch": torch, "nn": torch.nn}
    exec(sources[ANSWERS], namespace)
    exec(sources[VERDICT], namespace)
    assert capsys.readouterr().out == "0 of 3 right. Your way: A1 → A2 → A3 → lesson 1\n"


def test_only_the_scaled_fp16_network_learns(sources):
    lesson = load("00", device=torch.device("cpu"), seed=3, steps=20)
    exec(sources[DATA], vars(lesson))
    runs = {scale: lesson.train(torch.float16, scale)[1] for scale in (1, 65_536)}
    assert set(runs[1]) == {runs[1][0]}, "an unscaled step changed a weight"
    assert runs[65_536][-1] < 0.7 * runs[65_536][0]


def test_the_good_factors_lie_between_underflow_and_overflow(sources):
    lesson = load("00", device=torch.device("cpu"), seed=3)
    exec(sources[DATA], vars(lesson))
    gradient = lesson.first_step(torch.bfloat16, 1)["output.grad"].double().abs()
    factors = lesson.good_factors()
    assert factors == [factors[0] * 2**k for k in range(len(factors))]
    assert 1 / 4 < factors[0] * gradient.min() / 2**-24 < 4
    assert 1 / 4 < factors[-1] * gradient.max() / lesson.unit / 65504 < 4


MISTAKES = [  # what somebody may write in exercise 2, and what the check says
    ("optimizer.zero_grad()", "pass", "did you clear the old gradients first?"),
    ("float16):", "float16, enabled=False):", "line 1: the output was"),
    ("scaler.scale(loss)", "loss", "Attempted unscale_ but _scale is None"),
    ("scaler.step(optimizer)", "optimizer.step()", "but the weights changed"),
    ("scaler.unscale_(optimizer)", "pass", "your gradient is 65,536 times the right one"),
    ("scaler.update()", "pass", "unscale_() is being called after step()"),
    ("    scaler.scale", "        scaler.scale", "line 2: backward ran inside"),
    (
        "return loss.item(),",
        "return loss.detach(),",
        "not [<class 'torch.Tensor'>, <class 'float'>]",
    ),
    ("return loss.item(),", "return", "return two Python numbers, not"),
    (".max()", ".max() / scaler.get_scale()", "is 1.5259e-05 times the right one"),
    (
        "scaler.step(optimizer)",
        "scaler.step(optimizer); scaler.step(optimizer)",
        "has already been called",
    ),
]


@each("line, instead, said", MISTAKES)
def test_the_check_of_the_second_exercise_names_the_mistake(sources, capsys, line, instead, said):
    lesson = vars(load("00", device=torch.device("cpu"), seed=0, steps=20))
    exec(sources[DATA], lesson)
    lesson["runs"] = {"fp16, scaled loss": lesson["train"](torch.float16, 65_536)}
    solution, check = sources["c00-26"], sources["c00-24"]
    assert solution.count(line) == 1
    exec(solution.split("\n\n\ncheck")[0].replace(line, instead), lesson)
    exec(check, lesson)
    assert said in capsys.readouterr().out
