"""The figure of lesson 6: draw the staircase of a loss scale, then let the scaler fly."""

import math
from collections.abc import Iterable

import torch

from amp_utils.touch import frame


def flight(
    init_scale: float, growth_interval: int, ceiling: float, *, steps: int = 160, bad: int = 20
) -> None:
    """Show how torch's scaler moves its scale over some `steps`, and let the reader change that.

    Above `ceiling` every step overflows, and so does step `bad` (0: none). Both scales are taken to
    the nearest power of two from 2^-60 to 2^60, and a growth interval over 40 to 40.
    """
    growth_interval = min(growth_interval, 40)
    init, top = (min(max(round(math.log2(scale)), -60), 60) for scale in (init_scale, ceiling))
    rows = fly(
        (i == bad for i in range(1, steps + 1)),
        2.0**top,
        init_scale=2.0**init,
        growth_interval=growth_interval,
    )
    skipped = [i for i, (_, inf, _) in enumerate(rows, 1) if inf]
    alt = (
        f"The loss scale starts at {frame.power(init)} and grows every {growth_interval} good "
        f"steps. Above {frame.power(top)} it overflows. {len(skipped)} of {steps} steps are skipped"
        + (f", the first is step {skipped[0]}." if skipped else ".")
    )
    frame.show(
        "flight",
        {"init": init, "interval": growth_interval, "ceiling": top, "steps": steps, "bad": bad},
        label="Flight simulator of a gradient scaler",
        alt=alt,
        still=still(rows, top),
    )


def fly(bad: Iterable[bool], ceiling: float, **settings: float) -> list[tuple[float, bool, float]]:
    """(scale, found inf, weight after the step) for each batch, by `torch.amp.GradScaler`.

    `bad` says which batches are infinite. The weight starts at 2 and has the gradient 1.
    """
    weight = torch.nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.SGD([weight], lr=1 / 128)
    scaler, rows = torch.amp.GradScaler("cpu", **settings), []
    for infinite in bad:
        optimizer.zero_grad()
        scaler.scale(weight * 1).backward()
        scale = scaler.get_scale()
        if inf := infinite or scale > ceiling:
            weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        rows.append((scale, inf, weight.item()))
    return rows


def still(rows: list[tuple[float, bool, float]], ceiling: int) -> str:
    """The flight as a drawing that stands still, with a cross at each skipped step."""
    exponents = [math.log2(scale) for scale, *_ in rows]
    low, high = min(exponents) - 1, max(*exponents, ceiling) + 2
    column = 580 / len(rows)
    x, y = (lambda i: 50 + i * column), (lambda e: 40 + (high - e) / (high - low) * 180)
    path = "".join(
        f"{'V' if i else 'M50 '}{y(e):.1f}H{x(i + 1):.1f}" for i, e in enumerate(exponents)
    )
    crosses = "".join(
        f"M{x(i + 0.5) - 3:.1f} {y(exponents[i]) - 3:.1f}l6 6m0-6l-6 6"
        for i, (_, inf, _) in enumerate(rows)
        if inf
    )
    end = frame.power(round(exponents[-1]))
    return frame.drawing(
        640,
        250,
        frame.text(12, 22, "The scale climbs until it overflows, and probes the ceiling for ever"),
        frame.path(f"M50 {y(ceiling):.1f}H630", frame.RED),
        frame.text(54, y(ceiling) - 5, f"ceiling {frame.power(ceiling)}"),
        frame.text(44, y(exponents[0]) + 4, frame.power(round(exponents[0])), text_anchor="end"),
        frame.text(626, y(exponents[-1]) + 18, end, text_anchor="end"),
        frame.path(path, frame.BLUE, 2),
        frame.path(crosses, frame.RED, 1.5),
        frame.text(50, 242, "step 1", fill=frame.QUIET),
        frame.text(630, 242, f"step {len(rows)}", fill=frame.QUIET, text_anchor="end"),
    )
