"""Each figure to touch with data of a test's size."""

from collections.abc import Callable

import torch

from amp_utils import touch
from amp_utils.course import cells


def loss_scale() -> None:
    values = torch.randn(500).double() * 2.0 ** torch.randint(-50, -20, (500,))
    wave = torch.linspace(-1, 1, 64).reshape(8, 8)
    touch.loss_scale(values, {0: 0 * wave, 16: wave, 40: wave * torch.nan})


def ladder() -> None:
    touch.ladder(torch.randn(64))


def flight() -> None:
    touch.flight(2.0**32, 8, 2.0**36, steps=60)


def flow() -> None:
    linear, norm = torch.nn.Linear(4, 4), torch.nn.RMSNorm(4)
    touch.flow(torch.nn.Sequential(linear, norm, torch.nn.SiLU(), linear), torch.ones(2, 4))


def timeline() -> None:
    touch.timeline()


def bits() -> None:
    touch.bits(0.1)


def updates() -> None:
    touch.updates()


# One for each figure; test_frame.py runs the promises that all figures share over them.
FIGURES = (bits, flight, flow, ladder, loss_scale, timeline, updates)
EXAMPLES = {example.__name__: example for example in FIGURES}

# What changes a control that has the focus; a button takes Enter.
KEYS = {"range": "ArrowRight", "select-one": "ArrowDown"}


def html(example: Callable[[], None]) -> str:
    """What an example displays."""
    torch.manual_seed(0)
    with cells.outputs() as shown:
        example()
    (output,) = shown
    assert set(output["data"]) == {"text/html", "text/plain"} and not output["metadata"]
    return output["data"]["text/html"]
