"""Lesson 10: the memory ledger is right for every size, and so are the rates and the clock."""

from itertools import accumulate

import pytest
import torch
from support.each import each

from amp_utils import models
from amp_utils.course import notebook

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return notebook.load("10", device=CPU, on_gpu=False, seed=0, lr=1.0, layers=3, batch=5)


@each("amp", [False, True])
@each("batch, width, layers", [(8, 16, 2), (8, 16, 3), (3, 40, 3), (50, 8, 5)])
def test_the_predicted_bytes_are_those_that_autograd_keeps(lesson, batch, width, layers, amp):
    assert lesson.kept(batch, amp, width, layers) == lesson.predicted(batch, width, layers, amp)


@each("precision", ["fp32", "bf16"])
def test_the_loop_is_sgd(lesson, precision):
    """One step of the lesson's loop against the update written out by hand."""
    net, optimizer, scaler = lesson.new_lane(precision, 16)
    before = [p.detach().clone() for p in net.parameters()]
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = (net(x).float() - y).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    losses = lesson.train(precision, net, optimizer, scaler, (x, y))
    assert torch.allclose(losses[0], loss.detach(), rtol=1e-5)
    assert losses.untyped_storage().nbytes() == 4, "a loss must not keep mse_loss's buffer"
    for new, old, gradient in zip(net.parameters(), before, gradients, strict=True):
        assert torch.allclose(new, old - 1.0 * gradient, atol=1e-5)
    assert all(p.grad is None for p in net.parameters())


def test_every_lane_starts_from_the_same_weights(lesson):
    one, two = (lesson.new_lane(name, 16)[0].state_dict() for name in ("fp32", "bf16"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_step_has_sixteen_bw2_operations(lesson):
    """Counted by torch where the lesson reckons."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        lesson.products("fp32", lesson.new_operands("fp32", 16))
    assert counter.get_total_flops() == 16 * 5 * 16**2
    assert lesson.rate(512, 8.063) * 8.063e12 == pytest.approx(150 * 16 * 512 * 4096**2)


def test_one_past_fits_2021_and_another_2025(lesson):
    """The published bytes, of 2025 less two workspaces of cuBLAS, to a hundredth of a MB."""
    for row, published in (
        ((2021, "network"), (1367.458816, 1803.759616)),
        ((2025, "loss", True), (7533.332992 - 17.03936, 7634.01984 - 17.03936)),
    ):
        assert lesson.recipe_peaks(*row) == pytest.approx(published, abs=0.01), row
    assert lesson.recipe_peaks(2021, "nothing")[0] == pytest.approx(1367.458816, abs=0.01)


def test_an_h100_fits_no_past_of_2025(lesson):
    """There torch lends cuBLAS 32 MiB rather than 8.5 MB, to each of two threads."""
    published = (7533.332992 - 2 * 33.554432, 7634.01984 - 2 * 33.554432)
    for left, twice in [
        ("nothing", False),
        ("loss", 0),
        ("loss", 1),
        ("network", 0),
        ("network", 1),
    ]:
        ours = lesson.recipe_peaks(2025, left, twice)
        misses = [abs(peak - wanted) for peak, wanted in zip(ours, published, strict=True)]
        assert max(misses) > 10, (left, twice)


@each("batch, squares", [(1600, -0.34375), (2048, 0), (2560, 0.5), (4096, 2), (16_384, 2)])
def test_the_peak_rises_as_the_table_says(lesson, batch, squares):
    """In squares of the width; it falls only between a third and a half of the width."""
    fp32, amp = lesson.recipe_peaks(2025, "nothing", batch=batch)
    assert amp - fp32 == pytest.approx(squares * 4096**2 / 1e6, abs=0.1)


@each("batch, fp32, amp", [(1365, (12, 12), (14, 6)), (4096, (4, 24), (6, 20))])
def test_with_del_loss_amp_needs_less_above_a_third_of_the_width(lesson, batch, fp32, amp):
    """Bytes beside data and weights, as multiples of W² and of BW: the table's rises follow."""
    ours = [lesson.recipe_peaks(2025, "nothing", batch=batch)[0]]
    ours += [lesson.recipe_peaks(2025, "freed", batch=batch)[1]]
    for peak, (squares, columns) in zip(ours, (fp32, amp), strict=True):
        weights_and_data = 12 * 4096**2 + 100 * 4 * batch * 4096
        reckoned = weights_and_data + squares * 4096**2 + columns * batch * 4096
        assert peak == pytest.approx(reckoned / 1e6, abs=0.2)


@each("batch, width", [(32, 32), (8, 64)])
def test_the_recipes_peaks_are_those_of_real_tensors(lesson, batch, width):
    """Against what torch's CPU allocator hands out, as the profiler sees it."""
    from torch.profiler import profile

    (x, y), held = torch.randn(2, batch, width), {}

    def run(amp, freed=False):
        held["net"] = models.mlp(width, width, width)
        optimizer = torch.optim.SGD(held["net"].parameters())
        for _ in range(2):
            with torch.autocast("cpu", torch.float16, enabled=amp):
                held["output"] = held["net"](x)
                held["loss"] = torch.nn.functional.mse_loss(held["output"], y)
            held["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            if freed:
                del held["loss"]

    def peak_of(*runs, freed=False):
        held.clear()
        with profile(profile_memory=True) as profiler:
            for amp in runs:
                run(amp, freed)
        events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return max(accumulate(sizes))

    data = 100 * batch * width * 4
    for left, twice, runs in (("nothing", False, [False]), ("loss", True, [False, False, True])):
        peaks = lesson.recipe_peaks(2025, left, twice, batch, width=width)
        assert peak_of(*runs) == pytest.approx(1e6 * max(peaks[: len(runs)]) - data, abs=16)
    peak = lesson.recipe_peaks(2025, "freed", batch=batch, width=width)[1]
    assert peak_of(True, freed=True) == pytest.approx(1e6 * peak - data, abs=16)


def test_suspects_are_those_that_could_have_done_it(lesson):
    assert lesson.suspects(67.0, 989.0, 80.0) == ["H100"]
    assert lesson.suspects(67.1, 1.0, 1.0) == ["RTX 4090", "RTX 5090"]
    assert "RTX 3070" not in lesson.suspects(1.0, 1.0, 8.1)
