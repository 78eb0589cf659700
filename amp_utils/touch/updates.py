"""The second figure of lesson 1: an update snaps to a weight's grid, and sums of many race."""

import torch

from amp_utils.formats import BF16, FP16, FP32
from amp_utils.touch import frame
from amp_utils.touch.bits import described

WEIGHTS = [0, 0.0625, 0.1, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 1.99, 2, 2.5, 3, 4, 5, 8, 10]
WEIGHTS += [16, 32, 64, 100, 128, 256, 512, 1000, 1024, 2048]
UPDATES = [float(f"{n}e{k}") for k in range(-5, 0) for n in (1, 2, 3, 5)]
UPDATES += [2.0**-k for k in range(25)]
LOOKS = {
    "fp32": (frame.LINE, "", 7),
    "bf16": (frame.BLUE, "7 3", 2.2),
    "fp16": (frame.RED, "10 2 2 2", 2.2),
    "fp16 + Kahan": (frame.GREEN, "2 3", 2.2),
}


def updates(weight: float = 1.0, update: float = 0.003, times: int = 1000) -> None:
    """Show what 16 bits make of an update, once and `times` times; a learner changes all of it.

    The update is stored in float32; only the sums are rounded. The weight is at most 2048 and the
    update at most 1; times is 100, 1000 or 10,000. ValueError for others.
    """
    if not (0 <= weight <= 2048 and 0 < update <= 1 and times in (100, 1000, 10_000)):
        given = f"weight = {weight}, update = {update}, times = {times}"
        raise ValueError(f"{given}: give 0 to 2048, up to 1, and 100, 1000 or 10000.")
    runs = race(weight, [update] * times)
    ends = ", ".join(f"{name} {totals[-1]:.4g}" for name, totals in runs.items())
    frame.show(
        "updates",
        {
            "formats": [described(fmt, fmt.name) for fmt in (FP32, BF16, FP16)],
            "weights": sorted({*WEIGHTS, weight}),
            "updates": sorted({*UPDATES, update}),
            "weight": weight,
            "update": update,
            "times": times,
        },
        uses="floats",
        label="A weight and its updates on the number line, and sums of many",
        alt=f"{weight:g} and {times} updates of {update:g} add up to: {ends}.",
        still=still(runs, weight, update),
    )


def race(start: float, terms: list[float]) -> dict[str, list[float]]:
    """The totals of float32 terms, from `start` on, in three formats, and in fp16 after Kahan."""
    terms = torch.tensor(terms)
    runs = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        total = torch.tensor(start, dtype=dtype)
        runs[name] = [total.item()] + [total.add_(term).item() for term in terms]
    total, lost = torch.tensor(start).half(), torch.tensor(0.0).half()
    runs["fp16 + Kahan"] = [total.item()]
    for term in terms:
        corrected = (term - lost).half()
        lost = (total + corrected - total) - corrected
        total = total + corrected
        runs["fp16 + Kahan"].append(total.item())
    return runs


def still(runs: dict[str, list[float]], weight: float, update: float) -> str:
    """The drawing without script: bf16 around the weight, and each sum, named where it ends."""
    at, count, free = BF16.encode(weight), len(runs["fp32"]) - 1, 222
    near = [BF16.decode(max(at + i, 0)) - BF16.decode(at) for i in range(-9, 6)]
    x = [160 + 28 * value / near[-1] * 5 for value in near]
    tip = 160 + 28 * min(update / near[-1] * 5, 5.4)
    band = frame.path(f"M{(x[8] + 160) / 2:g} 110H{(x[10] + 160) / 2:g}", "#F9E0D0", 80)
    strokes = "M12 120H312" + "".join(f"M{each:g} 110v20" for each in x if each > 12)
    parts = [
        frame.text(12, 24, f"bf16 around {weight:g}", font_weight="bold"),
        frame.text(160, 58, "sums in the band are lost", text_anchor="middle", fill=frame.QUIET),
        band + frame.path(strokes, frame.QUIET) + frame.path(f"M160 84H{tip:g}v9", frame.INK, 2),
        frame.text(tip + 8, 88, f"+ {update:g}"),
        frame.text(160, 168, f"{weight:g}", text_anchor="middle"),
        frame.text(350, 24, f"{count:,} updates, from {weight:g} on", font_weight="bold"),
    ]
    low, high = (end(map(end, runs.values())) for end in (min, max))
    for i, (name, totals) in enumerate(sorted(runs.items(), key=lambda run: run[1][-1])):
        color, dash, broad = LOOKS[name]
        points = [
            f"{350 + 250 * n / count:.0f} {200 - 150 * (totals[n] - low) / (high - low or 1):.0f}"
            for n in range(0, count + 1, count // 50)
        ]
        free = max(min(free - 20, int(points[-1].split()[1])), 44 + 20 * (3 - i))
        lines = f"M{'L'.join(points)}M610 {free}h20"
        line = f'<g stroke-dasharray="{dash}">{frame.path(lines, color, broad)}</g>'
        parts.insert(0 if name == "fp32" else len(parts), line)
        note = ", stuck" if totals[-1] == totals[-2] else ""
        parts.append(frame.text(638, free + 4, f"{name}: {totals[-1]:.5g}{note}"))
    return frame.drawing(800, 220, *parts)
