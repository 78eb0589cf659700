"""The figure of lesson 8: put calls between four micro-batches and watch the gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from amp_utils.touch import frame

CALLS = ("unscale_", "step", "update", "zero_grad")
SCALE = 1024.0
Pressed = Sequence[Sequence[bool]]

# What each error of `timeline.js` is called there, and calls that raise it.
ERRORS = {
    "unscaled twice": ["unscale_", "unscale_"],
    "unscaled late": ["step", "unscale_"],
    "stepped twice": ["step", "step"],
    "nothing seen": ["update"],
}


class Row(NamedTuple):
    """After one call: the gradient (None: no gradient), the loss scale, and what torch said."""

    batch: int  # 0, 1, 2, …
    call: str  # "backward" or one of CALLS
    grad: float | None
    scale: float
    error: str


def timeline() -> None:
    """Show four micro-batches; the reader chooses which calls of a scaler follow each."""
    rows = run([[False] * 4] * 4)
    alt = (
        f"Four micro-batches, each with the gradient 1, come scaled by {SCALE:g}. No other call "
        f"has been made, so .grad adds up to {rows[-1].grad:g}."
    )
    frame.show(
        "timeline",
        {"init": SCALE, "messages": {name: message(calls) for name, calls in ERRORS.items()}},
        label="Four micro-batches and the calls between them",
        alt=alt,
        still=still(rows),
    )


def run(pressed: Pressed, growth_interval: int = 2000) -> list[Row]:
    """What `torch.amp.GradScaler` and SGD do; `pressed[j][c]`: call c follows micro-batch j.

    The loss is the weight, so that its gradient is 1. The last row may have torch's error.
    """
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", SCALE, growth_interval=growth_interval)
    rows = []
    for batch, calls in enumerate(pressed):
        scaler.scale(weight * 1).backward()
        rows.append(Row(batch, "backward", weight.grad.item(), scaler.get_scale(), ""))
        for call in (name for name, on in zip(CALLS, calls, strict=True) if on):
            error = _try(scaler, optimizer, call)
            grad = None if weight.grad is None else weight.grad.item()
            rows.append(Row(batch, call, grad, scaler.get_scale(), error))
            if error:
                return rows
    return rows


def message(calls: Sequence[str]) -> str:
    """What torch says to the last of these calls, which follow one `backward`."""
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer, scaler = torch.optim.SGD([weight]), torch.amp.GradScaler("cpu")
    scaler.scale(weight * 1).backward()
    return [_try(scaler, optimizer, call) for call in calls][-1]


def _try(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, call: str) -> str:
    try:
        if call == "zero_grad":
            optimizer.zero_grad()
        elif call == "update":
            scaler.update()
        else:
            getattr(scaler, call)(optimizer)
    except (RuntimeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def still(rows: list[Row]) -> str:
    """The calls one below the other, each with the gradient that it leaves."""
    parts = [frame.text(12, 24, "Four scaled gradients add up, and no other call has been made")]
    for i, row in enumerate(rows):
        y, width = 54 + 26 * i, 320 * row.grad / rows[-1].grad
        parts += [
            frame.text(12, y, f"backward {row.batch + 1}"),
            frame.path(f"M110 {y - 5}h{width:.5g}", frame.ORANGE, 16),
            frame.text(118 + width, y, f"{row.grad:g}"),
        ]
    return frame.drawing(520, 54 + 26 * len(rows), *parts)
