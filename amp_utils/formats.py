"""Anatomy of a floating-point format: fields, values, spacing, range and rounding.

A finite value is ``(-1)**sign * n * 2**(e - mantissa_bits)``; ``n`` has ``mantissa_bits + 1`` bits,
fewer in a subnormal number (IEEE 754-2019, section 3.3; OCP 8-bit floating point 1.0). Nothing here
uses torch's own conversions, so that torch can be the oracle in tests.

>>> FP16.decode(0b0_01111_0000000001), FP16.max, FP16.ulp(2048.0)
(1.0009765625, 65504.0, 2.0)
>>> of("bf16").round(torch.tensor([1.001, 70000.0])).tolist()
[1.0, 70144.0]
"""

import math
from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Format:
    """A binary floating-point format: 1 sign bit, then `exponent_bits`, then `mantissa_bits`.

    A bit pattern is an int from 0 up, `bits` wide, with the sign on top. tf32 has no torch dtype:
    in hardware it is a float32 whose last 13 mantissa bits are ignored; here it is the 19 bits that
    remain. `finite_only` marks fp8 e4m3fn: no infinities, NaN only where all bits but the sign are
    one; values that are too large, infinity included, become the largest one, as in ``.to()`` since
    torch 2.13. Without `has_nan` (fp6 and fp4, OCP Microscaling 1.0) there is no NaN either; torch
    has a dtype for pairs of fp4 numbers and none for fp6. `bias` is added to a power of two to give
    its exponent field, `eps` is the spacing just above 1, and half of `smallest_subnormal` or less
    rounds to zero.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype | None
    finite_only: bool = False
    has_nan: bool = True

    def __post_init__(self) -> None:
        self.bits = 1 + self.exponent_bits + self.mantissa_bits
        self.bias = 2 ** (self.exponent_bits - 1) - 1
        self.eps = 2.0**-self.mantissa_bits
        self._min_exponent = 1 - self.bias
        self.smallest_normal = 2.0**self._min_exponent
        self.smallest_subnormal = self.smallest_normal * self.eps
        ones = 2 ** (self.bits - 1) - 1
        infinity = ones + 1 - 2**self.mantissa_bits
        self._max_bits = ones - self.has_nan if self.finite_only else infinity - 1
        self._overflow_bits = self._max_bits if self.finite_only else infinity
        self._nan_bits = ones if self.finite_only else infinity + 2 ** (self.mantissa_bits - 1)
        self.max = self.decode(self._max_bits)

    def fields(self, bits: int) -> tuple[int, int, int]:
        """Cut a bit pattern into (sign, exponent, mantissa); ValueError if it is too wide."""
        if not 0 <= bits < 2**self.bits:
            allowed = f"give an int from 0 to {2**self.bits - 1}"
            raise ValueError(f"bits = {bits} is no {self.name} pattern: {allowed}.")
        sign, magnitude = divmod(bits, 2 ** (self.bits - 1))
        return sign, *divmod(magnitude, 2**self.mantissa_bits)

    def decode(self, bits: int) -> float:
        """The value of a bit pattern: exact, as a Python float is fp64, the widest format here."""
        sign, exponent, mantissa = self.fields(bits)
        if bits % 2 ** (self.bits - 1) > self._max_bits:
            value = math.inf if mantissa == 0 and not self.finite_only else math.nan
        else:
            # Exponent field 0 has no hidden one, and shares the power of two of exponent field 1.
            hidden_one = (exponent > 0) << self.mantissa_bits
            power = max(exponent, 1) - self.bias - self.mantissa_bits
            value = math.ldexp(hidden_one + mantissa, power)
        return -value if sign else value

    def encode(self, value: float) -> int:
        """The bit pattern of `value`, rounded half to even.

        Values that are too large become infinity (`finite_only`: the largest value). NaN becomes
        the quiet NaN of its sign; torch's own NaN patterns differ between kernels. ValueError for a
        NaN in a format that has none.
        """
        sign = (math.copysign(1.0, value) < 0) << (self.bits - 1)
        if math.isnan(value):
            if not self.has_nan:
                raise ValueError(f"value = nan has no pattern in {self.name}: give a number.")
            return sign | self._nan_bits
        if math.isinf(value):
            return sign | self._overflow_bits
        exponent = self._exponent(value)
        significand = round(math.ldexp(abs(value), self.mantissa_bits - exponent))
        # Added, not or-ed: the hidden one raises the exponent field by one; so may rounding.
        magnitude = (exponent - self._min_exponent << self.mantissa_bits) + significand
        return sign | (magnitude if magnitude <= self._max_bits else self._overflow_bits)

    def ulp(self, value: float) -> float:
        """Spacing from ``|value|`` to the next larger magnitude; infinite past `max`, NaN for NaN.

        Just *below* a power of two the spacing is half of what this returns.
        """
        if math.isnan(value) or abs(value) > self.max:
            return abs(value) * math.inf
        return math.ldexp(1.0, self._exponent(value) - self.mantissa_bits)

    def round(self, tensor: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """Round every element to this format, half to even; shape and dtype stay those of `tensor`.

        With `noise`, uniform in [0, 1) and of the same shape, the rounding is stochastic: away from
        zero with a probability that is the distance from the neighbour below, in spacings, so that
        the mean is exact (up to `max`). The arithmetic is float64. NaN stays NaN in every format.
        Not differentiable. TypeError for a tensor that is not floating; ValueError if a rounded
        value is too large for its dtype: 65504 in float16 is 65536 in bf16.
        """
        if not tensor.is_floating_point():
            raise TypeError(f"tensor has dtype {tensor.dtype}: give a floating-point tensor.")
        if self.mantissa_bits == 52:  # float64 already: every tensor holds fp64 values
            return tensor.detach().clone()
        x = tensor.detach()
        x = (x.cpu() if x.device.type == "mps" else x).double()  # Apple's GPUs have no float64
        # Each element's spacing, from its power of two: the exponent bits of its float64 alone. For
        # infinity and NaN any will do, so the largest one is that of the largest float64.
        powers = (x.view(torch.int64) & 0x7FF << 52).view(torch.float64)
        quantum = (powers * self.eps).clamp(self.smallest_subnormal, 2.0**971)
        steps = x / quantum
        if noise is None:
            steps.round_()
        else:
            steps = torch.copysign((steps.abs() + noise.to(x)).floor(), x)
        rounded = steps.mul_(quantum)
        if self.finite_only:
            rounded.clamp_(-self.max, self.max)
        else:
            rounded = torch.where(rounded.abs() > self.max, x * math.inf, rounded)
        if self.max > torch.finfo(tensor.dtype).max:
            lost = rounded.isfinite() & (rounded.abs() > torch.finfo(tensor.dtype).max)
            if lost.any():
                values = f"{x[lost][0]:g} is {rounded[lost][0]:g} in {self.name}"
                raise ValueError(f"tensor has dtype {tensor.dtype}: {values}, give a wider one.")
        return rounded.to(tensor.device, tensor.dtype)

    def _exponent(self, value: float) -> int:
        return max(math.frexp(value)[1] - 1, self._min_exponent) if value else self._min_exponent


FP64 = Format("fp64", 11, 52, torch.float64)
FP32 = Format("fp32", 8, 23, torch.float32)
TF32 = Format("tf32", 8, 10, None)
FP16 = Format("fp16", 5, 10, torch.float16)
BF16 = Format("bf16", 8, 7, torch.bfloat16)
E4M3FN = Format("e4m3fn", 4, 3, torch.float8_e4m3fn, finite_only=True)
E5M2 = Format("e5m2", 5, 2, torch.float8_e5m2)
# fp6 and fp4: with block scales only, so they are not among the formats that `of` finds.
E3M2 = Format("e3m2", 3, 2, None, finite_only=True, has_nan=False)
E2M3 = Format("e2m3", 2, 3, None, finite_only=True, has_nan=False)
E2M1 = Format("e2m1", 2, 1, None, finite_only=True, has_nan=False)

FORMATS: dict[str, Format] = {f.name: f for f in (FP64, FP32, TF32, FP16, BF16, E4M3FN, E5M2)}


def of(key: str | torch.dtype | Format) -> Format:
    """Find a format by name ("fp16") or torch dtype, or pass one through; else ValueError."""
    known = {name: f for f in FORMATS.values() for name in (f.name, f.dtype or f.name)}
    if isinstance(key, Format) or key in known:
        return known.get(key, key)
    names = ", ".join(map(repr, FORMATS))
    raise ValueError(f"format = {key!r} is not known: give one of {names}, or its torch dtype.")
