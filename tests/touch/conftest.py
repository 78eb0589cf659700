"""The browser, and a figure's arithmetic in it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from amp_utils import touch

SOURCES = Path(touch.__file__).parent


@pytest.fixture
def arithmetic(opened) -> Callable:
    """`arithmetic(*names)(expression, argument)`: JavaScript with the functions of `name.js`."""

    def load(*names: str) -> Callable:
        page = opened("")
        for name in ("frame", *names):
            page.add_script_tag(content=(SOURCES / f"{name}.js").read_text("utf-8"))
        return lambda expression, argument=None: page.evaluate(
            f"text => {{ const given = JSON.parse(text); return ({expression}) }}",
            json.dumps(argument),
        )

    return load
