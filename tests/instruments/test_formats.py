"""amp_utils.formats says of every format what torch, gfloat and bit tricks say of it."""

import math

import gfloat
import pytest
import torch
from gfloat import formats as gf
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_utils import formats
from amp_utils.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E5M2,
    FORMATS,
    FP16,
    FP32,
    FP64,
    TF32,
)

GFLOAT = {
    FP64: gf.format_info_binary64,
    FP32: gf.format_info_binary32,
    FP16: gf.format_info_binary16,
    BF16: gf.format_info_bfloat16,
    E4M3FN: gf.format_info_ocp_e4m3,
    E5M2: gf.format_info_ocp_e5m2,
    E3M2: gf.format_info_ocp_e3m2,
    E2M3: gf.format_info_ocp_e2m3,
    E2M1: gf.format_info_ocp_e2m1,
}
SMALL = [E3M2, E2M3, E2M1]  # fp6 and fp4, for which torch has no casts
NARROW = [FP16, BF16, E4M3FN, E5M2]
BITS_DTYPE = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}

WITH_DTYPE = [f for f in FORMATS.values() if f.dtype]

narrow = pytest.mark.parametrize("format", NARROW, ids=lambda f: f.name)
any_time = settings(deadline=None, derandomize=True, database=None)  # the machine may be busy
any_format = st.sampled_from(list(FORMATS.values()))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, the sign of zero included; any NaN equals any NaN."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = a.isnan()
    as_int = BITS_DTYPE[8 * a.dtype.itemsize]
    return torch.equal(nan, b.isnan()) and torch.equal(a.view(as_int)[~nan], b.view(as_int)[~nan])


def all_values(format) -> torch.Tensor:
    """torch's own reading, in float64, of all bit patterns of a narrow format, in order."""
    patterns = torch.arange(1 << format.bits, dtype=torch.int32)
    return patterns.to(BITS_DTYPE[format.bits]).view(format.dtype).to(torch.float64)


def awkward_floats(format) -> torch.Tensor:
    """float32 numbers at which rounding to a narrow format can go wrong."""
    values = all_values(format).to(torch.float32)
    values = values[values.isfinite()].unique()
    ties = (values[1:].double() + values[:-1].double()).div(2).float()
    largest = torch.tensor(
        [format.max, format.max + format.ulp(format.max) / 2], dtype=torch.float64
    ).float()
    points = torch.cat([values, ties, largest, -largest])
    around = [points, *(points.nextafter(torch.tensor(end)) for end in (math.inf, -math.inf))]
    generator = torch.Generator().manual_seed(0)
    random_bits = torch.randint(-(2**31), 2**31, (200_000,), generator=generator).to(torch.int32)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3.4e38])
    return torch.cat([*around, random_bits.view(torch.float32), special])


# ---- against torch


@narrow
def test_every_bit_pattern_has_the_value_that_torch_gives_it(format):
    ours = [format.decode(bits) for bits in range(1 << format.bits)]
    assert same_bits(torch.tensor(ours, dtype=torch.float64), all_values(format))
    for bits, value in enumerate(ours):
        assert math.isnan(value) or format.encode(value) == bits
    assert math.isnan(format.decode(format.encode(math.nan)))


@narrow
def test_rounding_agrees_with_torch(format):
    x = awkward_floats(format)
    expected = x.to(format.dtype).to(torch.float32)
    assert same_bits(format.round(x), expected)
    few = torch.cat([x[:: x.numel() // 2000], x[-8:]])
    expected = few.to(format.dtype).double().tolist()
    for value, rounded in zip(few.tolist(), expected, strict=True):
        assert format.decode(format.encode(value)) == rounded or math.isnan(rounded)


def test_float32_rounding_agrees_with_torch():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**63), 2**63 - 1, (100_000,), generator=generator)
    x = torch.cat(
        [bits.view(torch.float64), torch.randn(100_000, generator=generator, dtype=torch.float64)]
    )
    x = torch.cat(
        [x, x * 1e-40, torch.tensor([FP32.max, 3.4028235677973366e38, 1e39, 7e-46, -0.0])]
    )
    assert same_bits(FP32.round(x), x.float().double())
    assert same_bits(FP64.round(x), x)


def test_limits_are_those_of_finfo():
    for format in WITH_DTYPE:
        info = torch.finfo(format.dtype)
        limits = (format.bits, format.max, format.smallest_normal, format.eps)
        assert limits == (info.bits, info.max, info.smallest_normal, info.eps), format
        assert format.decode(1) == format.smallest_subnormal == format.ulp(0.0), format
        if format not in (E4M3FN, E5M2):  # torch has no nextafter for fp8
            zero, one = torch.tensor([0, 1], dtype=format.dtype)
            assert format.smallest_subnormal == zero.nextafter(one).item(), format


def test_rounding_keeps_dtype_and_shape_and_leaves_its_argument_alone():
    for format in FORMATS.values():
        for dtype in (f.dtype for f in WITH_DTYPE):
            x = torch.linspace(-3, 3, 24).reshape(2, 3, 4).to(dtype)
            before = x.clone()
            rounded = format.round(x)
            assert rounded.dtype == dtype and rounded.shape == x.shape and rounded is not x
            assert torch.equal(x.double(), before.double())
            assert torch.equal(format.round(rounded).double(), rounded.double())


@narrow
def test_rounding_all_patterns_of_each_dtype_is_exact_or_refused(format):
    for other in NARROW:
        values = all_values(other)
        narrow_values, expected = values.to(other.dtype), format.round(values)
        too_large = expected.isfinite() & (expected.abs() > other.max)
        assert same_bits(format.round(narrow_values[~too_large]).double(), expected[~too_large])
        assert (format, other) == (BF16, FP16) or not too_large.any(), other
    if format is BF16:
        with pytest.raises(ValueError, match="float16: 65408 is 65536 in bf16, give a wider"):
            BF16.round(torch.tensor([1.0, 65408.0, math.inf]).half())
        assert BF16.round(torch.tensor([65376.0, math.inf]).half()).tolist() == [65280, math.inf]


def test_rounding_takes_parameters_views_and_scalars():
    assert not FP16.round(torch.nn.Parameter(torch.ones(2))).requires_grad
    x = torch.rand(4, 6)
    assert torch.equal(FP16.round(x.T[1:]), x.half().float().T[1:])
    assert FP16.round(torch.tensor(1.0001)).item() == 1.0
    assert FP16.round(torch.empty(0)).numel() == 0


# ---- tf32, which torch has no dtype for


def test_tf32_is_float32_with_13_bits_rounded_away():
    x = awkward_floats(BF16)
    x = torch.cat([x, x * (1 + 2**-11), x * (1 + 3 * 2**-11)])
    bits = x.view(torch.int32)
    nearest_even = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFF
    expected = torch.where(x.isfinite(), nearest_even.view(torch.float32), x)
    assert same_bits(TF32.round(x), expected)


def test_a_tf32_pattern_is_the_upper_19_bits_of_float32():
    for value in (1.0, -1.5, 2.0**-136, TF32.max, math.inf, -0.0, 1 + 2**-10):
        assert TF32.encode(value) == FP32.encode(value) >> 13
        assert TF32.decode(TF32.encode(value)) == value
    assert (TF32.bits, TF32.eps, TF32.smallest_normal) == (19, FP16.eps, FP32.smallest_normal)


# ---- against gfloat, for float64 numbers too


@any_time
@given(st.sampled_from(list(GFLOAT)), st.data())
def test_decoding_agrees_with_gfloat(format, data):
    bits = data.draw(st.integers(0, (1 << format.bits) - 1))
    ours, theirs = format.decode(bits), float(gfloat.decode_float(GFLOAT[format], bits).fval)
    assert math.isnan(ours) and math.isnan(theirs) or (ours, str(ours)) == (theirs, str(theirs))


@any_time
@given(st.sampled_from(list(GFLOAT)), st.floats(allow_nan=False))
def test_encoding_and_rounding_agree_with_gfloat(format, value):
    rounded = gfloat.round_float(GFLOAT[format], value, sat=format.finite_only)
    ours = format.decode(format.encode(value))
    assert (ours, str(ours)) == (rounded, str(rounded))
    assert format.encode(value) == gfloat.encode_float(GFLOAT[format], rounded)
    assert format.round(torch.tensor(value, dtype=torch.float64)).item() == rounded


# ---- fp6 and fp4


def test_fp6_and_fp4_are_gfloats_in_every_pattern_and_at_every_border():
    for format in SMALL:
        values = [format.decode(bits) for bits in range(1 << format.bits)]
        theirs = [float(gfloat.decode_float(GFLOAT[format], b).fval) for b in range(len(values))]
        assert [str(value) for value in values] == [str(value) for value in theirs]
        assert [format.encode(value) for value in values] == list(range(len(values)))
        x = borders(values)
        rounded = gfloat.round_ndarray(GFLOAT[format], x.numpy(), sat=True)
        assert same_bits(format.round(x), torch.from_numpy(rounded))


def test_fp6_and_fp4_are_those_of_ml_dtypes():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="a second oracle, for those who have it")
    names = {E3M2: "float6_e3m2fn", E2M3: "float6_e2m3fn", E2M1: "float4_e2m1fn"}
    for format, name in names.items():
        x = borders([format.decode(bits) for bits in range(1 << format.bits)])
        cast = x.float().numpy().astype(getattr(ml_dtypes, name)).astype("float64")
        assert same_bits(format.round(x.float().double()), torch.from_numpy(cast))


def borders(values: list[float]) -> torch.Tensor:
    """float64: the values, what lies halfway between them, and their neighbours in float32."""
    values = torch.tensor(values, dtype=torch.float64).unique()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, 2 * values]).float()
    ends = [points.nextafter(torch.tensor(end)) for end in (math.inf, -math.inf)]
    return torch.cat([points, *ends, torch.tensor([-0.0, math.inf, -math.inf])]).double()


def test_what_has_no_nan_refuses_to_encode_it_and_passes_it_through_in_a_tensor():
    with pytest.raises(ValueError, match="value = nan has no pattern in e2m1: give a number"):
        E2M1.encode(math.nan)
    assert E2M1.round(torch.tensor([math.nan, 5.0])).isnan().tolist() == [True, False]
    assert (E2M1.max, E2M3.max, E3M2.max) == (6.0, 7.5, 28.0)


# ---- stochastic rounding


def test_stochastic_rounding_is_unbiased_by_count():
    noise = torch.arange(2**16, dtype=torch.float64) / 2**16  # every fraction of 16 bits, once
    for format in (BF16, E4M3FN, E2M1):
        for value in (1.0 + 3 * 2.0**-9, -2.75, 0.8125 * format.smallest_subnormal, 5.0, 0.0):
            rounded = format.round(torch.full_like(noise, value), noise)
            assert rounded.mean().item() == value, (format.name, value)
            assert len(rounded.unique()) <= 2 and (rounded - value).abs().max() < format.ulp(value)


def test_stochastic_rounding_keeps_what_is_representable_and_the_signs():
    for format in (*NARROW, *SMALL):
        patterns = [format.decode(bits) for bits in range(1 << format.bits)]
        values = torch.tensor(patterns, dtype=torch.float64)
        for noise in (0.0, 1 - 2.0**-40):
            assert same_bits(format.round(values, torch.full_like(values, noise)), values)
    tiny = torch.tensor([-1e-30, 1e-30])
    assert E2M1.round(tiny, torch.zeros(2)).signbit().tolist() == [True, False]


# ---- properties


@any_time
@given(any_format, st.floats(allow_nan=False))
def test_tensor_and_scalar_rounding_are_one(format, value):
    ours = format.round(torch.tensor([value], dtype=torch.float64)).item()
    theirs = format.decode(format.encode(value))
    assert (ours, str(ours)) == (theirs, str(theirs))


@any_time
@given(any_format, st.data())
def test_decode_then_encode_is_the_identity(format, data):
    bits = data.draw(st.integers(0, (1 << format.bits) - 1))
    value = format.decode(bits)
    assert format.encode(value) == bits or math.isnan(value)
    sign, exponent, mantissa = format.fields(bits)
    assert (sign << format.exponent_bits | exponent) << format.mantissa_bits | mantissa == bits


@any_time
@given(any_format, st.data())
def test_ulp_leads_to_the_next_bit_pattern(format, data):
    bits = data.draw(st.integers(0, format.encode(format.max) - 1))
    value = format.decode(bits)
    assert value + format.ulp(value) == format.decode(bits + 1)
    assert format.ulp(-value) == format.ulp(value)


@any_time
@given(any_format, st.floats(allow_nan=False, allow_infinity=False))
def test_rounding_errs_by_half_an_ulp_at_most(format, value):
    if abs(value) <= format.max:
        assert abs(format.decode(format.encode(value)) - value) <= format.ulp(value) / 2


@any_time
@given(any_format, st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_rounding_keeps_the_order(format, a, b):
    low, high = sorted([a, b])
    assert format.decode(format.encode(low)) <= format.decode(format.encode(high))


def test_fp64_is_what_python_calculates_with():
    for value in (0.1, 5e-324, 1.7976931348623157e308, 2.2250738585072014e-308, math.inf):
        assert FP64.decode(FP64.encode(value)) == value
        assert FP64.ulp(value) == math.ulp(value)


# ---- what the lessons say


def test_facts_of_the_course():
    def rounded(format, value):
        return format.decode(format.encode(value))

    assert (FP16.max, FP16.smallest_normal) == (65504.0, 2.0**-14)
    assert FP16.smallest_subnormal == 2.0**-24
    assert rounded(FP16, 1 + 2**-11) == 1.0 > rounded(FP16, 1 - 2**-11)
    assert rounded(FP16, 65519.99) == 65504.0 and rounded(FP16, 65520.0) == math.inf
    assert FP16.fields(0b1_10000_1000000000) == (1, 16, 512)
    assert FP16.decode(0b1_10000_1000000000) == -3.0
    assert E4M3FN.max == 448.0 == rounded(E4M3FN, math.inf) == rounded(E4M3FN, 1e9)
    assert rounded(E4M3FN, -math.inf) == -448.0
    assert math.isnan(E4M3FN.decode(0x7F)) and math.isnan(E4M3FN.decode(0xFF))
    assert E4M3FN.encode(math.nan) == 0x7F
    assert E5M2.max == 57344.0 and rounded(E5M2, 61440.0) == math.inf
    assert FP16.ulp(2048.0) == 2.0 and FP16.ulp(2047.0) == 1.0 and FP16.ulp(70000.0) == math.inf
    assert math.isnan(FP16.ulp(math.nan)) and FP16.ulp(math.inf) == math.inf


def test_a_format_is_found_by_name_dtype_or_itself():
    assert formats.of("fp16") is formats.of(torch.float16) is formats.of(FP16) is FP16


def test_bad_input_gets_one_sentence():
    for key in ("fp12", torch.int32, None, 16):
        with pytest.raises(ValueError, match=r"^format = .* is not known: give one of 'fp64', "):
            formats.of(key)
    with pytest.raises(
        ValueError, match="bits = 256 is no e5m2 pattern: give an int from 0 to 255"
    ):
        E5M2.decode(256)
    with pytest.raises(ValueError, match="bits = -1"):
        FP16.fields(-1)
    with pytest.raises(TypeError, match="tensor has dtype torch.int64: give a floating-point tens"):
        FP16.round(torch.arange(3))
