"""The first figure of lesson 1: the bits of a number in every format, to flip, type and step."""

from amp_utils.formats import BF16, E2M1, E4M3FN, E5M2, FP16, FP32, TF32, Format
from amp_utils.touch import frame

FORMATS = {
    "fp32": FP32,
    "tf32": TF32,
    "bf16": BF16,
    "fp16": FP16,
    "fp8 e4m3fn": E4M3FN,
    "fp8 e5m2": E5M2,
    "fp4 e2m1": E2M1,
}
COLORS = {"sign": "#E69F00", "exponent": "#56B4E9", "mantissa": "#D9D9D9"}


def bits(value: float) -> None:
    """Show the bits of a finite number in fp16; a learner changes bits, number and format."""
    names = list(FORMATS)
    numbers = (f"{fmt.decode(fmt.encode(value)):.7g} in {name}" for name, fmt in FORMATS.items())
    frame.show(
        "bits",
        {
            "formats": [described(fmt, name) for name, fmt in FORMATS.items()],
            "chosen": names.index("fp16"),
            "value": value,
        },
        uses="floats",
        label="The bits of a number, to flip",
        alt=f"The bits of {value:g} in seven formats: it is {', '.join(numbers)}.",
        still=still(value),
    )


def described(fmt: Format, name: str) -> dict[str, str | int | bool]:
    """What `floats.js` wants to know of a format."""
    widths = {"e": fmt.exponent_bits, "m": fmt.mantissa_bits}
    return {"name": name, **widths, "finite": fmt.finite_only, "nan": fmt.has_nan}


def still(value: float) -> str:
    """The drawing without script: a row of bits for each format, their binary points aligned."""
    wide, high, left = 11, 26, 96
    parts = []
    for row, (name, fmt) in enumerate(FORMATS.items()):
        y, x = 34 + high * row, left + wide * (8 - fmt.exponent_bits)
        pattern = f"{fmt.encode(value):0{fmt.bits}b}"
        cuts = (0, 1, 1 + fmt.exponent_bits, fmt.bits)
        parts.append(frame.text(10, y + 15, name, font_weight="bold"))
        for (field, color), start, end in zip(COLORS.items(), cuts, cuts[1:], strict=False):
            width = wide * (end - start)
            parts.append(frame.path(f"M{x} {y + 10}h{width - 1}", color, 20))
            digits = {"textLength": width - 5, "font_family": "monospace"}
            parts.append(frame.text(x + 2, y + 15, pattern[start:end], **digits))
            if row == 0:
                at = {"text_anchor": "end", "x": x + wide - 3} if field == "sign" else {"x": x}
                parts.append(frame.text(y=y - 8, words=field, fill=frame.QUIET, **at))
            x += width
        parts.append(frame.text(x + 8, y + 15, f"{fmt.decode(fmt.encode(value)):.9g}"))
    return frame.drawing(left + wide * 41 + 120, 34 + high * len(FORMATS) + 4, *parts)
