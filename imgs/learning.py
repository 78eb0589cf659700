"""Draw the README's picture, learning.svg: train lesson 5's network in four ways.

python imgs/learning.py
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

from amp_utils import models
from amp_utils.course import notebook
from amp_utils.plots import COLORS, STYLE

HERE = Path(__file__).parent
WAYS = {  # label: dtype, loss scale, colour, line
    "fp16, unscaled": (torch.float16, 1, COLORS["fp16"], "--"),
    "fp16, loss × 2¹⁶": (torch.float16, 2**16, "#E69F00", "-"),
    "bf16": (torch.bfloat16, 1, COLORS["bf16"], "-."),
    "float32": (torch.float32, 1, COLORS["fp32"], ":"),
}


def draw(folder: Path = HERE, steps: int = 300) -> Path:
    """Draw the error in each training step, and what three of the networks painted."""
    xy = models.pixel_grid(16)
    shape = torch.sin(torch.pi * xy[:, :1]) * torch.cos(torch.pi / 2 * xy[:, 1:])
    lesson = notebook.load("05", device=torch.device("cpu"), steps=steps, xy=xy, shape=shape)
    pictures = {"target": shape}
    with plt.rc_context(STYLE | {"svg.hashsalt": "learning", "font.size": 11}):
        figure = plt.figure(figsize=(9.6, 4.1))
        left, right = figure.subfigures(1, 2, width_ratios=[1.15, 1])
        axes = left.subplots()
        for label, (dtype, loss_scale, color, line) in WAYS.items():
            net = lesson.new_skin(0)
            losses = lesson.train(net, dtype, loss_scale)
            axes.plot(losses, color=color, linestyle=line, linewidth=2.4)
            if loss_scale == 1 and dtype == torch.float16:
                style = {"color": color, "ha": "right", "fontweight": "bold"}
                axes.text(steps, 1.25 * losses[-1], label, **style)
            if label != "bf16":
                pictures[label] = net(xy).detach()
        axes.text(5, 0.02, "float32, bf16, and\nfp16 with a scaled loss", fontweight="bold")
        axes.set(xlabel="training step", ylabel="error (share of variance)")
        axes.set(yscale="log", ylim=(0.008, 3))
        for axis, (label, picture) in zip(right.subplots(2, 2).flat, pictures.items(), strict=True):
            axis.imshow(picture.reshape(16, 16).tolist(), cmap="viridis", vmin=-1, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.set_title(label, fontsize=10.5, loc="center", fontweight="normal")
        path = folder / "learning.svg"
        figure.savefig(path, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    return path


if __name__ == "__main__":
    draw()
