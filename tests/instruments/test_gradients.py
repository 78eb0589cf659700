"""The underflow microscope counts what torch's own conversion loses."""

import math

import gfloat
import pytest
import torch
from gfloat.formats import format_info_ocp_e4m3

from amp_utils import gradients
from amp_utils.formats import E4M3FN, FORMATS

RANDOM = torch.randn(4000, generator=torch.Generator().manual_seed(0))
VALUES = RANDOM * 2.0 ** torch.linspace(-40, 20, 4000)


def share(mask: torch.Tensor) -> float:
    return mask.double().mean().item()


def test_lost_and_overflowed_agree_with_torch():
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2):
        for scale in (1, 8, 128, 2.0**15):
            converted = (VALUES * scale).to(dtype).float()
            assert gradients.lost(VALUES, dtype, scale) == share(converted == 0)
            assert gradients.overflowed(VALUES, dtype, scale) == share(converted.isinf())


def test_the_border_of_overflow_is_that_of_rounding():
    """Torch saturates e4m3fn; gfloat says which values do not round to its largest one."""
    for x in (1.0, 448.0, 449.0, 463.9, 464.0, 464.1, 480.0, 1e9):
        beyond = math.isnan(gfloat.round_float(format_info_ocp_e4m3, x, sat=False))
        assert gradients.overflowed(torch.tensor([x, -x]).double(), E4M3FN) == beyond, x
    for fmt in (f for f in FORMATS.values() if f is not E4M3FN):
        border = torch.tensor([fmt.max]).double() + fmt.ulp(fmt.max) / 2
        assert gradients.overflowed(border, fmt) == border.isfinite().item(), fmt
        assert gradients.overflowed(border.nextafter(torch.zeros(1).double()), fmt) == 0, fmt


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
    frozen = torch.nn.Linear(2, 1)
    layer(torch.tensor([[1e-9, 1.0]])).sum().backward()
    both = torch.nn.ModuleList([frozen, layer])
    for source in (layer, both, [p.grad for p in both.parameters()]):
        assert gradients.lost(source, "fp16") == pytest.approx(1 / 3)
    for source in (frozen, [p.grad for p in frozen.parameters()], torch.nn.ReLU()):
        with pytest.raises(ValueError, match="source is without gradients: call backward"):
            gradients.histogram(source)


def test_sparse_complex_empty_and_mixed_tensors_are_taken():
    sparse = torch.sparse_coo_tensor([[0, 0]], [1e-9, 1e-9], (4,), check_invariants=True)
    assert gradients.lost(sparse, "fp16") == 1 and gradients.histogram(sparse) == {-29: 1}
    assert gradients.zeros(sparse) == 0.75
    assert gradients.zeros([sparse, torch.zeros(4)]) == 0.875
    complex_values = torch.tensor([1 + 1e-9j, 0 + 7e4j]).conj()
    assert gradients.lost(complex_values, "fp16") == gradients.overflowed(complex_values) * 4 / 3
    assert gradients.histogram(complex_values) == {-30: 1, 0: 1, 16: 1}
    assert gradients.zeros(complex_values) == 0.25
    assert gradients.lost([]) == gradients.lost(torch.zeros(3)) == gradients.zeros([]) == 0
    assert gradients.lost([torch.ones(1).half(), torch.full((1,), 1e-9).double()], "fp16") == 0.5


def test_bad_input_gets_one_sentence():
    for scale in (0, -1.0, math.inf, math.nan):
        for count in (gradients.lost, gradients.overflowed):
            with pytest.raises(ValueError, match="^scale = .* is not allowed: give a finite num"):
                count(VALUES, "fp16", scale)
    with pytest.raises(ValueError, match="fp12"):
        gradients.lost(VALUES, "fp12")
