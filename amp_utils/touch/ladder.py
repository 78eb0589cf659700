"""The figure of lesson 15: one vector in a narrow format, and the error of each element."""

from torch import Tensor

from amp_utils.blocks import round_scaled
from amp_utils.formats import BF16, E2M1, E2M3, E3M2, E4M3FN, E5M2, FP16, Format
from amp_utils.touch import frame
from amp_utils.touch.bits import described

FORMATS = {
    "bf16": BF16,
    "fp16": FP16,
    "fp8 e5m2": E5M2,
    "fp8 e4m3": E4M3FN,
    "fp6 e3m2": E3M2,
    "fp6 e2m3": E2M3,
    "fp4 e2m1": E2M1,
}
STILL = {  # format, scale, block (None: the whole vector)
    "fp8, one scale": (E4M3FN, "fp32", None),
    "MXFP8": (E4M3FN, "e8m0", 32),
    "MXFP4": (E2M1, "e8m0", 32),
    "NVFP4": (E2M1, "e4m3", 16),
}


def ladder(vector: Tensor, outlier: int = 40, power: int = 20) -> None:
    """Show `vector` in every narrow format under every kind of scale, while one element grows.

    The vector has a multiple of 32 values, 128 at most, and no zeros; `outlier` is the place of the
    element that is multiplied by a power of two, 2^power in the drawing that stands still.
    ValueError for another vector or place.
    """
    values = vector.detach().double().flatten()
    if (
        len(values) % 32
        or not 0 < len(values) <= 128
        or not (values.isfinite() & (values != 0)).all()
    ):
        raise ValueError("vector is not allowed: give 32, 64, 96 or 128 finite numbers, no zeros.")
    if not 0 <= outlier < len(values):
        raise ValueError(f"outlier = {outlier} is not allowed: give 0 to {len(values) - 1}.")
    rows = {name: errors(enlarged(values, outlier, power), *way) for name, way in STILL.items()}
    lost = ", ".join(f"{(row == 1).sum()} with {name}" for name, row in rows.items())
    frame.show(
        "ladder",
        {
            "vector": values.tolist(),
            "outlier": outlier,
            "formats": [described(fmt, name) for name, fmt in FORMATS.items()],
        },
        label="A vector in a narrow format, element by element",
        alt=f"{len(values)} values, one of them made 2^{power} times larger; become 0: {lost}.",
        still=still(rows, power),
        uses="floats",
    )


def enlarged(vector: Tensor, place: int, power: int) -> Tensor:
    """The vector with one element multiplied by 2^power."""
    changed = vector.clone()
    changed[place] *= 2.0**power
    return changed


def errors(vector: Tensor, fmt: Format, kind: str, block: int | None) -> Tensor:
    """The relative error of each element after rounding; 1 for one that became zero."""
    return ((round_scaled(vector, fmt, kind, block) - vector) / vector).abs()


def still(rows: dict[str, Tensor], power: int) -> str:
    """The drawing without script: a row for each way to store the vector, a bar for each error."""
    left, wide = 140, 460
    unit = wide / len(next(iter(rows.values())))
    parts = [
        frame.text(10, 22, f"error by element, 100% high; one is {frame.power(power)} times larger")
    ]
    for y, (name, row) in zip(range(92, 900, 68), rows.items(), strict=False):
        parts.append(frame.text(10, y - 26, name, font_weight="bold"))
        parts.append(frame.text(10, y - 8, f"{(row == 1).sum()} become 0", fill=frame.QUIET))
        for color, mask in ((frame.RED, row == 1), (frame.BLUE, row != 1)):
            bars = "".join(
                f"M{left + unit * (i + 0.5):.1f} {y}v-{max(0.5, 46 * row[i]):.1f}"
                for i in mask.nonzero().flatten().tolist()
            )
            parts.append(frame.path(bars, color, 0.75 * unit) if bars else "")
        parts.append(frame.path(f"M{left} {y}h{wide}", frame.QUIET))
    return frame.drawing(left + wide + 12, 34 + 68 * len(rows), *parts)
