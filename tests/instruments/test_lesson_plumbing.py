"""Lesson plumbing: a sentence refuses parameters, exercises report, results survive."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

from amp_utils import lesson, progress


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (lesson.whole(1, 10), [1, 10], [0, 11, -1, 1.0, "many", True, None, math.nan]),
        (lesson.whole(0), [0, 10**9], [-1, 0.5]),
        (lesson.real(above=0), [1, 0.5, 1e-30], [0, -1.0, math.inf, math.nan, "1", True]),
        (lesson.real(at_least=0, at_most=1), [0, 1, 0.5], [-0.1, 1.1]),
        (lesson.choice("fp16", "bf16"), ["fp16"], ["fp12", "", 16, None]),
        (lesson.choice(1, 2), [1], [True, 1.0, "1"]),
        (lesson.choice(True, False), [True, False], [0, 1, "yes"]),
    ],
)
def test_a_rule_accepts_what_it_says_and_nothing_else(rule, good, bad):
    for value in good:
        lesson.validate({"name": value}, name=rule)
    for value in bad:
        with pytest.raises(lesson.ParameterError) as caught:
            lesson.validate({"name": value}, name=rule)
        assert str(caught.value) == f"name = {value!r} is not allowed: give {rule[1]}."


def test_a_refused_parameter_shows_one_line_and_no_traceback():
    assert lesson.ParameterError("x = 1 is wrong.")._render_traceback_() == [
        "ParameterError: x = 1 is wrong."
    ]


def test_limits_are_said_in_words():
    assert lesson.real(above=0, at_most=1)[1] == "a finite number above 0 and at most 1"
    assert lesson.real()[1] == "a finite number"


@pytest.mark.parametrize(
    ("guess", "answer", "printed"),
    [
        (None, "float16", "✎ make your guess first"),
        (..., "float16", "measured: float16"),
        ("Float16", "float16", "✓ as you predicted: float16"),
        (torch.float16, "float16", "✓ as you predicted: float16"),
        ("float32", "float16", "✗ you predicted float32; measured: float16"),
        ([1, 2], [1, 2], "✓"),
        (2.4, 2.0, "✓"),
        ([2, 256], [2.0, 256.0], "✓ as you predicted: [2.0, 256.0]"),
        ((2, 1), [2.0, 1.0], "✓ as you predicted: [2.0, 1.0]"),
        ([2], [2.0, 256.0], "✗ you predicted [2]; measured: [2.0, 256.0]"),
        (2.6, 2.0, "✗ you predicted 2.6; measured: 2.0"),
        (math.inf, math.inf, "✓"),
        ([math.nan, 1], [math.nan, math.inf], "✗"),
        (math.nan, math.nan, "✓"),
        ("2", 2, "✓"),
    ],
)
def test_a_prediction_is_judged_and_the_answer_waits_for_it(guess, answer, printed, capsys):
    lesson.predict(guess, answer, within=0.5)
    out = capsys.readouterr().out
    assert out.startswith(printed)
    assert (str(answer) in out) == (guess is not None)


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """Pretend that JupyterLab runs a cell of a lesson; returns a function that chooses it."""
    tags = ["", "predict", "guess", "", "predict", "guess", "", "exercise", "check", "solution"]
    cells = [{"id": str(i), "metadata": {"tags": [tag]}} for i, tag in enumerate(tags)]
    path = tmp_path / "06_grad_scaler.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    monkeypatch.setenv("JPY_SESSION_NAME", str(path))
    parent = {"metadata": {}}
    shell = SimpleNamespace(get_parent=lambda: parent)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)

    def run(number):
        parent["metadata"]["cellId"] = str(number)
        return lambda: progress.load(tmp_path / "progress.json")

    return run


def test_progress_keeps_first_guesses_and_solved_exercises(cell):
    verdicts = cell(3)
    lesson.predict(None, 1)
    assert verdicts() == {}
    lesson.predict(2, 1)
    lesson.predict(1, 1)  # the answer was there to read
    cell(6)
    lesson.predict(1, 1)
    cell(8)
    lesson.check(lambda: fail(AssertionError("no")))
    assert verdicts() == {"06/predict1": "wrong", "06/predict2": "right", "06/ex1": "not yet"}
    cell(9)
    lesson.check(lambda: None)  # Run All runs the solution
    assert verdicts()["06/ex1"] == "not yet"
    cell(8)
    lesson.check(lambda: None)
    lesson.check(lambda: fail(AssertionError("no")))
    assert verdicts()["06/ex1"] == "correct"


@pytest.mark.parametrize("contents", ["{", "[]", '{"06/ex1": 1}'])
def test_damaged_progress_is_ignored_and_replaced(cell, tmp_path, contents):
    (tmp_path / "progress.json").write_text(contents)
    verdicts = cell(3)
    assert verdicts() == {}
    lesson.predict(1, 1)
    assert verdicts() == {"06/predict1": "right"}
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "06_grad_scaler.ipynb",
        "progress.json",
    ]


def test_nothing_is_noted_outside_of_jupyterlab(cell, tmp_path, monkeypatch, capsys):
    verdicts = cell(3)
    monkeypatch.delenv("JPY_SESSION_NAME")
    lesson.predict(1, 1)
    assert verdicts() == {} and capsys.readouterr().out == "✓ as you predicted: 1\n"


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("test", "starts"),
    [
        (lambda: None, "✓"),
        (lambda: fail(NotImplementedError()), "✎"),
        (lambda: fail(AssertionError("two is right")), "✗ not yet: two is right"),
        (lambda: fail(AssertionError()), "✗ not yet: a check failed"),
        (lambda: fail(TypeError("no")), "✗ your code stopped with TypeError: no"),
    ],
)
def test_a_check_prints_and_never_raises(test, starts, capsys):
    again = lesson.check(test)
    assert capsys.readouterr().out.startswith(starts)
    again()
    assert capsys.readouterr().out.startswith(starts)


def test_recorded_results_are_read_back(monkeypatch):
    shown = []
    monkeypatch.setattr(
        "IPython.display.display", lambda data, raw, metadata: shown.append((data, metadata))
    )
    lesson.record(mse=0.25, kinds=["fp16"])
    lesson.record(mse=0.125)
    cells = [{"outputs": [{"data": data, "metadata": metadata}]} for data, metadata in shown]
    assert lesson.recorded({"cells": [{"source": "markdown"}, *cells]}) == {
        "mse": 0.125,
        "kinds": ["fp16"],
    }
    assert "0.25" not in shown[0][0]["text/plain"], "values in the text would differ by machine"


def test_a_result_that_json_cannot_hold_is_refused():
    with pytest.raises(TypeError):
        lesson.record(tensor=object())
