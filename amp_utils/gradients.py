"""The underflow microscope: what share of some gradients a format loses, and where they lie.

A source is a module (its parameters' gradients), a tensor, or tensors, of any floating dtype and
layout; None entries are skipped. Real and imaginary parts of a complex value count one by one.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from amp_utils import formats

Source = nn.Module | Tensor | Iterable[Tensor | None]
Format = str | torch.dtype | formats.Format


def lost(source: Source, fmt: Format = "fp16", scale: float = 1.0) -> float:
    """Share of the non-zero values that become zero when multiplied by `scale` and rounded.

    0.0 where there is no non-zero value. ValueError for a scale that is not positive and finite.
    """
    values = all_values(source)
    return _share(formats.of(fmt).round(_scaled(values[values != 0], scale)) == 0)


def overflowed(source: Source, fmt: Format = "fp16", scale: float = 1.0) -> float:
    """Share of the finite values that, multiplied by `scale`, round to more than the largest one.

    Where the format has no infinity (e4m3fn), torch's conversion makes them its largest value.
    """
    values, fmt = all_values(source), formats.of(fmt)
    magnitudes = _scaled(values[values.isfinite()], scale).abs()
    border = fmt.max + fmt.ulp(fmt.max) / 2
    # A tie goes to the even neighbour: up, but in e4m3fn, whose last pattern is NaN, down.
    return _share(magnitudes > border if fmt.finite_only else magnitudes >= border)


def histogram(source: Source) -> dict[int, int]:
    """How many non-zero finite values lie in [2^e, 2^(e+1)), by e, lowest first."""
    values = all_values(source)
    values = values[values.isfinite() & (values != 0)]
    exponents, counts = (torch.frexp(values)[1] - 1).unique(return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def zeros(source: Source) -> float:
    """Share of the values that are exactly zero."""
    return _share(all_values(source) == 0)


def all_values(source: Source) -> Tensor:
    """All values, as one float64 vector on the CPU."""
    if isinstance(source, nn.Module):
        source = [p.grad for p in source.parameters()] or [None]
    entries = [source] if isinstance(source, Tensor) else list(source)
    dense = [entry.detach().to_dense() for entry in entries if entry is not None]
    if entries and not dense:
        raise ValueError("source is without gradients: call backward() first.")
    parts = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
    return torch.cat([torch.zeros(0).double(), *(t.cpu().double().flatten() for t in parts)])


def _scaled(values: Tensor, scale: float) -> Tensor:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale = {scale!r} is not allowed: give a finite number above 0.")
    return values * scale


def _share(mask: Tensor) -> float:
    return mask.double().mean().item() if mask.numel() else 0.0
