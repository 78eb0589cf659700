"""Rounding with scales: one for a tensor, or one for each block of neighbouring values.

A narrow format keeps few powers of two, so the values are divided by a scale that brings the
largest of them to the format's largest number, rounded, and multiplied by the scale again. The
scale takes room too: MX formats store one of 8 bits for 32 values (OCP Microscaling
1.0), NVFP4 one of 8 bits for 16 values and a float32 for the tensor (arXiv 2509.25149).

>>> from amp_utils.formats import E2M1
>>> round_scaled(torch.tensor([[3.0, 0.01, 700.0, 20.0]]), E2M1, "e8m0", block=2).tolist()
[[3.0, 0.0, 768.0, 0.0]]
"""

import math

import torch
from torch import Tensor

from amp_utils.formats import E4M3FN, Format

KINDS = ("fp32", "e8m0", "e8m0_floor", "e4m3")


def round_scaled(tensor: Tensor, fmt: Format, kind: str = "fp32", block: int | None = None):
    """Round `tensor` to `fmt` under scales; shape and dtype stay, float64 arithmetic between.

    `block` values next to each other in the last dimension share a scale; None: the whole tensor.
    The `kind` of scale is that of `scales`. ValueError for an unknown kind, or a last dimension
    that `block` does not divide. Not differentiable.
    """
    if block is not None and tensor.shape[-1] % block:
        size = f"the last dimension has {tensor.shape[-1]} values"
        raise ValueError(f"block = {block} is not allowed: {size}, give a divisor of it.")
    blocks = tensor.detach().double().reshape(-1, block or tensor.numel())
    scale = scales(blocks, fmt, kind)
    return (fmt.round(blocks / scale) * scale).reshape(tensor.shape).to(tensor.dtype)


def scales(blocks: Tensor, fmt: Format, kind: str = "fp32") -> Tensor:
    """The scale of each row of `blocks` (float64, rows × values), as float64 rows × 1.

    "fp32" brings the row's largest magnitude to `fmt.max`. "e8m0" is that scale rounded up to a
    power of two, so that nothing is cut off (arXiv 2506.08027); "e8m0_floor" the OCP paper's
    choice, which only compares exponents and cuts off what lies between `fmt.max` and the next
    power of two. "e4m3" is the first scale rounded to fp8, in units of one float32 for all rows,
    which brings the largest scale to 448. A row of zeros has the scale 1; a row with infinity or
    NaN has NaN, as E8M0 has for it. ValueError for another kind.
    """
    largest = blocks.abs().amax(dim=-1, keepdim=True)
    wanted = largest / fmt.max
    match kind:
        case "fp32":
            scale = wanted.float().double()
        case "e8m0":
            fraction, exponent = torch.frexp(wanted)
            scale = _power_of_two(exponent - (fraction == 0.5).int())
        case "e8m0_floor":
            scale = _power_of_two(
                torch.frexp(largest)[1] - torch.frexp(wanted.new_tensor(fmt.max))[1]
            )
        case "e4m3":
            unit = (wanted.amax() / E4M3FN.max).float().double()
            scale = E4M3FN.round(wanted / unit).clamp(min=E4M3FN.smallest_subnormal) * unit
        case _:
            allowed = ", ".join(map(repr, KINDS))
            raise ValueError(f"kind = {kind!r} is not known: give one of {allowed}.")
    return scale.masked_fill(largest == 0, 1.0).masked_fill(~largest.isfinite(), math.nan)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent within E8M0, which holds 2^-127 to 2^127."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.clamp(-127, 127))
