"""The ladder's figure rounds and scales as amp_utils.blocks does, to the bit."""

from importlib import import_module

import pytest
import torch
from support.each import each

from amp_utils import touch
from amp_utils.blocks import KINDS, round_scaled

figure = import_module("amp_utils.touch.ladder")


def vectors(fmt) -> list[torch.Tensor]:
    """64 values each: normal, over 40 powers of two, with exact scales, with a block of zeros."""
    normal = torch.randn(64).double()
    spread = torch.randn(64).float().double() * 2.0 ** torch.randint(-20, 20, (64,))
    exact = fmt.max * 2.0 ** torch.arange(-40, 24).double()
    return [normal, spread, exact, exact * (1 + 2**-40), normal * (torch.arange(64) > 20)]


def numbers(run, given: list) -> list[float]:
    """What JavaScript rounds, infinities included, which JSON lacks."""
    return [float(x) for x in run("rounded(...given).map(String)", given)]


@pytest.mark.full
@each("name", figure.FORMATS)
def test_every_scale_and_block_gives_what_python_gives(arithmetic, name):
    run, fmt = arithmetic("floats", "ladder"), figure.FORMATS[name]
    for vector in vectors(fmt):
        for kind in KINDS:
            for size in (64, 32, 16):
                given = [figure.described(fmt, name), vector.tolist(), kind, size]
                expected = round_scaled(vector, fmt, kind, size).tolist()
                assert numbers(run, given) == expected, (kind, size)
        assert numbers(run, [given[0], vector.tolist(), "none", 64]) == fmt.round(vector).tolist()


def test_the_errors_of_the_drawing_are_relative_and_one_for_a_lost_value():
    vector = torch.tensor([1.0, -3.0, 2.0**-30, 7.0]).double()
    row = figure.errors(vector, figure.E2M1, "e8m0", None)
    assert row.tolist() == [0, 0, 1, pytest.approx(1 / 7)]
    assert figure.enlarged(vector, 1, 2).tolist() == [1, -12, 2.0**-30, 7]


def test_a_vector_that_cannot_be_drawn_is_refused():
    for wrong in (torch.ones(33), torch.zeros(32), torch.ones(160)):
        with pytest.raises(ValueError, match="give 32, 64, 96 or 128 finite numbers"):
            touch.ladder(wrong)
    with pytest.raises(ValueError, match="outlier = 40 is not allowed: give 0 to 31"):
        touch.ladder(torch.ones(32))
