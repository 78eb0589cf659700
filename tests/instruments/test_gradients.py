"""The underflow microscope counts what torch's own conversion loses."""

import math

import pytest
import torch

from amp_utils import gradients

VALUES = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.linspace(
    -40, 20, 4000
)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("scale", [1, 8, 128, 2.0**15])
def test_lost_and_overflowed_agree_with_torch(dtype, scale):
    converted = (VALUES * scale).to(dtype).float()
    assert gradients.lost(VALUES, dtype, scale) == pytest.approx(
        (converted == 0).double().mean().item()
    )
    assert gradients.overflowed(VALUES, dtype, scale) == pytest.approx(
        converted.isinf().double().mean().item()
    )


def test_a_format_that_saturates_overflows_too():
    assert gradients.overflowed(torch.tensor([1.0, 448.0, 1000.0, -1e9]), "e4m3fn") == 0.5


def test_zeros_are_not_lost():
    values = torch.tensor([0.0, 0.0, 1.0, 1e-9])
    assert gradients.lost(values, "fp16") == 0.5
    assert gradients.zeros(values) == 0.5


def test_the_histogram_counts_by_power_of_two():
    values = torch.tensor([1.0, 1.5, -1.99, 2.0, 0.0, math.inf, math.nan, 2.0**-30])
    assert gradients.histogram(values) == {-30: 1, 0: 3, 1: 1}
    counts = gradients.histogram(VALUES)
    assert list(counts) == sorted(counts) and sum(counts.values()) == (VALUES != 0).sum()


def test_a_module_stands_for_its_gradients():
    layer = torch.nn.Linear(2, 1)
    layer(torch.tensor([[1e-9, 1.0]])).sum().backward()
    assert gradients.lost(layer, "fp16") == pytest.approx(1 / 3)
    assert gradients.lost([p.grad for p in layer.parameters()], "fp16") == pytest.approx(1 / 3)


def test_sparse_empty_and_mixed_tensors_are_taken():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1e-9, 1e-9], (4,), check_invariants=True)
    assert gradients.lost(sparse, "fp16") == 1
    assert gradients.lost([]) == gradients.lost(torch.zeros(3)) == 0
    assert gradients.lost([torch.ones(1).half(), torch.full((1,), 1e-9).double()], "fp16") == 0.5


@pytest.mark.parametrize("scale", [0, -1.0, math.inf, math.nan])
def test_a_senseless_scale_is_refused(scale):
    with pytest.raises(ValueError, match="scale = .* is not allowed: give a finite number above 0"):
        gradients.lost(VALUES, "fp16", scale)


def test_a_module_without_gradients_is_refused():
    with pytest.raises(ValueError, match="without gradients: call backward"):
        gradients.histogram(torch.nn.Linear(1, 1))


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="fp12"):
        gradients.lost(VALUES, "fp12")
