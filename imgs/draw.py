"""Draw the pictures that the notebooks embed, as SVG files beside this script.

python imgs/draw.py
"""

from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from amp_utils.plots import COLORS, STYLE

HERE = Path(__file__).parent
LOW, FULL = "#F9E0D2", "#E4E4E4"


def amp_step(axes: Axes) -> None:
    """One training step with autocast and GradScaler; where numbers change their format."""
    boxes = {
        "weights": (0.3, 3.6, "weights\nfloat32", FULL),
        "copies": (3.2, 3.6, "copies\nfloat16", LOW),
        "forward": (6.1, 3.6, "forward\nfloat16", LOW),
        "loss": (9.0, 3.6, "loss\nfloat32", FULL),
        "scaled": (9.0, 1.9, "loss × scale\nfloat32", FULL),
        "backward": (6.1, 1.9, "backward\nfloat16", LOW),
        "gradients": (3.2, 1.9, "gradients × scale\nfloat32", FULL),
        "unscaled": (0.3, 1.9, "gradients\nfloat32", FULL),
    }
    for x, y, words, color in boxes.values():
        edge = COLORS["fp16"] if color == LOW else "#000000"
        shape = FancyBboxPatch(
            (x, y), 1.9, 0.9, boxstyle="round,pad=0.06", facecolor=color, edgecolor=edge, lw=1.6
        )
        axes.add_patch(shape)
        axes.text(x + 0.95, y + 0.45, words, ha="center", va="center", fontsize=11)
    right = [((x, 4.05), (x + 0.86, 4.05)) for x in (2.3, 5.2, 8.1)]
    left = [((x, 2.35), (x - 0.86, 2.35)) for x in (8.9, 6.0, 3.1)]
    turns = [((9.95, 3.5), (9.95, 2.92)), ((1.25, 2.9), (1.25, 3.48))]
    for begin, end in right + left + turns:
        axes.annotate(
            "",
            xy=end,
            xytext=begin,
            arrowprops={"arrowstyle": "-|>", "lw": 1.8, "color": "#333333"},
        )
    notes = [
        (2.7, 4.62, "center", "bottom", "autocast\ncasts"),
        (8.5, 4.62, "center", "bottom", "autocast casts\nback for the loss"),
        (10.15, 3.2, "left", "center", "scaler.scale(loss)"),
        (8.5, 1.72, "center", "top", ".backward()"),
        (5.6, 1.72, "center", "top", "cast to the weights'\nown dtype"),
        (2.7, 1.72, "center", "top", "scaler.unscale_(): × 1/scale,\nlook for inf and NaN"),
        (
            1.45,
            3.2,
            "left",
            "center",
            "scaler.step(): not after an inf or NaN. Then scaler.update(): the next scale",
        ),
    ]
    for x, y, ha, va, words in notes:
        axes.text(x, y, words, ha=ha, va=va, fontsize=10, color="#333333")
    axes.set(xlim=(0, 12.4), ylim=(0.95, 5.35))


def loss_scaling(axes: Axes) -> None:
    """Gradients as a hill over exponents; a scale of 2^16 moves it into what fp16 can hold."""
    exponents = np.linspace(-45, 20, 1000)
    hill = np.exp(-(((exponents + 29) / 4.5) ** 2))
    for left, right, color in ((-25, -14, "#CFE3F1"), (-14, 16, "#9CC7E3")):
        axes.add_patch(plt.Rectangle((left, -0.2), right - left, 2, color=color, lw=0))
    axes.fill_between(
        exponents,
        hill,
        where=exponents <= -24.95,
        facecolor=LOW,
        hatch="///",
        edgecolor=COLORS["fp16"],
    )
    axes.plot(exponents, hill, color=COLORS["fp16"], linestyle="--")
    axes.plot(exponents + 16, hill, color="#000000")
    axes.annotate("", xy=(-13.4, 1.1), xytext=(-29, 1.1), arrowprops={"arrowstyle": "-|>", "lw": 2})
    axes.text(-21.2, 1.15, "loss × $2^{16}$", ha="center", fontsize=12)
    axes.text(-37.5, 0.62, "lost:\nrounded\nto zero", ha="center", fontsize=11, color="#A84300")
    axes.text(-29, -0.04, "gradients", ha="center", va="top", fontsize=11, color="#A84300")
    axes.text(-13, -0.04, "gradients × $2^{16}$", ha="center", va="top", fontsize=11)
    axes.text(-19, 1.42, "fp16, fewer digits\n(subnormal)", ha="center", va="bottom", fontsize=10)
    axes.text(1, 1.42, "fp16, all digits", ha="center", va="bottom", fontsize=10)
    axes.text(18, 1.42, "inf", ha="center", va="bottom", fontsize=10)
    for exponent in (-25, -14, 16):
        axes.text(exponent, -0.24, f"$2^{{{exponent}}}$", ha="center", va="top", fontsize=12)
    axes.set(xlim=(-44, 21), ylim=(-0.42, 1.75))


MEET, OPEN = "#CFE3F1", "#FFFFFF"


ROWS = (2.0, 0.4)  # where the boxes of rank 0 and of rank 1 begin; each is 0.9 high


def rounded(axes: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    look = {"boxstyle": "round,pad=0.06", "fc": color, "lw": 1.6}
    edge = "#000000" if color == MEET else "#777777"
    axes.add_patch(FancyBboxPatch((x, y), width, height, ec=edge, **look))


def ranks_step(axes: Axes, columns: list[tuple[str, str, float]], notes: str) -> list[float]:
    """One step of two ranks: (words, color, width) from left to right; where MEET, they meet.

    Returns where each column begins.
    """
    begins, x, gap = [], 1.15, 0.38
    for rank, y in enumerate(ROWS):
        axes.text(0.95, y + 0.45, f"rank {rank}", ha="right", va="center", fontsize=10.5)
    for i, (words, color, width) in enumerate(columns):
        height = ROWS[0] - ROWS[1] + 0.9 if color == MEET else 0.9
        for y in ROWS[1:] if color == MEET else ROWS:
            rounded(axes, x, y, width, height, color)
            place = x + width / 2, y + height / 2
            axes.text(*place, words, ha="center", va="center", fontsize=10.5)
        for y in ROWS if i else ():
            look = {"arrowstyle": "-|>", "lw": 1.6, "color": "#333333", "shrinkA": 0, "shrinkB": 0}
            ends = {"xy": (x - 0.07, y + 0.45), "xytext": (x - gap + 0.07, y + 0.45)}
            axes.annotate("", **ends, arrowprops=look)
        begins.append(x)
        x += width + gap
    axes.text(1.09, 0.2, notes, ha="left", va="top", fontsize=10.5, color="#333333")
    axes.set(xlim=(0, x - gap + 0.1), ylim=(-0.15, 3.0))
    return begins


def ddp_step(axes: Axes) -> None:
    """A step of DDP: the ranks average bucket after bucket inside backward."""
    backward = "backward: from the last layer to the first          waits"
    columns = [
        ("all weights\nfloat32", FULL, 1.75),
        ("forward\nwith autocast", LOW, 2.0),
        (backward, LOW, 6.3),
        ("unscale_, step,\nupdate", FULL, 2.2),
    ]
    notes = "Blue: the ranks average one bucket of gradients while backward goes on."
    x = ranks_step(axes, columns, notes)[2]
    for i, begin in enumerate((1.5, 3.1, 4.7)):
        rounded(axes, x + begin, 1.22, 1.4, 0.86, MEET)
        words = f"average\nbucket {i + 1}"
        axes.text(x + begin + 0.7, 1.65, words, ha="center", va="center", fontsize=10.5)


def fsdp_step(axes: Axes) -> None:
    """A step of FSDP2: the ranks meet before each pass of a layer, and after its backward."""
    columns = [
        ("its piece\nfloat32", FULL, 1.45),
        ("all-gather\nthe layer's\nweights\nparam_dtype", MEET, 1.85),
        ("forward\nparam_dtype", LOW, 1.85),
        ("all-gather\nthem\nagain\nparam_dtype", MEET, 1.85),
        ("backward\nparam_dtype", LOW, 1.85),
        ("reduce-\nscatter\nthe mean\nreduce_dtype", MEET, 1.95),
        ("unscale_,\nstep,\nupdate", OPEN, 1.45),
    ]
    notes = "Blue: the ranks exchange weights or gradients. White: they only ask for infinities."
    begins = ranks_step(axes, columns, notes)
    for first, last, words in (
        (1, 2, "each layer, from the first to the last"),
        (3, 5, "each layer, from the last to the first"),
    ):
        left, right = begins[first], begins[last] + columns[last][2]
        axes.plot([left, left, right, right], [3.08, 3.2, 3.2, 3.08], color="#333333", lw=1.2)
        style = {"ha": "center", "va": "bottom", "fontsize": 10.5, "color": "#333333"}
        axes.text((left + right) / 2, 3.25, words, **style)
    axes.set_ylim(-0.15, 3.6)


CHAIN = {  # lesson 14's signs in the order in which they decide
    "ill in float32 too?": "Not AMP: the optimizer's parameters 1, rate 22, data 24, or the model.",
    "does it raise?": "Read the message to its end; the cause may be another line. 2–7",
    "weights in 16 bits?": "Keep weights and averages in float32; autocast casts. 9, 10, 14",
    "one cast a weight in all?": "The region spans all steps: give each forward pass its own. 12",
}
TREE = {
    "the loss is NaN": [
        ("no step taken?", "A number above 65504:\nother units, or bf16. 17"),
        ("only when compiled?", "The backward pass inherits\nautocast. 19"),
    ],
    "the loss is flat, or wrong": [
        ("few steps taken?", "Skips: look at schedule 15,\ncheckpoint 16, sigmoid 18."),
        ("all steps, and a clip?", "unscale_ before the clip. 8"),
        ("all steps, a small scale?", "Gradients underflow: start\nat a larger scale. 11"),
        ("positions in a region?", "Compute their angles\nin float32. 13"),
        ("now and then a skip?", "Nothing: the scaler is\nsearching. 21"),
    ],
    "it is slower": [
        ("under 100% in 16 bits?", "A region is missing, as\nin the validation. 20"),
        ("bf16, and a scaler?", "enabled=False. 23"),
        ("no matrix units,\nor small products?", "Larger batches, or\nfloat32 (lesson 10)"),
    ],
    "it needs more memory": [
        ("casts: more than one a\nweight and step?", "One region around\nall calls. 25"),
    ],
}


def decision_tree(axes: Axes) -> None:
    """What to ask of a sick training loop, and in which order; numbers are lesson 14's patients."""

    def box(x: float, y: float, width: float, height: float, words: str, color: str) -> None:
        shape = FancyBboxPatch(
            (x, y), width, height, boxstyle="round,pad=0.04", facecolor=color, edgecolor="#555555"
        )
        axes.add_patch(shape)
        style = {"ha": "center", "va": "center", "fontsize": 11.5, "fontweight": "bold"}
        axes.text(x + width / 2, y + height / 2, words, **style)

    def arrow(x: float, begin: float, end: float, words: str = "") -> None:
        style = {"arrowstyle": "-|>", "lw": 1.5, "color": "#333333"}
        axes.annotate("", xy=(x, end), xytext=(x, begin), arrowprops=style)
        axes.text(x + 0.1, (begin + end) / 2, words, va="center", fontsize=11.5)

    for row, (question, answer) in enumerate(CHAIN.items()):
        y = 11.7 - 1.2 * row
        box(0, y, 3.3, 0.7, question, LOW)
        axes.text(3.5, y + 0.35, f"yes → {answer}", va="center", fontsize=12)
        arrow(1.65, y - 0.06, y - 0.44, "no")
    axes.plot([1.65, 1.65 + 3 * 3.55], [7.62, 7.62], color="#333333", lw=1.5)
    for column, (symptom, rows) in enumerate(TREE.items()):
        x = 3.55 * column
        arrow(x + 1.65, 7.64, 7.28)
        box(x, 6.55, 3.3, 0.7, symptom, FULL)
        for row, (question, answer) in enumerate(rows):
            y = 6.15 - 1.28 * row
            style = {"va": "top", "fontsize": 11.5, "linespacing": 1.15}
            axes.text(x + 0.05, y, question, fontweight="bold", **style)
            lower = y - 0.06 - 0.28 * (1 + question.count("\n"))
            axes.text(x + 0.05, lower, f"→ {answer}".replace("\n", "\n    "), **style)
    axes.set(xlim=(-0.1, 14.1), ylim=(0, 12.5))


PICTURES: dict[Callable[[Axes], None], tuple[float, float]] = {
    amp_step: (9.6, 3.6),
    loss_scaling: (9.6, 3.2),
    ddp_step: (9.2, 2.1),
    fsdp_step: (9.2, 2.5),
    decision_tree: (10.6, 8.2),
}


def draw(picture: Callable[[Axes], None], folder: Path = HERE) -> Path:
    """Draw one picture, byte for byte the same each time (with one version of matplotlib)."""
    with plt.rc_context(STYLE | {"svg.hashsalt": "course"}):
        figure, axes = plt.subplots(figsize=PICTURES[picture])
        picture(axes)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
        path = folder / f"{picture.__name__}.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return path


if __name__ == "__main__":
    for picture in PICTURES:
        print(draw(picture).name)
