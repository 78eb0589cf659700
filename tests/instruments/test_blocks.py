"""amp_utils.blocks scales as gfloat and torch do, block by block."""

import math

import gfloat
import numpy as np
import pytest
import torch
from gfloat import formats as gf
from support.each import each

from amp_utils.blocks import KINDS, round_scaled, scales
from amp_utils.formats import E2M1, E2M3, E3M2, E4M3FN, E5M2

MX = {
    E4M3FN: gf.format_info_mxfp8_e4m3,
    E5M2: gf.format_info_mxfp8_e5m2,
    E2M3: gf.format_info_mxfp6_e2m3,
    E3M2: gf.format_info_mxfp6_e3m2,
    E2M1: gf.format_info_mxfp4_e2m1,
}


def wide(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes, with a block of zeros and powers of two among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.exp(3 * torch.randn(rows, columns, generator=generator, dtype=torch.float64))
    x *= torch.randn(rows, columns, generator=generator, dtype=torch.float64).sign()
    x[0], x[1] = 0, 2.0 ** torch.arange(columns)
    return x.float()


@each("fmt", MX)
def test_a_floored_scale_and_its_values_are_gfloats(fmt):
    x = wide(40, 32)
    saturates = fmt is not E5M2  # where OCP leaves the choice, its values become infinite as E5M2's
    for block, mine in zip(x, round_scaled(x, fmt, "e8m0_floor", 32), strict=True):
        values = block.double().numpy()
        if not values.any():
            assert not mine.any()
            continue
        scale = gfloat.compute_scale_amax(MX[fmt].etype.emax, values)
        element = gfloat.round_ndarray(MX[fmt].etype, values / scale, sat=saturates)
        assert np.array_equal(mine.double().numpy(), element * scale)


@each("fmt", MX)
@each("kind", [kind for kind in KINDS if kind != "e8m0_floor"])
def test_the_other_scales_are_what_they_say_and_gfloat_rounds_under_them_alike(fmt, kind):
    x = wide(40, 32).double()
    found = scales(x, fmt, kind)
    assert found[0] == 1 and found.isfinite().all() and (found > 0).all()
    wanted = x.abs().amax(1, keepdim=True) / fmt.max
    if kind == "fp32":
        assert torch.equal(found[1:], wanted[1:].float().double())
    elif kind == "e8m0":
        assert (found[1:] >= wanted[1:]).all() and (found[1:] < 2 * wanted[1:]).all()
        assert (torch.frexp(found)[0] == 0.5).all()
    else:
        stored = (found[1:] / (wanted.max() / 448).float()).double()
        assert torch.equal(stored.float(), stored.to(torch.float8_e4m3fn).float())
        assert stored.max() == 448
    rounded = gfloat.round_ndarray(MX[fmt].etype, (x / found).numpy(), sat=fmt is not E5M2)
    mine = round_scaled(x, fmt, kind, 32)
    assert np.array_equal(mine.numpy(), rounded * found.numpy())


def test_under_powers_of_two_the_values_are_those_of_torchs_cast():
    x = wide(40, 64)
    for fmt in (E4M3FN, E5M2):
        scale = scales(x.double().reshape(-1, 32), fmt, "e8m0").float()
        cast = (x.reshape(-1, 32) / scale).to(fmt.dtype).float() * scale
        assert torch.equal(round_scaled(x, fmt, "e8m0", 32), cast.reshape(x.shape))


def test_rounding_up_cuts_nothing_off_and_the_floor_does():
    x = torch.tensor([[7.0, 1.0]])  # 7 lies between fp4's largest number and the next power of two
    assert round_scaled(x, E2M1, "e8m0_floor", 2).tolist() == [[6.0, 1.0]]
    assert round_scaled(x, E2M1, "e8m0", 2).tolist() == [[8.0, 1.0]]
    for fmt in MX:  # and what a power of two brings exactly to the largest number needs no more
        for power in (-20, 0, 9):
            largest = torch.tensor([[1.0, fmt.max]], dtype=torch.float64) * 2.0**power
            assert scales(largest, fmt, "e8m0").item() == 2.0**power


@each("kind", KINDS)
def test_shape_and_dtype_stay_and_one_nan_spoils_no_more_than_its_scale(kind):
    x = wide(4, 64).reshape(2, 2, 64).bfloat16()
    x[0, 0, 3] = math.nan
    rounded = round_scaled(x, E4M3FN, kind, 16)
    assert (rounded.shape, rounded.dtype) == (x.shape, x.dtype)
    assert rounded[0, 0, :16].isnan().all()
    if kind != "e4m3":  # its second scale is the tensor's
        assert rounded.isfinite().sum() == x.numel() - 16


def test_one_scale_for_the_tensor_is_a_block_that_holds_it_all():
    x = wide(8, 32)
    assert torch.equal(
        round_scaled(x, E4M3FN), round_scaled(x.reshape(1, -1), E4M3FN, block=256).reshape(8, 32)
    )


def test_bad_input_gets_one_sentence():
    with pytest.raises(ValueError, match="block = 32 is not allowed: the last dimension has 48 v"):
        round_scaled(torch.ones(2, 48), E2M1, "e8m0", 32)
    with pytest.raises(ValueError, match="kind = 'e9m0' is not known: give one of 'fp32', 'e8m0'"):
        round_scaled(torch.ones(2, 32), E2M1, "e9m0", 32)
