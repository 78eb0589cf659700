"""The figure of lesson 5: slide the loss scale, and the gradients move over fp16's floor."""

import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from amp_utils import gradients
from amp_utils.touch import frame

Pictures = Mapping[int, str | None]
COLORS = {
    "lost": frame.RED,
    "subnormal": frame.ORANGE,
    "normal": frame.BLUE,
    "infinite": frame.RED,
}


def loss_scale(source: gradients.Source, learned: Mapping[int, Tensor]) -> None:
    """Show what fp16 makes of gradients at every loss scale, and what networks learned there.

    `source` is any that `amp_utils.gradients` takes; zeros, infinities and NaN are left out.
    `learned` has square pictures, N × N from -1 to 1, of networks that were trained at the scale
    2^key. ValueError where there are no gradients but zeros, or no pictures.
    """
    bins = magnitudes(source)
    if not bins or not learned:
        missing = "learned has no picture" if bins else "source has no finite gradient but zero"
        raise ValueError(f"{missing}: nothing can be drawn.")
    pictures = {k: digits(picture) for k, picture in sorted(learned.items())}
    total = sum(count for _, count, *_ in bins)
    shares = [gradients.lost(source, "fp16", 2.0**k) for k in pictures]
    lost = ", ".join(
        f"{share:.1%} at 2^{k}" + ("" if pictures[k] else " (where the network ends as NaN)")
        for k, share in zip(pictures, shares, strict=True)
    )
    frame.show(
        "loss_scale",
        {"bins": bins, "learned": list(pictures.items()), "total": total},
        label="Gradients in fp16 at a loss scale of your choice",
        alt=f"{total:,} gradients move to the right as the loss scale grows; lost are {lost}.",
        still=still(bins, pictures, shares),
    )


def magnitudes(source: gradients.Source) -> list[list[int]]:
    """[e, count in [2^e, 2^(e+1)), and of these: powers of two, those that round up, the largest].

    These parts decide at the borders: 2^-25 becomes 0; from 2 - 2^-10 times 2^-15 the smallest
    normal number; from 2 - 2^-11 times 2^15 infinity.
    """
    values = gradients.all_values(source)
    fraction, exponent = torch.frexp(values[values.isfinite() & (values != 0)].abs())
    parts = [fraction > 0, fraction == 0.5, fraction >= 1 - 2**-11, fraction >= 1 - 2**-12]
    return [
        [e - 1, *(((exponent == e) & part).sum().item() for part in parts)]
        for e in exponent.unique().tolist()
    ]


def digits(picture: Tensor) -> str | None:
    """A picture as one hexadecimal digit for each grey; None where it has a NaN."""
    if not picture.isfinite().all():
        return None
    greys = (picture.flatten().clamp(-1, 1) * 7.5 + 7.5).round().int().tolist()
    return "".join(f"{grey:x}" for grey in greys)


def still(bins: list[list[int]], pictures: Pictures, shares: list[float]) -> str:
    """The drawing without script: a row for each network, its gradients and what it learned."""
    low, high, unit, row, most = min(bins[0][0] - 2, -40), 20, 5.2, 60, max(bin[1] for bin in bins)

    def x(e: float) -> float:
        return round(96 + unit * (e - low), 1)

    quiet, bottom = {"fill": frame.QUIET, "text_anchor": "middle"}, 34 + row * len(pictures)
    parts = [
        frame.text(x(e), 20, words, **quiet)
        for e, words in (
            (-33, "becomes 0"),
            (-20, "subnormal"),
            (1, "normal"),
            (18, "∞"),
            (27, "learned"),
        )
    ]
    parts += [frame.path(f"M{x(e):g} 28V{bottom}", frame.LINE) for e in (-25, -14, 16)]
    for y, k, share in zip(range(82, bottom, row), pictures, shares, strict=True):
        parts.append(frame.text(10, y - 22, frame.power(k), font_weight="bold"))
        parts.append(frame.text(10, y - 5, f"{share:.1%} lost", fill=frame.QUIET))
        for name, color in COLORS.items():
            bars = [bin for bin in bins if zone(bin[0] + k) == name and bin[0] + k < high]
            drawn = "".join(
                f"M{x(e + k + 0.5):g} {y}v-{max(1, 44 * count / most):.1f}" for e, count, *_ in bars
            )
            parts.append(frame.path(drawn, color, 4.2) if drawn else "")
        parts.append(thumbnail(pictures[k], x(high) + 22, y - 44))
    return frame.drawing(round(x(high) + 78), bottom, *parts)


def zone(e: int) -> str:
    """What fp16 makes of most numbers from 2^e to 2^(e+1)."""
    return "lost" if e < -25 else "subnormal" if e < -14 else "normal" if e < 16 else "infinite"


def thumbnail(picture: str | None, x: float, y: float, size: int = 44) -> str:
    """The grey pixels of a picture at (x, y), as one path for each of eight greys."""
    if picture is None:
        return frame.text(x + size / 2, y + size / 2 + 5, "NaN", text_anchor="middle")
    n, paths = math.isqrt(len(picture)), {}
    for line in range(n):
        greys = [int(grey, 16) // 2 * 2 for grey in picture[line * n : (line + 1) * n]]
        start = 0
        for grey, run in itertools.groupby(greys):
            length = len(list(run))
            paths[grey] = paths.get(grey, "") + f"M{start} {line}h{length}"
            start += length
    drawn = (frame.path(path, f"#{grey:x}{grey:x}{grey:x}") for grey, path in paths.items())
    place = f"translate({x:g} {y + size / n / 2:g}) scale({size / n:g})"
    return f'<g transform="{place}" shape-rendering="crispEdges">{"".join(drawn)}</g>'
