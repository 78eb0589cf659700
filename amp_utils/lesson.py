"""Lesson plumbing: validate parameters, compare predictions, check exercises, record results."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from amp_utils import progress

Rule = tuple[Callable[[Any], bool], str]  # a test, and what is allowed in words


class ParameterError(ValueError):
    """A parameter has a value that the lesson cannot use; one sentence for the learner."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback (IPython's hook): the sentence alone."""
        return [f"ParameterError: {self}"]


def whole(low: int, high: float = math.inf) -> Rule:
    """A whole number from `low` to `high`, both included."""
    words = f"from {low} to {high}" if high < math.inf else f"of at least {low}"
    return lambda value: type(value) is int and low <= value <= high, f"a whole number {words}"


def is_number(value: Any) -> bool:
    """Whether a value is a finite int or float."""
    return type(value) in (int, float) and math.isfinite(value)


def real(*, above=-math.inf, at_least=-math.inf, at_most=math.inf) -> Rule:
    """A finite number within the given limits; whole numbers count as numbers."""

    def accepts(value: Any) -> bool:
        return is_number(value) and value > above and at_least <= value <= at_most

    limits = {"above": above, "at least": at_least, "at most": at_most}
    given = [f"{words} {limit:g}" for words, limit in limits.items() if math.isfinite(limit)]
    return accepts, f"a finite number {' and '.join(given)}".strip()


def choice(*options: str | int | float) -> Rule:
    """One of the given values, of the same type."""
    words = ", ".join(map(repr, options))
    typed = [(type(option), option) for option in options]
    return lambda value: (type(value), value) in typed, f"one of {words}"


def validate(values: Mapping[str, Any], **rules: Rule) -> None:
    """Check `values[name]` against each rule; `values` is usually the notebook's `globals()`.

    Raises ParameterError for the first bad value, naming parameter, value and what is allowed.
    """
    for name, (accepts, allowed) in rules.items():
        if not accepts(values[name]):
            raise ParameterError(f"{name} = {values[name]!r} is not allowed: give {allowed}.")


def predict(guess: Any, answer: Any, within: float = 0) -> None:
    """Compare a prediction with the measured answer, which stays hidden while there is no guess.

    None is no guess, and `...` (Ellipsis) asks for the answer. Words count in any case, a dtype by
    its name; numbers may differ by `within`, a list's one by one.
    """
    if guess is None:
        print("✎ make your guess first: put it in place of None above (or ... to see the answer)")
        return
    verdict = "shown" if guess is ... else "right" if _agree(guess, answer, within) else "wrong"
    print(
        {
            "shown": f"measured: {answer}",
            "right": f"✓ as you predicted: {answer}",
            "wrong": f"✗ you predicted {guess}; measured: {answer}",
        }[verdict]
    )
    progress.note("predict", verdict)


def _agree(guess: Any, answer: Any, within: float) -> bool:
    if isinstance(guess, list | tuple) and isinstance(answer, list | tuple):
        pairs = zip(guess, answer, strict=False)
        return len(guess) == len(answer) and all(_agree(a, b, within) for a, b in pairs)
    if isinstance(guess, int | float) and isinstance(answer, int | float):
        both_nan = guess != guess and answer != answer
        return guess == answer or both_nan or abs(guess - answer) <= within
    names = [str(value).strip().lower().removeprefix("torch.") for value in (guess, answer)]
    return names[0] == names[1]


def check(test: Callable[[], None]) -> Callable[[], None]:
    """Run an exercise's test function at once; print a verdict instead of raising.

    ✎ not attempted (the stub still raises NotImplementedError), ✗ and why, or ✓. The function that
    this decorator returns runs the test again.
    """

    def run() -> None:
        try:
            test()
        except NotImplementedError:
            print("✎ not attempted yet: replace the stub above, then run this cell again.")
            return
        except AssertionError as error:
            verdict = "not yet"
            print(f"✗ not yet: {str(error) or 'a check failed, and it has no words of its own'}")
        except Exception as error:  # the learner's code may fail in any way; the page must go on
            verdict = "not yet"
            print(f"✗ your code stopped with {type(error).__name__}: {error}")
        else:
            verdict = "correct"
            print("✓ correct")
        progress.note("ex", verdict)

    run()
    return run


def record(**results: str | int | float | bool | list | dict) -> None:
    """Keep a lesson's key results in the executed notebook, for `recorded` to read back.

    The values go into the metadata of a display output and its text shows the names only, so that
    saved outputs compare equal across machines. Raises TypeError for a value that JSON cannot hold.
    """
    from IPython.display import display

    json.dumps(results)  # refuse early, in the cell at fault
    names = {"text/plain": f"recorded: {', '.join(results)}"}
    display(names, raw=True, metadata={"amp_utils": results})


def recorded(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """The results that `record` kept in an executed notebook (an nbformat node); later ones win."""
    results: dict[str, Any] = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            results |= output.get("metadata", {}).get("amp_utils", {})
    return results
