"""`memory.watch` counts what tensors really hold: each storage once, from its making to its end."""

import pytest
import torch
from torch import nn

from amp_utils import memory


def test_live_and_peak_of_a_known_history():
    with memory.watch() as watched:
        a = torch.zeros(1000)
        b = a + 1
        del a
        c = b.half()
    assert watched.live == b.nbytes + c.nbytes == 6000
    assert watched.peak == 8000
    del b, c
    assert watched.live == 0


def test_views_and_in_place_work_hold_nothing():
    with memory.watch() as watched:
        a = torch.zeros(10, 10)
        views = [a.view(100), a.T, a[2:5], a.detach(), a.add_(1), a.expand(5, 10, 10)]
        assert watched.live == 400
        del a
        assert watched.live == 400, "a view keeps the storage"
        del views
    assert watched.live == 0


def test_what_was_there_before_is_not_counted():
    before = torch.zeros(1000)
    with memory.watch() as watched:
        before.mul_(2)
        view = before.view(10, 100)
    assert watched.live == watched.peak == 0 and view.numel() == 1000


def test_the_peak_can_be_forgotten():
    with memory.watch() as watched:
        a = torch.zeros(1000)
        del a
        watched.reset_peak()
        b = torch.zeros(10)
    assert watched.peak == b.nbytes == 40


@pytest.mark.parametrize("fake", [False, True], ids=["real", "without data"])
def test_a_training_step_of_a_linear_layer(fake):
    from contextlib import nullcontext

    with memory.without_data() if fake else nullcontext(), memory.watch() as watched:
        net = nn.Linear(8, 16, bias=False)
        x = torch.randn(4, 8)
        assert watched.live == 4 * (8 * 16 + 4 * 8)
        y = net(x)
        y.sum().backward()
        del y
        assert watched.live == 4 * (2 * 8 * 16 + 4 * 8), "weights, their gradient and the input"


def test_autocast_keeps_a_cast_of_the_weight_until_backward():
    net, x = nn.Linear(64, 64, bias=False), torch.randn(1, 64, requires_grad=True)
    with memory.watch() as watched:
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        assert watched.live == 2 * (64 * 64 + 64 + 64), (
            "the cast weight, the cast input, the output"
        )
        del y
    assert watched.live == 0


@pytest.mark.parametrize("convert", ["to_sparse", "to_sparse_csr", "to_sparse_csc"])
def test_sparse_tensors_hold_their_indices_and_values(convert):
    x = torch.eye(10)
    with memory.watch() as watched:
        sparse = getattr(x, convert)()
        (sparse @ x).sum()
        pointers = 2 * 10 + (0 if convert == "to_sparse" else 11)
        assert watched.live == 8 * pointers + 4 * 10
    del sparse
    assert watched.live == 0


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_higher_order_ops_can_be_watched():
    from torch.nn.attention.flex_attention import flex_attention

    q, x = torch.rand(1, 1, 16, 16), torch.rand(3, 3)
    with memory.watch() as watched:
        attended = flex_attention(q, q, q)
        chosen = torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x + 1, (x,))
    assert watched.live == attended.nbytes + chosen.nbytes


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_watching_changes_no_result(mode):
    torch.manual_seed(0)
    x, weight, grid = torch.rand(2, 3), torch.rand(4, 3, 3), torch.randn(4, 5, 6)
    for op, args in ((nn.functional.bilinear, (x, x, weight)), (torch.fft.hfftn, (grid,))):
        with mode(), torch.autocast("cpu", torch.bfloat16):
            alone = op(*args)
            with memory.watch():
                seen = op(*args)
        assert torch.equal(seen, alone)


def test_what_autograd_saves_is_counted_by_kind_and_once():
    net, x = nn.Sequential(nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 10)), torch.randn(5, 30)
    with memory.saved(*net.parameters(), x) as kept:
        net(x).square().sum().backward()
    assert kept == {"32-bit activations": 4 * 5 * (20 + 10)}, "ReLU and Linear share one tensor"
    with memory.saved(*net.parameters(), x) as kept:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            net(x)
    assert kept == {"16-bit activations": 2 * 5 * (30 + 20), "casts of weights": 2 * 20 * 10}
    with memory.saved() as kept, torch.no_grad():
        net(x)
    assert kept == {}


def test_a_cast_of_a_parameter_is_told_from_a_cast_of_data():
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    assert memory.is_cast_of_parameter(weight.bfloat16())
    assert memory.is_cast_of_parameter(weight.bfloat16().t())
    assert not memory.is_cast_of_parameter(x.bfloat16())
    assert not memory.is_cast_of_parameter((weight * 2).bfloat16())
