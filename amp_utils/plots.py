"""The course's figures: one style, in the colour-blind safe colours of Okabe and Ito.

Line styles and hatches tell things apart in black and white; `alt` says in words what is shown.
"""

import base64
import io
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator
from torch import Tensor

from amp_utils.formats import Format

Series = Mapping[str, Sequence[float]]
Grid = Mapping[str, Mapping[str, Tensor]]
Parts = Mapping[str, float]

BLACK, BLUE, RED, GREEN, PINK = "#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
COLORS = {"fp32": BLACK, "bf16": BLUE, "fp16": RED, "tf32": GREEN, "fp8": PINK}
CYCLE = [BLACK, RED, BLUE, GREEN, PINK, "#E69F00"]
LINES = ["-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1))]
BARE = {"xticks": [], "yticks": [], "frame_on": False}
BESIDE = {"frameon": False, "loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
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
    """Display a figure with its description as alt text.

    JupyterLab shows the first line of a folded output's text, which must not tell what is seen.
    """
    from IPython.display import display

    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    picture = base64.b64encode(png.getvalue()).decode()
    data = {"image/png": picture, "text/plain": f"[figure]\n{alt}"}
    display(data, raw=True, metadata={"image/png": {"alt": alt}})


@contextmanager
def _drawing(alt: str, size: tuple[float, float], *grid: int, **options) -> Iterator:
    """Yield the axes of a figure in the course's style; then show and close it."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(*grid, figsize=size, **options)
        try:
            yield axes
            show(figure, alt)
        finally:
            plt.close(figure)


def _label_ends(axes: Axes) -> None:
    """Name each line in the margin, at the height where it ends; names move apart if they must."""
    axes.get_ylim()  # settles the scale
    to_axes = axes.transData + axes.transAxes.inverted()

    def end(line: Line2D) -> float:
        points = [point for point in line.get_xydata() if math.isfinite(point[1])]
        return to_axes.transform(points[-1])[1] if points else 0.0

    apart, y, above = 0.09, -0.09, len(axes.lines)
    for line in sorted(axes.lines, key=end):
        above -= 1
        y = min(max(y + apart, end(line)), 0.95 - apart * above)
        look = {key: getattr(line, f"get_{key}")() for key in ("color", "linestyle", "marker")}
        x = [1.02, 1.09] if look["linestyle"] != "None" else [1.055]  # one mark, where no line is
        sample = Line2D(x, [y] * len(x), transform=axes.transAxes, clip_on=False, **look)
        axes.add_artist(sample)
        axes.text(1.11, y, line.get_label(), va="center", transform=axes.transAxes)


def curves(
    series: Series,
    *,
    title: str,
    xlabel: str,
    ylabel: str,
    alt: str,
    log: bool = True,
    low: float | None = None,
    x: Sequence[float] | None = None,
    dots: Collection[str] = (),
    log_x: bool = False,
    spread: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
) -> None:
    """Plot each series against `x`, or the step number, labelled at its end; a gap is inf or NaN.

    The y-axis is logarithmic unless `log` is off, and begins at `low`, where given; the x-axis is
    with `log_x`. The series named in `dots` are separate points; those in `spread` have a shaded
    band from its lower to its upper line.
    """
    with _drawing(alt, (7, 3.2)) as axes:
        formats = [COLORS.get(label.split()[0]) for label in series]
        free = [color for color in CYCLE if color not in formats]
        for i, (label, values) in enumerate(series.items()):
            color = free.pop(0) if formats[i] in (None, *formats[:i]) else formats[i]
            values = [value if math.isfinite(value) else math.nan for value in values]
            look = {"color": color, "linestyle": LINES[i % len(LINES)], "label": label}
            if label in dots:
                look |= {"linestyle": "", "marker": ".", "zorder": 1}
            steps = x or range(1, len(values) + 1)
            axes.plot(steps, values, **look)
            if label in (spread or {}):
                band = {"color": color, "alpha": 0.18, "linewidth": 0}
                axes.fill_between(steps, *spread[label], **band)
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel, yscale="log" if log else "linear")
        axes.set_ylim(bottom=low)
        axes.set_xscale("log" if log_x else "linear")
        _label_ends(axes)


def images(grid: Grid, *, title: str, alt: str, low: float = 0, high: float = 1) -> None:
    """Rows of pictures, {row: {title: tensor}}: grey from `low` (black) to `high` (white).

    A tensor of shape (height, width, 3) is in colour, in bytes.
    """
    columns = max(len(row) for row in grid.values())
    size = (1.75 * columns + 0.4, 1.95 * len(grid) + 0.35)
    with _drawing(alt, size, len(grid), columns, squeeze=False, subplot_kw=BARE) as axes:
        for line, (label, row) in zip(axes, grid.items(), strict=True):
            for axis, (name, picture) in zip(line, row.items(), strict=False):
                grey = {"cmap": "gray", "vmin": low, "vmax": high, "interpolation": "nearest"}
                axis.imshow(picture.tolist(), **grey)
                axis.set_title(name, fontweight="normal", fontsize=9, loc="center")
            line[0].set_ylabel(label, fontweight="bold")
        axes[0, 0].figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)


def range_bars(formats: Sequence[Format], *, title: str, alt: str) -> None:
    """A bar per format from its smallest to its largest positive value; subnormals are hatched."""
    pale = {"color": "#CFE3F1", "edgecolor": BLUE, "hatch": "///"}
    with _drawing(alt, (7, 0.45 * len(formats) + 1.1)) as axes:
        for y, fmt in enumerate(formats):
            values = (fmt.smallest_subnormal, fmt.smallest_normal, fmt.max)
            low, normal, high = map(math.log2, values)
            axes.barh(-y, high - normal, left=normal, color=BLUE, height=0.6)
            axes.barh(-y, normal - low, left=low, height=0.6, **pale)
            axes.text(low - 2, -y, f"$2^{{{low:.0f}}}$", ha="right", va="center", fontsize=9)
            axes.text(high + 2, -y, f"≈ $2^{{{high:.0f}}}$", ha="left", va="center", fontsize=9)
        axes.set_yticks(range(0, -len(formats), -1), [fmt.name for fmt in formats])
        axes.set(title=title, xlabel="power of two (hatched: subnormal)", xlim=(-190, 180))


def number_line(
    rows: Mapping[str, Sequence[float]],
    *,
    ticks: Sequence[float],
    names: Sequence[str] | None = None,
    mark: float | None = None,
    colors: Mapping[str, str] = COLORS,
    symbols: str = "",
    xlabel: str = "",
    log: bool = False,
    row: float = 0.42,
    title: str,
    alt: str,
) -> None:
    """The numbers of each row as strokes on a common line, with an axis that names only `ticks`.

    `names` are written at the ticks in place of their values; a dotted line through all rows stands
    at `mark`. A row that `colors` does not name is black. With `symbols`, matplotlib's markers, the
    first number of each row is drawn as the first of them, and so on around, in place of a stroke.
    A row without numbers is a heading. The axis is logarithmic with `log`; `row` is a row's height,
    in inches.
    """
    with _drawing(alt, (7.6, row * len(rows) + 0.9)) as axes:
        axes.set_xscale("log" if log else "linear")
        axes.xaxis.set_minor_locator(NullLocator())
        for y, (label, numbers) in enumerate(rows.items()):
            if len(numbers) == 0:
                continue
            axes.plot([ticks[0], ticks[-1]], [-y, -y], color="#999999", linewidth=0.8)
            color = colors.get(label, BLACK)
            for number, symbol in zip(numbers, cycle(symbols), strict=False):
                axes.plot(number, -y, symbol, color=color, fillstyle="none", markersize=7)
            if not symbols:
                axes.vlines(numbers, -y - 0.3, -y + 0.3, color=color, linewidth=1.4)
        if mark is not None:
            axes.axvline(mark, color="#999999", linestyle=":", linewidth=1.2, zorder=0)
        axes.set_yticks(range(0, -len(rows), -1), list(rows))
        axes.set_xticks(ticks, names or [f"{tick:g}" for tick in ticks])
        axes.tick_params(left=False)
        axes.spines["left"].set_visible(False)
        axes.set(title=title, xlabel=xlabel, ylim=(0.5 - len(rows), 0.6))


def scale_history(
    scales: Sequence[float],
    skipped: Sequence[bool],
    errors: Series,
    *,
    title: str,
    alt: str,
) -> None:
    """The loss scale used at each step, on a power-of-two axis; a cross marks a skipped step.

    Beneath it, on the same steps, the `errors` of the given runs on a logarithmic axis.
    """
    with _drawing(alt, (7, 5.2), 2, sharex=True) as (above, below):
        steps = range(1, len(scales) + 1)
        above.step(steps, scales, where="mid", color=BLACK, label="loss scale")
        marks = [mark for *mark, skip in zip(steps, scales, skipped, strict=True) if skip]
        if marks:
            cross = {"marker": "X", "color": RED, "markersize": 7, "linestyle": ""}
            above.plot(*zip(*marks, strict=True), label="skipped: inf or NaN", **cross)
        if any(scale > 0 for scale in scales):
            above.set_yscale("log", base=2)
            above.set_ylim(top=4 * max(scales))
        above.set(title=title, ylabel="loss scale")
        _label_ends(above)
        for i, (label, values) in enumerate(errors.items()):
            look = {"color": "#777777" if i else BLACK, "linestyle": LINES[i % 6], "label": label}
            below.plot(range(1, len(values) + 1), values, **look)
        below.set(xlabel="step", ylabel="error (share of variance)", yscale="log")
        _label_ends(below)


def stacked_bars(
    bars: Mapping[str, Parts], marks: Parts, *, title: str, xlabel: str, alt: str
) -> None:
    """A horizontal bar per row, made of the same parts; `marks` draws a line across a row's bar."""
    hatches = ["", "///", "...", "xxx"]
    with _drawing(alt, (7, 0.55 * len(bars) + 1.2)) as axes:
        for y, (name, parts) in enumerate(bars.items()):
            left = 0.0
            for i, (part, value) in enumerate(parts.items()):
                look = {"color": CYCLE[1 + i % 5], "hatch": hatches[i % 4], "edgecolor": "white"}
                axes.barh(-y, value, left=left, height=0.6, label=None if y else part, **look)
                left += value
            if name in marks:
                axes.vlines(marks[name], -y - 0.42, -y + 0.42, color=BLACK, linewidth=3)
        axes.set_yticks(range(0, -len(bars), -1), list(bars))
        axes.set(title=title, xlabel=xlabel)
        axes.legend(**BESIDE)
