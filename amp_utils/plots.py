"""The course's figures: one style, colour-blind safe (Okabe and Ito), told apart in black and white by line style.

Every function takes plain data, draws one message, and shows it with a description in words (alt text), which is
also what stands in place of the picture where pictures cannot be shown.
"""

import base64
import io
import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from amp_utils.formats import Format

COLORS = {
    "fp32": "#000000",
    "bf16": "#0072B2",
    "fp16": "#D55E00",
    "tf32": "#009E73",
    "fp8": "#CC79A7",
}
CYCLE = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00"]
LINES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1))]
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "font.size": 10,
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
    "lines.linewidth": 1.8,
}


def show(figure: Figure, alt: str) -> None:
    """Display a figure with its description as alt text, and close it."""
    from IPython.display import display

    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    plt.close(figure)
    data = {
        "image/png": base64.b64encode(png.getvalue()).decode(),
        "text/plain": f"[figure: {alt}]",
    }
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


def curves(
    series: Mapping[str, Sequence[float]],
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    alt: str,
    log: bool = True,
) -> None:
    """Lines over the step number, each labelled at its end; gaps where a value is not finite."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.2))
        free = [
            color
            for color in CYCLE
            if color not in {COLORS.get(label.split()[0]) for label in series}
        ]
        for i, (label, values) in enumerate(series.items()):
            wanted = COLORS.get(label.split()[0])
            taken = {line.get_color() for line in axes.lines}
            color = wanted if wanted and wanted not in taken else free.pop(0)
            values = [value if math.isfinite(value) else math.nan for value in values]
            axes.plot(
                range(1, len(values) + 1),
                values,
                color=color,
                linestyle=LINES[i % len(LINES)],
                label=label,
            )
        if log:
            axes.set_yscale("log")
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
        show(figure, alt)


def images(
    grid: Mapping[str, Mapping[str, Tensor]],
    *,
    title: str,
    alt: str,
    low: float = 0,
    high: float = 1,
) -> None:
    """Rows of pictures: {row label: {picture title: 2-D tensor}}; grey from `low` (black) to `high` (white)."""
    with plt.rc_context(STYLE):
        columns = max(len(row) for row in grid.values())
        size = (1.75 * columns + 0.4, 1.95 * len(grid) + 0.35)
        figure, axes = plt.subplots(len(grid), columns, figsize=size, squeeze=False)
        for line, (label, row) in zip(axes, grid.items(), strict=True):
            for axis in line:
                axis.set(xticks=[], yticks=[])
                axis.spines[:].set_visible(False)
            for axis, (name, picture) in zip(line, row.items(), strict=False):
                axis.imshow(
                    picture.tolist(), cmap="gray", vmin=low, vmax=high, interpolation="nearest"
                )
                axis.set_title(name, fontweight="normal", fontsize=9, loc="center")
            line[0].set_ylabel(label, fontweight="bold")
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
        show(figure, alt)


def exponent_histogram(
    histograms: Mapping[str, Mapping[int, int]],
    floor: int,
    *,
    title: str,
    alt: str,
    limit: int | None = None,
) -> None:
    """Counts by power of two, one panel a histogram; what lies below `floor` (a power of two) is hatched as lost.

    `limit` draws a second border, for example where subnormal numbers begin.
    """
    with plt.rc_context(STYLE):
        exponents = [e for histogram in histograms.values() for e in histogram] + [floor]
        size = (7, 1.0 + 1.25 * len(histograms))
        figure, axes = plt.subplots(len(histograms), 1, figsize=size, sharex=True, squeeze=False)
        for axis, (label, histogram) in zip(axes[:, 0], histograms.items(), strict=True):
            for exponent, count in histogram.items():
                lost = exponent < floor
                axis.bar(
                    exponent + 0.5,
                    count,
                    width=0.9,
                    color="#F2C6AE" if lost else "#0072B2",
                    edgecolor="#D55E00" if lost else "#0072B2",
                    hatch="///" if lost else None,
                )
            axis.axvline(floor, color="#D55E00", linestyle="--")
            if limit is not None:
                axis.axvline(limit, color="#666666", linestyle=":")
            axis.set_ylabel("values")
            axis.text(0.01, 0.9, label, transform=axis.transAxes, va="top", fontweight="bold")
        axes[0, 0].set_title(title)
        axes[-1, 0].set(
            xlabel="power of two of the magnitude", xlim=(min(exponents) - 1, max(exponents) + 2)
        )
        show(figure, alt)


def bit_fields(value: float, formats: Sequence[Format], *, alt: str) -> None:
    """The bits of one value in several formats, sign, exponent and mantissa coloured, points aligned."""
    colors = ("#E69F00", "#56B4E9", "#D9D9D9")
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 0.55 * len(formats) + 0.9))
        widest = max(f.exponent_bits for f in formats)
        for row, fmt in enumerate(formats):
            bits = fmt.encode(value)
            left = widest - fmt.exponent_bits
            for i, bit in enumerate(format(bits, f"0{fmt.bits}b")):
                color = colors[0 if i == 0 else 1 if i <= fmt.exponent_bits else 2]
                axes.add_patch(plt.Rectangle((left + i, -row - 0.4), 0.92, 0.8, color=color))
                axes.text(
                    left + i + 0.46,
                    -row,
                    bit,
                    ha="center",
                    va="center",
                    fontsize=8,
                    family="monospace",
                )
            axes.text(-0.6, -row, fmt.name, ha="right", va="center", fontweight="bold")
            axes.text(
                left + fmt.bits + 0.4, -row, f"= {fmt.decode(bits):.10g}", va="center", fontsize=9
            )
        axes.set(xlim=(-5, 48), ylim=(-len(formats) + 0.3, 1.1), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        for x, name, color in ((0, "sign", 0), (4, "exponent", 1), (11, "mantissa", 2)):
            axes.text(x, 0.75, name, fontsize=9, bbox={"color": colors[color], "pad": 1.5})
        show(figure, alt)


def range_bars(formats: Sequence[Format], *, title: str, alt: str) -> None:
    """One bar a format from smallest to largest positive value, by power of two; the subnormal part is hatched."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 0.45 * len(formats) + 1.1))
        for row, fmt in enumerate(formats):
            low, normal, high = (
                math.log2(v) for v in (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)
            )
            axes.barh(-row, high - normal, left=normal, color="#0072B2", height=0.6)
            axes.barh(
                -row,
                normal - low,
                left=low,
                color="#CFE3F1",
                edgecolor="#0072B2",
                hatch="///",
                height=0.6,
            )
            axes.text(low - 2, -row, f"2^{low:.0f}", ha="right", va="center", fontsize=9)
            axes.text(high + 2, -row, f"{fmt.max:.4g}", ha="left", va="center", fontsize=9)
        axes.set_yticks([-row for row in range(len(formats))], [fmt.name for fmt in formats])
        axes.set(title=title, xlabel="power of two (hatched: subnormal)", xlim=(-190, 172))
        show(figure, alt)


def spacing(
    formats: Sequence[Format], *, title: str, alt: str, low: int = -30, high: int = 20
) -> None:
    """Distance to the next number against the number itself, both as powers of two, for several formats."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.4))
        for i, fmt in enumerate(formats):
            exponents = [e / 4 for e in range(4 * low, 4 * high) if 2.0 ** (e / 4) <= fmt.max]
            steps = [math.log2(fmt.ulp(2.0**e)) for e in exponents]
            axes.plot(exponents, steps, color=CYCLE[i % 6], linestyle=LINES[i % 6], label=fmt.name)
        axes.set(title=title, xlabel="the number: power of two", ylabel="its spacing: power of two")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=3)
        show(figure, alt)


def dtype_strip(steps: Sequence[tuple[str, str, str, bool]], *, title: str, alt: str) -> None:
    """One box an op, coloured by the dtype it ran in: (op, ran in, output, whether autocast cast its inputs)."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.6, 0.36 * len(steps) + 0.7))
        for row, (op, ran_in, output, cast) in enumerate(steps):
            color = COLORS.get(ran_in, "#666666")
            axes.barh(
                -row, 3, left=2, color=color, height=0.72, hatch=None if ran_in == "fp32" else ".."
            )
            label = axes.text(
                3.5, -row, ran_in, color="white", ha="center", va="center", fontweight="bold"
            )
            label.set_bbox({"color": color, "pad": 1})
            axes.text(1.9, -row, op, ha="right", va="center")
            axes.text(
                5.1,
                -row,
                f"→ {output}" + ("   inputs cast" if cast else ""),
                ha="left",
                va="center",
            )
        axes.set(title=title, xlim=(0, 8), ylim=(-len(steps) + 0.4, 0.7), xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        show(figure, alt)


def scale_history(
    scales: Sequence[float], skipped: Sequence[bool], *, title: str, alt: str
) -> None:
    """The loss scale used at each step, on a power-of-two axis; skipped steps are marked with a cross."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 2.8))
        steps = range(1, len(scales) + 1)
        axes.step(steps, scales, where="mid", color="#000000")
        marks = [
            (step, scale) for step, scale, skip in zip(steps, scales, skipped, strict=True) if skip
        ]
        if marks:
            axes.plot(
                *zip(*marks, strict=True),
                "X",
                color="#D55E00",
                markersize=9,
                label="skipped: inf or NaN",
            )
            axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        if any(scale > 0 for scale in scales):
            axes.set_yscale("log", base=2)
        axes.set(title=title, xlabel="step", ylabel="loss scale")
        show(figure, alt)


def stacked_bars(
    bars: Mapping[str, Mapping[str, float]],
    marks: Mapping[str, float],
    *,
    title: str,
    xlabel: str,
    alt: str,
) -> None:
    """One horizontal bar a row, made of the same parts in the same order; `marks` draws a line across a row's bar."""
    hatches = ["", "///", "...", "xxx"]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 0.55 * len(bars) + 1.2))
        for row, (name, parts) in enumerate(bars.items()):
            left = 0.0
            for i, (part, value) in enumerate(parts.items()):
                look = {"color": CYCLE[1 + i % 5], "hatch": hatches[i % 4], "edgecolor": "white"}
                axes.barh(-row, value, left=left, height=0.6, label=None if row else part, **look)
                left += value
            if name in marks:
                axes.vlines(marks[name], -row - 0.42, -row + 0.42, color="#000000", linewidth=3)
        axes.set_yticks([-row for row in range(len(bars))], list(bars))
        axes.set(title=title, xlabel=xlabel)
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        show(figure, alt)
