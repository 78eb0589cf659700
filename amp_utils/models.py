"""The networks and data that more than one lesson uses."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


def mlp(features: int, width: int, outputs: int, layers: int = 3) -> nn.Sequential:
    """A plain perceptron of `layers` linear layers with ReLU between: (N, features) → (N, outputs)."""
    if layers < 2:
        raise ValueError(f"layers = {layers} is not allowed: give a whole number of at least 2.")
    sizes = [features] + [width] * (layers - 1) + [outputs]
    modules: list[nn.Module] = []
    for inputs, neurons in zip(sizes, sizes[1:], strict=False):
        modules += [nn.Linear(inputs, neurons), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def pixel_grid(size: int) -> Tensor:
    """Centres of size × size pixels in the square [-1, 1]², row by row: float32 (size², 2), columns x and y."""
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([x.flatten(), y.flatten()], dim=1)


def checkerboard(size: int, squares: int = 4) -> Tensor:
    """A board of squares × squares fields on size × size pixels: float32 (size², 1), 0 is black and 1 is white."""
    field = torch.arange(size) * squares // size
    return ((field[:, None] + field[None, :]) % 2).float().reshape(-1, 1)


def conv_painter(width: int) -> nn.Sequential:
    """Checkerboard net as 1×1 convolutions with batch norm: (B, 2, H, W) coordinates → (B, 1, H, W) grey values."""
    return _painter(width, partial(nn.Conv2d, kernel_size=1), nn.BatchNorm2d)


def pixel_painter(width: int) -> nn.Sequential:
    """The same function pixel by pixel: (N, 2) coordinates → (N, 1) grey values.

    A 1×1 convolution applies one linear map to every pixel, so this net has the same parameters as `conv_painter`
    and draws the same picture; it trains where a CPU has no kernel for float16 convolutions.
    """
    return _painter(width, nn.Linear, nn.BatchNorm1d)


def _painter(
    width: int, affine: Callable[..., nn.Module], norm: Callable[..., nn.Module]
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (2, width, width):
        layers += [affine(inputs, width), norm(width), nn.ReLU()]
    return nn.Sequential(*layers, affine(width, 1))


def copy_painter(source: nn.Module, target: nn.Module) -> None:
    """Copy parameters and running statistics between a `conv_painter` and a `pixel_painter` of the same width."""
    shapes = {name: value.shape for name, value in target.state_dict().items()}
    target.load_state_dict(
        {name: value.reshape(shapes[name]) for name, value in source.state_dict().items()}
    )
