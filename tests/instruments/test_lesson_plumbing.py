"""Lesson plumbing: a sentence refuses parameters, exercises report, results survive."""

import math

import pytest

from amp_utils import lesson


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


@pytest.mark.parametrize(("guess", "mark"), [(None, "✎"), (2, "✓"), (3, "✗")])
def test_a_prediction_is_compared(guess, mark, capsys):
    lesson.predict(guess, 2)
    out = capsys.readouterr().out
    assert out.startswith(mark) and "2" in out


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
