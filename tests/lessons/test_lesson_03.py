"""The functions that lesson 3 defines."""

import pytest
import torch

from amp_utils.course.notebook import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return load("03", device=CPU, low=torch.bfloat16)


def test_stable_softmax_multiplies_in_bf16_and_normalises_in_fp32(lesson):
    inputs, weight = torch.randn(5, 8), torch.randn(8, 3)
    expected = torch.softmax((inputs.bfloat16() @ weight.bfloat16()).float(), dim=1)
    torch.testing.assert_close(lesson.stable_softmax(inputs, weight), expected)


def test_casts_are_counted(lesson):
    block = torch.nn.Sequential(
        torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2, bias=False)
    )
    assert lesson.casts(block, torch.ones(1, 2)) == 4
    assert lesson.casts(block.bfloat16(), torch.ones(1, 2).bfloat16()) == 0


def test_raised_names_what_cuda_runs_in_float32(lesson):
    square = torch.rand(4, 4)
    operations = {
        "softmax": (torch.softmax, square, 1),
        "mm": (torch.mm, square, square),
        "exp": (torch.exp, square),
    }
    assert lesson.raised(operations) == ["exp", "softmax"]


def test_the_region_is_a_new_one_each_time(lesson):
    with lesson.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert lesson.autocast() is not lesson.autocast()
