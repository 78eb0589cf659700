"""Lesson 10: the memory ledger is right for every size, and so are the loop and its bounds."""

import math
from itertools import accumulate

import pytest
import torch
from support.each import each

from amp_utils import memory, models
from amp_utils.course import notebook

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def lesson():
    return notebook.load("10", device=CPU, on_gpu=False, seed=0, layers=3, batch=5)


@each("batch, width, layers", [(8, 16, 2), (8, 16, 3), (3, 40, 3), (50, 8, 5)])
def test_the_tables_bytes_are_those_that_autograd_keeps(lesson, batch, width, layers):
    column = batch * width
    assert lesson.kept(batch, False, width, layers) == {"32-bit activations": 4 * column * layers}
    assert lesson.kept(batch, True, width, layers) == {
        "32-bit activations": 4 * column,
        "16-bit activations": 2 * column + 2 * column * (layers - 1),
        "casts of weights": 2 * width**2 * (layers - 1),
    }


def more_kept(lesson, batch, width, layers):
    """How many bytes AMP keeps beyond float32, by what autograd keeps, not by the table."""
    fp32, amp = (sum(lesson.kept(batch, on, width, layers).values()) for on in (False, True))
    return amp - fp32


@each("width, layers", [(16, 3), (24, 4), (18, 11)])
def test_where_both_keep_the_same(lesson, width, layers):
    """The batch by which the check of exercise 3 knows that the peak was not asked."""
    batch = width * (layers - 1) // (layers - 2)
    before, at, after = (more_kept(lesson, batch + i, width, layers) for i in (-1, 0, 1))
    assert before > 0 == at > after


def test_two_layers_always_keep_more(lesson):
    excess = [more_kept(lesson, batch, 16, 2) for batch in (1, 1000, 1_000_000)]
    assert min(excess) > 0 and len(set(excess)) == 1


@each("before", ["high", "highest"])
def test_the_word_decides_tf32_whatever_was_set_before(before):
    """The flags of CUDA can be read without a GPU."""
    on_gpu = notebook.load("10", device=CPU, on_gpu=True)
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    found = [place.fp32_precision for place in places]
    try:
        torch.set_float32_matmul_precision(before)
        for word, wanted in (
            ("tf32", "tf32"),
            ("fp32", "ieee"),
            ("tf32", "tf32"),
            ("fp16", "ieee"),
        ):
            on_gpu.set_products(word)
            assert torch.backends.cuda.matmul.fp32_precision == wanted
    finally:
        torch.set_float32_matmul_precision("highest")
        for place, precision in zip(places, found, strict=True):
            place.fp32_precision = precision


@each("precision", ["fp32", "bf16"])
def test_the_loop_is_sgd(lesson, precision):
    """One step of the lesson's loop against the update written out by hand."""
    x, y = torch.randn(5, 16), torch.randn(5, 16)
    run = lesson.new_run(precision, (x, y), 1)
    net = run.args[1]
    before = [p.detach().clone() for p in net.parameters()]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = (net(x).float() - y).square().mean()
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    losses = run()
    assert torch.allclose(losses[0], loss.detach(), rtol=1e-5)
    assert losses.untyped_storage().nbytes() == 4, "a loss must not keep mse_loss's buffer"
    for new, old, gradient in zip(net.parameters(), before, gradients, strict=True):
        assert torch.allclose(new, old - 2.0 * gradient, atol=1e-5)
    assert all(p.grad is None for p in net.parameters())


def test_every_run_starts_from_the_same_weights(lesson):
    data = lesson.new_data(4, 16)
    one, two = (lesson.new_run(name, data, 1).args[1].state_dict() for name in ("fp32", "bf16"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_a_step_has_sixteen_bw2_operations(lesson):
    """Counted by torch: all products of a step of three layers, and no other."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        lesson.products("fp32", lesson.new_operands("fp32", 16))
    assert counter.get_total_flops() == 16 * 5 * 16**2


def test_a_rate_is_sixteen_bw2_operations_a_step(lesson):
    assert lesson.rate(512, 8.063) * 8.063e12 == pytest.approx(150 * 16 * 512 * 4096**2)


def test_suspects_are_those_that_could_have_done_it(lesson):
    assert lesson.suspects(67.0, 989.0, 80.0) == ["H100"]
    assert lesson.suspects(67.1, 1.0, 1.0) == ["RTX 4090"]
    assert "RTX 2060" not in lesson.suspects(1.0, 1.0, 6.1)
    ran = lesson.rate(4096, 7.738), lesson.rate(4096, 3.325)
    assert lesson.suspects(*ran, 7.634) == ["RTX 3080", "RTX 4090", "H100"]


def test_a_whole_network_that_outlives_the_float32_run_explains_2021(lesson):
    """To 0.01 MB, with the operators of July 2021."""
    nothing, network = (lesson.recipe_peaks(left, 512, True) for left in ("nothing", "network"))
    assert network == pytest.approx([1367.458816, 1803.759616], abs=0.01)
    assert nothing[0] == network[0]
    square = (4096**2 + 4096) * 4 / 1e6
    assert network[1] - nothing[1] == pytest.approx(6 * square, abs=0.01)


def test_a_last_loss_left_by_an_earlier_float32_run_explains_2025(lesson):
    """To 0.01 MB, with two workspaces of 8320 KiB; if float32 ran once, it does not fit."""
    held = lesson.recipe_peaks("loss", 4096, False, runs=(False, False, True))
    once, twice, amp = (peak + 2 * 8320 * 1024 / 1e6 for peak in held)
    assert [twice, amp] == pytest.approx([7533.332992, 7634.01984], abs=0.01)
    assert once == pytest.approx(twice - 8 * 4096**2 / 1e6, abs=0.1)
    # the loss adds two matrices to float32's peak, and three to AMP's
    nothing = lesson.recipe_peaks("nothing", 4096, False)
    matrix = 4 * 4096**2 / 1e6
    added = [(peak - bare) / matrix for peak, bare in zip(held[1:], nothing, strict=True)]
    assert added == pytest.approx([2, 3], abs=0.01)


@each("batch", [4096, 16384])
@each("amp, forward, later", [(False, (12, 20), (16, 20)), (True, (18, 20), (16, 18))])
def test_a_steps_peaks_are_sums_of_matrices(lesson, batch, amp, forward, later):
    """In three layers, as multiples of W² and of BW bytes, weights included."""
    *three_layers, at_loss, at_first, at_second, at_third, at_update = lesson.alive(batch, 3, amp)
    peaks = max(*three_layers, at_loss), max(at_first, at_second, at_third, at_update)
    for peak, (squares, columns) in zip(peaks, (forward, later), strict=True):
        reckoned = (squares * 4096**2 + columns * batch * 4096) / 1e6
        assert peak == pytest.approx(reckoned, abs=0.5)


def more_at_the_peak(lesson, batch, layers, width=1000):
    fp32, amp = (max(lesson.alive(batch, layers, on, width)) for on in (False, True))
    return amp - fp32


@each("layers", [4, 6, 12, 20])
def test_the_peaks_break_even_where_the_exercise_says(lesson, layers):
    batch = lesson.break_even_batch(1000, layers)
    before, after = (more_at_the_peak(lesson, round(batch * by), layers) for by in (0.98, 1.02))
    assert before > 0 > after


@each("layers, foreach", [(4, False), (12, False), (12, True)])
def test_adams_state_leaves_what_amp_saves_and_adds_to_both_peaks(lesson, layers, foreach):
    """With many samples; `alive` again, for the second step of another optimizer."""
    width, batch = 512, 4 * 512

    def peak(amp):
        with memory.without_data(), memory.watch() as watched:
            net, (x, y) = models.mlp(width, width, width, layers), torch.empty(2, batch, width)
            optimizer = torch.optim.Adam(net.parameters(), foreach=foreach)
            for _ in range(2):
                watched.reset_peak()
                with torch.autocast("cpu", dtype=torch.float16, enabled=amp):
                    loss = lesson.fake_mse(net(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                del loss
        return (watched.peak - 2 * x.nbytes) / 1e6

    plain = [max(lesson.alive(batch, layers, on, width)) for on in (False, True)]
    state = 8 * layers * width**2 / 1e6
    adam = [peak(on) for on in (False, True)]
    assert adam == pytest.approx([bare + state for bare in plain], rel=0.005)


def test_three_layers_never_peak_lower(lesson):
    assert lesson.break_even_batch(1000, 3) == math.inf
    assert all(more_at_the_peak(lesson, batch, 3) > 0 for batch in (125, 1000, 4000, 100_000))


@each("layers", [3, 5, 12, 20])
@each("batch", [1200, 5000])
def test_with_more_samples_than_neurons_the_peaks_are_at_the_loss_and_after_it(
    lesson, batch, layers
):
    """For float32 the part of the first gradient, for AMP that of the loss."""
    fp32, amp = (lesson.alive(batch, layers, on, 1000) for on in (False, True))
    assert fp32.index(max(fp32)) == layers + 1 and amp.index(max(amp)) == layers


@each("old, batch", [(True, 512), (False, 4096)])
def test_in_fresh_processes_the_published_loop_costs_amp_half_a_matrix(lesson, old, batch):
    (fp32,), (amp,) = (lesson.recipe_peaks("loss", batch, old, runs=(on,)) for on in (False, True))
    assert amp - fp32 == pytest.approx(2 * 4096**2 / 1e6, rel=0.01)
    nothing = lesson.recipe_peaks("nothing", batch, old)
    assert nothing == pytest.approx([fp32, amp], abs=0.001)


class Relu2021(torch.autograd.Function):
    """As it was before pull request 63089: the input is saved, not the output."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.relu(x)

    @staticmethod
    def backward(ctx, g):
        return torch.ops.aten.threshold_backward(g, *ctx.saved_tensors, 0)


class MseLoss2021(torch.autograd.Function):
    """As it was before pull request 67489: the result keeps no buffer."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return torch.nn.functional.mse_loss(x, y, reduction="none").mean()

    @staticmethod
    def backward(ctx, g):
        return torch.ops.aten.mse_loss_backward(g, *ctx.saved_tensors, 1), None


def peak_while(run, *given):
    """The most bytes that torch's CPU allocator has handed out at a time, as the profiler sees."""
    from torch.profiler import profile

    with profile(profile_memory=True) as profiler:
        run(*given)
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda event: event.start_ns())))


@each("old, held", [(False, False), (False, True), (True, True)])
@each("batch, width", [(32, 32), (8, 64)])
def test_the_peaks_are_those_of_real_tensors(lesson, batch, width, old, held):
    x, y = torch.randn(2, batch, width)
    mse_loss = MseLoss2021.apply if old else torch.nn.functional.mse_loss

    def forward(net):
        hidden = x
        for layer in net:
            relu = old and isinstance(layer, torch.nn.ReLU)
            hidden = Relu2021.apply(hidden) if relu else layer(hidden)
        return hidden

    def train(amp):
        net = models.mlp(width, width, width)
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(3):
            with torch.autocast("cpu", torch.float16, enabled=amp):
                output = forward(net)
                loss = mse_loss(output.float(), y)
            output = output if held else None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=not old)
            loss = loss if held else None

    if held:
        data = 100 * batch * width * 4 / 1e6
        taken = lesson.recipe_peaks("nothing", batch, old, width=width)
        peaks = [peak - data for peak in taken]
    else:
        peaks = [max(lesson.alive(batch, 3, amp, width)) for amp in (False, True)]
    for amp, peak in enumerate(peaks):
        assert peak_while(train, bool(amp)) == pytest.approx(1e6 * peak, abs=16)


@each("precision", ["fp32", "bf16"])
def test_no_step_of_the_loop_needs_more_than_the_first(lesson, precision):
    """So `train` lets go of its last loss, whose buffer has the output's size."""
    data = torch.ones(2, 64, 16)

    def peak_of(steps):
        return peak_while(lesson.new_run(precision, data, steps))

    assert peak_of(3) < peak_of(1) + 64 * 16


@each("share, faster", [(0.79, 3.97), (0.3, 100.0), (0.9, 0.1), (0.6, math.inf)])
def test_amdahl_is_two_clocks_added(lesson, share, faster):
    """A step of 10 s, of which the products take less time or more."""
    seconds = 10 * (1 - share) + (0 if faster == math.inf else 10 * share / faster)
    assert lesson.amdahl(share, faster) == pytest.approx(10 / seconds)
