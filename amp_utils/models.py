"""The networks and data that more than one lesson uses."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


def mlp(features: int, width: int, outputs: int, layers: int = 3) -> nn.Sequential:
    """Linear layers with ReLU between them: (N, features) → (N, outputs)."""
    if layers < 2:
        raise ValueError(f"layers = {layers} is not allowed: give a whole number of at least 2.")
    sizes = [features] + [width] * (layers - 1) + [outputs]
    linear = [nn.Linear(*ends) for ends in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*[part for layer in linear for part in (layer, nn.ReLU())][:-1])


def pixel_grid(size: int) -> Tensor:
    """Centres (x, y) of size × size pixels in the square [-1, 1]², by row: float32 (size², 2)."""
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def checkerboard(size: int, squares: int = 4) -> Tensor:
    """A board of squares × squares fields on size × size pixels, 0 or 1: float32 (size², 1)."""
    field = torch.arange(size) * squares // size
    return ((field[:, None] + field[None, :]) % 2).float().reshape(-1, 1)


def conv_painter(width: int) -> nn.Sequential:
    """1×1 convolutions with batch norm: (B, 2, H, W) coordinates → (B, 1, H, W) grey values."""
    return _painter(width, partial(nn.Conv2d, kernel_size=1), nn.BatchNorm2d)


def pixel_painter(width: int) -> nn.Sequential:
    """The same function pixel by pixel: (N, 2) coordinates → (N, 1) grey values.

    A 1×1 convolution is one linear map for every pixel, so this net has the parameters of a
    `conv_painter` and paints the same; it trains where a CPU has no float16 convolution.
    """
    return _painter(width, nn.Linear, nn.BatchNorm1d)


def _painter(width: int, affine: Callable, norm: Callable) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (2, width, width):
        layers += [affine(inputs, width), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, affine(width, 1))
