"""Draw the README's picture, learning.svg: run lesson 5's own cells and draw what they trained.

python imgs/learning.py
"""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import torch

from amp_utils.plots import COLORS, STYLE

HERE = Path(__file__).parent
LESSON = HERE.parent / "notebooks" / "05_gradient_underflow.ipynb"
SETTINGS = {  # as named in the lesson: (label, colour, line)
    "fp16 unscaled": ("fp16, unscaled", COLORS["fp16"], "--"),
    "fp16 scaled": ("fp16, loss × 2¹⁶", "#E69F00", "-"),
    "bf16": ("bf16", COLORS["bf16"], "-."),
    "fp32": ("float32", COLORS["fp32"], ":"),
}


def run_lesson() -> dict:
    """Variables of lesson 5 after training, one seed each; figures and exercises are left out."""
    variables: dict = {}
    for cell in nbformat.read(LESSON, 4).cells:
        if cell.cell_type == "code" and not cell.source.startswith("plots."):
            with redirect_stdout(StringIO()):
                exec(cell.source, variables)
            variables["seeds"] = 1
        if "runs" in variables:
            return variables
    raise LookupError(f"{LESSON.name} no longer defines `runs`.")


def draw(variables: dict) -> None:
    runs, xy, target, unit = (variables[name] for name in ("runs", "xy", "target", "unit"))
    with plt.rc_context(STYLE | {"svg.hashsalt": "learning", "font.size": 11}):
        figure = plt.figure(figsize=(9.6, 4.1))
        left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1])
        axes = left.subplots()
        for name, (label, color, line) in SETTINGS.items():
            losses = runs[name][0][1]
            axes.plot(losses, color=color, linestyle=line, linewidth=2.4)
            if name == "fp16 unscaled":
                axes.text(
                    len(losses),
                    1.25 * losses[-1],
                    label,
                    color=color,
                    ha="right",
                    fontweight="bold",
                )
        axes.text(5, 0.02, "float32, bf16, and\nfp16 with a scaled loss", fontweight="bold")
        axes.set(
            yscale="log",
            xlabel="training step",
            ylabel="error (share of variance)",
            ylim=(0.008, 3),
        )
        pictures = {"target": target / unit}
        with torch.no_grad():
            pictures |= {
                label: runs[name][0][0](xy)
                for name, (label, _, _) in SETTINGS.items()
                if name != "bf16"
            }
        for axis, (label, picture) in zip(right.subplots(2, 2).flat, pictures.items(), strict=True):
            axis.imshow(picture.reshape(32, 32).tolist(), cmap="viridis", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.set_title(label, fontsize=10.5, loc="center", fontweight="normal")
        figure.savefig(HERE / "learning.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    draw(run_lesson())
