"""The figures of lesson 1 compute as amp_utils.formats, torch and gfloat do, to the bit."""

import base64
import itertools
import math
from importlib import import_module

import gfloat
import pytest
import torch
from gfloat import formats as gf
from support.each import each

from amp_utils.formats import BF16, E2M1, E4M3FN, E5M2, FP16, FP32, TF32

# The names of the functions hide the modules.
bits, updates = (import_module(f"amp_utils.touch.{name}") for name in ("bits", "updates"))
pytestmark = pytest.mark.full
SMALL = [BF16, FP16, E4M3FN, E5M2, E2M1]
PATTERNS = "Array.from({length: 2 * signBit(given)}, (_, i) => i)"
PACK = """btoa(Array.from(
    new Uint8Array(new Float64Array({}).buffer), byte => String.fromCharCode(byte)).join(""))"""


def numbers(run, expression: str, argument: object) -> torch.Tensor:
    """The numbers that an expression gives, as float64, with every bit."""
    packed = base64.b64decode(run(PACK.replace("{}", expression), argument))
    return torch.frombuffer(bytearray(packed), dtype=torch.float64)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, the sign of zero included; any NaN equals any NaN."""
    nan = a.isnan()
    as_int = [x.double()[~nan].view(torch.int64) for x in (a, b)]
    return torch.equal(nan, b.isnan()) and torch.equal(*as_int)


def values(fmt) -> torch.Tensor:
    """All numbers of a small format, by its patterns: torch's, or where it has none gfloat's."""
    if fmt.dtype is None:
        codes = range(2**fmt.bits)
        decoded = [gfloat.decode_float(gf.format_info_ocp_e2m1, code).fval for code in codes]
        return torch.tensor(decoded, dtype=torch.float64)
    patterns = torch.arange(2**fmt.bits, dtype=torch.int32)
    return patterns.to({8: torch.uint8, 16: torch.int16}[fmt.bits]).view(fmt.dtype).double()


def described(fmt) -> dict:
    return bits.described(fmt, fmt.name)


@each("fmt", SMALL)
def test_every_pattern_stands_for_the_number_that_torch_reads(arithmetic, fmt):
    run, given, truth = arithmetic("floats", "bits"), described(fmt), values(fmt)
    assert same(numbers(run, f"{PATTERNS}.map(i => decode(given, i))", given), truth)
    split = f"{PATTERNS}.map(i => factors(given, i)).map(([sign, k, x]) => sign * x * 2 ** k)"
    finite = truth.isfinite()
    assert same(numbers(run, split, given)[finite], truth[finite])
    kinds = run(f"{PATTERNS}.map(i => kind(given, i))", given)
    assert kinds == [kind(fmt, value) for value in truth.tolist()]


def kind(fmt, value: float) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinity"
    normal = "normal" if abs(value) >= fmt.smallest_normal else "subnormal"
    return normal if value else "zero"


@each("fmt", SMALL)
def test_one_step_leads_to_the_next_number(arithmetic, fmt):
    """Zero is one number with two patterns; the largest number and NaN stay."""
    run, truth = arithmetic("floats"), values(fmt)
    line = truth[~truth.isnan()].unique().tolist()
    for by, following in ((1, [*line[1:], line[-1]]), (-1, [line[0], *line[:-1]])):
        after = dict(zip(line, following, strict=True))
        steps = f"{PATTERNS}.map(i => decode(given, step(given, i, {by})))"
        got = numbers(run, steps, described(fmt))
        expected = torch.tensor([after.get(v, math.nan) for v in truth.tolist()])
        assert torch.equal(got.nan_to_num(7e38), expected.double().nan_to_num(7e38))


def awkward(fmt) -> torch.Tensor:
    """Ties, what lies beside them, and seeded numbers, as float32."""
    finite = (values(fmt) if fmt in SMALL else FP16.round(torch.randn(2000).double())).unique()
    finite = finite[finite.isfinite()]
    ties = (finite[1:] + finite[:-1]) / 2
    border = torch.tensor([fmt.max + fmt.ulp(fmt.max) / 2], dtype=torch.float64)
    points = torch.cat([ties, border, -border]).float()
    beside = [points.nextafter(torch.tensor(end)) for end in (-math.inf, math.inf)]
    anything = torch.randint(-(2**31), 2**31, (20_000,)).int().view(torch.float32)
    anything = anything[anything.isfinite()]
    spread = torch.randn(20_000) * 2.0 ** torch.randint(-30, 20, (20_000,))
    return torch.cat([points, *beside, anything, spread, torch.tensor([0.0, -0.0])])


@each("fmt", [TF32, *SMALL])
def test_a_number_is_rounded_as_torch_casts_it(arithmetic, fmt):
    torch.manual_seed(0)
    x = awkward(fmt)
    given = [described(fmt), x.tolist()]
    got = numbers(arithmetic("floats"), "given[1].map(x => round(given[0], x))", given)
    if fmt.dtype:  # beyond its largest number e4m3fn depends on the version of torch
        inside = x.abs() <= fmt.max if fmt.finite_only else x == x
        assert same(got[inside], x.to(fmt.dtype).double()[inside])
    assert same(got, fmt.round(x.double()))
    if fmt is E2M1:
        info = gf.format_info_ocp_e2m1
        assert got.tolist() == [gfloat.round_float(info, v, sat=True) for v in x.tolist()]


def test_float32_is_rounded_as_torch_casts_it(arithmetic):
    torch.manual_seed(0)
    x = torch.randint(-(2**63), 2**63 - 1, (20_000,)).view(torch.float64)
    x = torch.cat([x[x.isfinite()], torch.randn(20_000).double() * 1e-39])
    near = torch.randn(20_000)
    x = torch.cat([x, (near.double() + near.nextafter(torch.tensor(9.0)).double()) / 2])  # ties
    given = [described(FP32), x.tolist()]
    got = numbers(arithmetic("floats"), "given[1].map(x => round(given[0], x))", given)
    assert same(got, x.float().double())


@each("start, sign", [(0.0, 1), (1.0, 1), (1.99, -1), (2048.0, 1)])
def test_the_sums_are_those_of_torch(arithmetic, start, sign):
    torch.manual_seed(0)
    terms = (sign * torch.rand(3000) * torch.rand(3000)).tolist()
    truth = updates.race(start, terms)
    run = arithmetic("floats", "updates")
    for fmt in (FP32, BF16, FP16):
        given = [described(fmt), start, terms]
        totals = numbers(run, "race(...given)", given)
        assert same(totals, torch.tensor(truth[fmt.name], dtype=torch.float64)), fmt.name
    totals = numbers(run, "kahan(...given)", given)
    assert same(totals, torch.tensor(truth["fp16 + Kahan"], dtype=torch.float64))


def test_every_weight_meets_every_update_as_in_torch(arithmetic):
    pairs = [*itertools.product(updates.WEIGHTS, updates.UPDATES)]
    pairs += [(weight, -update) for weight, update in pairs]
    run = arithmetic("floats", "updates")
    for fmt in (FP32, BF16, FP16):
        one = "given[1].map(([w, u]) => add(given[0], round(given[0], w), Math.fround(u)))"
        got = numbers(run, one, [described(fmt), pairs])
        weight, update = torch.tensor(pairs).unbind(1)
        truth = (weight.to(fmt.dtype).float() + update).to(fmt.dtype)
        assert same(got, truth)
