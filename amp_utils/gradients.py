"""The underflow microscope: which share of some gradients a format loses, and where they lie by power of two."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from amp_utils import formats

Source = nn.Module | Tensor | Iterable[Tensor]


def lost(
    source: Source, fmt: str | torch.dtype | formats.Format = "fp16", scale: float = 1.0
) -> float:
    """Share of the non-zero values that become zero when multiplied by `scale` and rounded to the format.

    `source`: a module (its parameters' gradients), a tensor or tensors of any floating dtype. Zeros are not counted:
    they were nothing before. 0.0 where there is no non-zero value. Raises ValueError for a scale that is not positive
    and finite, or a module without gradients.
    """
    values = _values(source)
    values = values[values != 0]
    return _share(_rounded(values, fmt, scale) == 0)


def overflowed(
    source: Source, fmt: str | torch.dtype | formats.Format = "fp16", scale: float = 1.0
) -> float:
    """Share of the finite values that exceed the format's largest one when multiplied by `scale` and rounded."""
    values = _values(source)
    values = values[torch.isfinite(values)]
    fmt = formats.of(fmt)
    unbounded = values.abs() * scale > fmt.max
    return _share(
        unbounded & (_rounded(values, fmt, scale).isinf() | torch.tensor(fmt.finite_only))
    )


def histogram(source: Source) -> dict[int, int]:
    """How many non-zero finite values lie in [2^e, 2^(e+1)), by e, lowest first."""
    values = _values(source)
    values = values[torch.isfinite(values) & (values != 0)]
    exponents, counts = (torch.frexp(values)[1] - 1).unique(return_counts=True)
    return dict(zip(exponents.tolist(), counts.tolist(), strict=True))


def zeros(source: Source) -> float:
    """Share of the values that are exactly zero."""
    return _share(_values(source) == 0)


def _values(source: Source) -> Tensor:
    """All values as one float64 vector on the CPU."""
    if isinstance(source, nn.Module):
        tensors = [p.grad for p in source.parameters() if p.grad is not None]
        if not tensors:
            raise ValueError("source is a module without gradients: call backward() first.")
    else:
        tensors = [source] if isinstance(source, Tensor) else list(source)
    tensors = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    flat = [t.detach().cpu().double().flatten() for t in tensors]
    return torch.cat(flat) if flat else torch.zeros(0, dtype=torch.float64)


def _rounded(values: Tensor, fmt: str | torch.dtype | formats.Format, scale: float) -> Tensor:
    if not (scale > 0 and math.isfinite(scale)):
        raise ValueError(f"scale = {scale!r} is not allowed: give a finite number above 0.")
    return formats.of(fmt).round(values * scale)


def _share(mask: Tensor) -> float:
    return mask.double().mean().item() if mask.numel() else 0.0
