"""The functions that lesson 1 defines."""

import math

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load


@pytest.fixture(scope="module")
def lesson():
    return load("01")


@each("dtype, name", [(torch.float16, np.float16), (torch.float32, np.float32)])
def test_adding_up_is_what_numpy_does(lesson, dtype, name):
    total = name(0)
    for _ in range(1000):
        total = name(total + name(0.01))
    assert lesson.add_up(dtype, dtype) == float(total)


def test_a_counter_stops_at_two_to_the_digits(lesson):
    assert [lesson.stops_at(dtype) for dtype in (torch.float16, torch.bfloat16)] == [2**11, 2**8]


def test_bf16_is_decoded_as_torch_does(lesson):
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = patterns.view(torch.bfloat16).float()
    normal = values.isfinite() & (values.abs() >= torch.finfo(torch.bfloat16).smallest_normal)
    for bits in normal.nonzero().flatten().tolist()[::37]:
        assert lesson.decode_bf16(bits) == values[bits].item()


def test_kahan_sums_better_than_fp16(lesson):
    values = torch.rand(500, generator=torch.Generator().manual_seed(0)).half()
    truth = math.fsum(values.tolist())
    plain = torch.tensor(0.0).half()
    for value in values:
        plain += value
    assert abs(lesson.kahan_sum(values) - truth) <= 0.25  # half an ulp at 256
    assert abs(plain.item() - truth) > abs(lesson.kahan_sum(values) - truth)
