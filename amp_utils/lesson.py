"""Lesson plumbing: validate parameters, compare predictions, check exercises, record results.

>>> validate({"steps": -1}, steps=whole(1, 1000))
Traceback (most recent call last):
    ...
amp_utils.lesson.ParameterError: steps = -1 is not allowed: give a whole number from 1 to 1000.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ParameterError(ValueError):
    """A parameter has a value that the lesson cannot use; one sentence for the learner."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback (IPython's hook): the sentence alone."""
        return [f"ParameterError: {self}"]


@dataclass(frozen=True)
class Rule:
    """What a parameter may be: a test, and the words for an error message."""

    accepts: Callable[[Any], bool]
    allowed: str


def whole(low: int, high: int | None = None) -> Rule:
    """A whole number from `low` to `high`, both included; no upper limit where `high` is None."""
    top = math.inf if high is None else high
    words = f"of at least {low}" if high is None else f"from {low} to {high}"
    return Rule(lambda value: _is_int(value) and low <= value <= top, f"a whole number {words}")


def real(
    *, above: float = -math.inf, at_least: float = -math.inf, at_most: float = math.inf
) -> Rule:
    """A finite number within the given limits; whole numbers count as numbers."""

    def accepts(value: Any) -> bool:
        is_number = _is_int(value) or isinstance(value, float)
        return is_number and math.isfinite(value) and value > above and at_least <= value <= at_most

    limits = [f"above {above:g}"] if above > -math.inf else []
    limits += [f"at least {at_least:g}"] if at_least > -math.inf else []
    limits += [f"at most {at_most:g}"] if at_most < math.inf else []
    return Rule(accepts, " ".join(["a finite number", " and ".join(limits)]).strip())


def choice(*options: str | int | float) -> Rule:
    """One of the given values, of the same type."""
    return Rule(
        lambda value: any(type(value) is type(option) and value == option for option in options),
        "one of " + ", ".join(map(repr, options)),
    )


def flag() -> Rule:
    """True or False."""
    return Rule(lambda value: isinstance(value, bool), "True or False")


def validate(values: Mapping[str, Any], **rules: Rule) -> None:
    """Check `values[name]` against each rule; `values` is usually the notebook's `globals()`.

    Raises ParameterError for the first bad value, naming parameter, value and what is allowed.
    """
    for name, rule in rules.items():
        if not rule.accepts(values[name]):
            raise ParameterError(f"{name} = {values[name]!r} is not allowed: give {rule.allowed}.")


def predict(guess: Any, answer: Any) -> None:
    """Print how a prediction compares with the measured answer; None stands for no prediction."""
    if guess is None:
        print(f"✎ no prediction made; measured: {answer}")
    elif guess == answer:
        print(f"✓ as you predicted: {answer}")
    else:
        print(f"✗ you predicted {guess}; measured: {answer}")


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
        except AssertionError as error:
            print(f"✗ not yet: {str(error) or 'a check failed, and it has no words of its own'}")
        except Exception as error:  # the learner's code may fail in any way; the page must go on
            print(f"✗ your code stopped with {type(error).__name__}: {error}")
        else:
            print("✓ correct")

    run()
    return run


def record(**results: str | int | float | bool | list | dict) -> None:
    """Keep a lesson's key results in the executed notebook, for `recorded` to read back.

    The values go into the metadata of a display output and its text shows the names only, so that
    saved outputs compare equal across machines. Raises TypeError for a value that JSON cannot hold.
    """
    from IPython.display import display

    json.dumps(results)  # refuse early, in the cell at fault
    display(
        {"text/plain": "recorded: " + ", ".join(results)}, raw=True, metadata={"amp_utils": results}
    )


def recorded(notebook: Mapping[str, Any]) -> dict[str, Any]:
    """The results that `record` kept in an executed notebook (an nbformat node); later ones win."""
    results: dict[str, Any] = {}
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            results |= output.get("metadata", {}).get("amp_utils", {})
    return results


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
