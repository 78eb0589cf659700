"""The loss scale's figure counts as fp16 rounds."""

from importlib import import_module

import pytest
import torch

from amp_utils import gradients, touch
from amp_utils.course import cells

figure = import_module("amp_utils.touch.loss_scale")


def every_pattern() -> torch.Tensor:
    """Every positive fp16 number, its neighbours in float32, and the borders between them."""
    numbers = torch.arange(1, 0x7C00, dtype=torch.int16).view(torch.float16).double()
    middles = torch.cat(
        [numbers[:1] / 2, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([65520.0])]
    )
    exact = torch.cat([numbers, middles])
    return torch.cat([exact, exact * (1 - 2**-20), exact * (1 + 2**-20)])


def by_torch(values: torch.Tensor, k: int) -> dict[str, int]:
    half = (values * 2.0**k).half()
    kinds = {
        "lost": half == 0,
        "subnormal": (half > 0) & (half < 2.0**-14),
        "normal": half.isfinite() & (half >= 2.0**-14),
        "infinite": half.isinf(),
    }
    return {kind: mask.sum().item() for kind, mask in kinds.items()}


@pytest.mark.full
def test_every_scale_counts_what_torch_counts(arithmetic):
    values, run = every_pattern(), arithmetic("loss_scale")
    bins = figure.magnitudes(values)
    scales = range(-45, 46)
    counted = run("given[1].map(k => fates(given[0], k))", [bins, [*scales]])
    for k, fates in zip(scales, counted, strict=True):
        assert fates == by_torch(values, k), f"at 2^{k}"


def test_the_parts_of_a_bin_lie_at_the_borders_of_fp16():
    edge = [1.0, 1.5, 2 - 2**-10, 2 - 2**-11, -1.0, 0.0, float("inf"), float("nan")]
    assert figure.magnitudes(torch.tensor(edge)) == [[0, 5, 2, 2, 1]]
    assert gradients.lost(torch.tensor(edge[:1]), "fp16", 2.0**-25) == 1


def test_large_gradients_can_be_drawn_and_none_cannot():
    wave = torch.linspace(-1, 1, 4).reshape(2, 2)
    with cells.outputs() as shown:
        touch.loss_scale(torch.tensor([3.0]), {-3: wave, 0: wave * torch.nan})
    assert "100.0% at 2^-3" not in shown[0]["data"]["text/plain"]
    with pytest.raises(ValueError, match="no finite gradient but zero"):
        touch.loss_scale(torch.zeros(3), {0: wave})
    with pytest.raises(ValueError, match="no picture"):
        touch.loss_scale(torch.ones(3), {})
