"""The shared networks and data are what their lessons say they are."""

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils import models


@each("layers", [2, 3, 5])
def test_the_mlp_has_the_layers_asked_for(layers):
    net = models.mlp(4, 8, 2, layers)
    assert net(torch.zeros(3, 4)).shape == (3, 2)
    assert sum(isinstance(module, torch.nn.Linear) for module in net) == layers
    assert not isinstance(net[-1], torch.nn.ReLU)


def test_an_mlp_of_one_layer_is_refused():
    with pytest.raises(ValueError, match="layers = 1 is not allowed"):
        models.mlp(4, 8, 2, layers=1)


@each("size", [4, 7, 40])
def test_the_grid_holds_pixel_centres_row_by_row(size):
    grid = models.pixel_grid(size).numpy()
    centres = (np.arange(size) + 0.5) / size * 2 - 1
    assert grid.shape == (size * size, 2)
    np.testing.assert_allclose(grid[:, 0], np.tile(centres, size), atol=1e-6)
    np.testing.assert_allclose(grid[:, 1], np.repeat(centres, size), atol=1e-6)


@each("size, squares", [(8, 4), (40, 4), (9, 3), (10, 4)])
def test_the_board_alternates(size, squares):
    board = models.checkerboard(size, squares).reshape(size, size).numpy()
    expected = [
        [(r * squares // size + c * squares // size) % 2 for c in range(size)] for r in range(size)
    ]
    np.testing.assert_array_equal(board, expected)


def test_both_painters_are_the_same_function_in_training_and_evaluation():
    torch.manual_seed(0)
    conv, linear = models.conv_painter(16), models.pixel_painter(16)
    weights = conv.state_dict()
    shapes = {name: value.shape for name, value in linear.state_dict().items()}
    linear.load_state_dict({name: weights[name].reshape(shapes[name]) for name in shapes})
    grid = models.pixel_grid(8)
    image = grid.T.reshape(1, 2, 8, 8)
    for mode in (True, False):
        a, b = conv.train(mode)(image).reshape(-1), linear.train(mode)(grid).reshape(-1)
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_the_net_of_the_curriculum_has_its_widths():
    net = models.conv_painter(256)
    sizes = [(m.in_channels, m.out_channels) for m in net if isinstance(m, torch.nn.Conv2d)]
    assert sizes == [(2, 256), (256, 256), (256, 256), (256, 1)]
