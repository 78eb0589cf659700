"""`@each` is `pytest.mark.parametrize` in a single test: one promise, tried with many values."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str, values: Iterable[Any]) -> Callable[[Callable], Callable]:
    """Call the test with each of the values in turn; a failure carries a note that says with which.

    As with `parametrize`, `names` may be several, with commas between them, and each value then is
    a tuple. Fixtures are made once for all the values.
    """
    keys = [name.strip() for name in names.split(",")]
    cases = [dict(zip(keys, value if len(keys) > 1 else [value], strict=True)) for value in values]
    assert cases, "a test without values proves nothing"

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def with_each(**fixtures: Any) -> None:
            for case in cases:
                try:
                    test(**fixtures, **case)
                except BaseException as error:
                    error.add_note("with " + ", ".join(f"{k} = {v!r}" for k, v in case.items()))
                    raise

        signature = inspect.signature(test)
        kept = [p for name, p in signature.parameters.items() if name not in keys]
        with_each.__signature__ = signature.replace(parameters=kept)
        return with_each

    return decorate
