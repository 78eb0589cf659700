"""The functions that lesson 1 defines: reading, writing and rounding floats, and sums of them."""

import math

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils import formats
from amp_utils.course.notebook import load


@pytest.fixture(scope="module")
def lesson():
    return load("01")


def test_decode_reads_every_pattern_as_numpy_does(lesson):
    truth = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(float)
    np.testing.assert_array_equal([lesson.decode(bits) for bits in range(2**16)], truth)


def test_encode_writes_what_numpy_writes(lesson):
    x = np.exp2(np.random.default_rng(0).uniform(-26, 15.999, 2000))
    x = [*x, 1.9999, 65519.0, 65520.0, 2.0**-14, 2.0**-24, 1e-6]
    with np.errstate(over="ignore"):
        truth = np.float16(x).view(np.uint16).tolist()
    assert [lesson.encode(value) for value in x] == truth


@each("fmt", [formats.TF32, formats.E5M2, formats.Format("toy", 3, 2, None)])
def test_rounding_serves_formats_that_the_check_does_not_try(lesson, fmt):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, generator=generator).double()
    x *= 2.0 ** torch.randint(-20, 20, (20_000,), generator=generator)
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 61440.0, 15.0])])
    torch.testing.assert_close(
        lesson.round_to(x, fmt), fmt.round(x), equal_nan=True, rtol=0, atol=0
    )


@each("dtype, name", [(torch.float16, np.float16), (torch.float32, np.float32)])
def test_adding_up_is_what_numpy_does(lesson, dtype, name):
    total = name(0)
    for _ in range(1000):
        total = name(total + name(0.01))
    assert lesson.add_up(dtype, dtype) == float(total)
