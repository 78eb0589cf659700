"""The functions that lesson 16 defines."""

import math

import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load

TEXT = "To be, or not to be, that is the question. " * 40


@pytest.fixture
def lesson():
    alphabet = sorted({*TEXT, "\n"})
    token_of = {character: token for token, character in enumerate(alphabet)}
    tokens = torch.tensor([token_of[character] for character in TEXT])
    given = {"alphabet": alphabet, "token_of": token_of, "learned": tokens, "unseen": tokens}
    given |= {"device": torch.device("cpu"), "on_cpu": True, "layers": 2, "context": 16, "seed": 0}
    given |= {"head_size": 16, "LOW": "lower_precision", "WIDE": "fp32"}
    rules = {"linear": "lower_precision", "scaled_dot_product_attention": "lower_precision"}
    given["RULES"] = {"cpu": rules | {"cross_entropy": "fp32"}}
    given |= {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    given["DTYPES"] = {name: given[name] for name in ("fp32", "bf16", "fp16")}
    given["no_scaler"] = torch.amp.GradScaler("cpu", enabled=False)
    return load("16", **given, width=64, batch=4, race_steps=4)


@pytest.fixture
def pieces(lesson):
    return lesson.draw(lesson.learned, 4, 16, torch.Generator().manual_seed(0))


def awake(lesson):
    """A model without the zeros of a new one, so that attention and head have a say."""
    net = lesson.new_net(32, 0)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return net


def seen_losses(lesson, pieces, step, scaler, steps=10, **settings):
    net = lesson.new_net(32, 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    return [step(net, optimizer, scaler, pieces, **settings).item() for _ in range(steps)], net


def test_targets_are_the_text_one_character_further_on(lesson, pieces):
    x, y = pieces
    assert x.shape == y.shape == (4, 16) and torch.equal(x[:, 1:], y[:, :-1])


def test_the_model_does_not_see_the_future(lesson, pieces):
    net, (x, _) = awake(lesson), pieces
    other = x.clone()
    other[:, 9:] = (x[:, 9:] + 1) % len(lesson.alphabet)
    a, b = net(x), net(other)
    torch.testing.assert_close(a[:, :9], b[:, :9])
    assert (a[:, 9] - b[:, 9]).abs().max() > 0.1


@each("start", [0, 5])
def test_rope_turns_each_pair_by_position_times_frequency(lesson, start):
    x = torch.randn(3, 8)
    turned = torch.view_as_complex(torch.stack(lesson.rope(x, start).chunk(2, -1), -1))
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
    angles = (start + torch.arange(3.0))[:, None] * 10_000 ** -(torch.arange(4) / 4)
    torch.testing.assert_close(turned, pairs * torch.polar(torch.ones(3, 4), angles))


@each("name", ["bf16", "fp16"])
def test_your_step_gives_torchs_losses_and_weights(lesson, pieces, name):
    def torchs(net, optimizer, scaler, pieces, low):
        return lesson.torchs_step(net, optimizer, scaler, *pieces, low)

    def mine(net, optimizer, scaler, pieces, low):
        return lesson.my_step(net, optimizer, scaler, [pieces], low)

    low, scale = lesson.DTYPES[name], 2.0**40  # overflows in fp16: both must skip
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    theirs, their_net = seen_losses(lesson, pieces, torchs, scaler, low=low)
    ours, our_net = seen_losses(lesson, pieces, mine, lesson.MyScaler(scale), low=low)
    assert theirs == ours
    assert all(map(torch.equal, their_net.parameters(), our_net.parameters()))


def test_stochastic_rounding_keeps_every_bf16_number_and_the_mean(lesson):
    torch.manual_seed(0)
    exact = torch.arange(1 << 15, dtype=torch.int32).mul(1 << 16).view(torch.float32)
    exact = torch.cat([exact, -exact])[torch.cat([exact, exact]).isfinite()]
    assert torch.equal(lesson.stochastic(exact), exact)
    x = torch.full((100_000,), 1 + 2**-9)  # a quarter of the way to the next
    up = (lesson.stochastic(x) > 1).double().mean().item()
    assert up == pytest.approx(0.25, abs=0.01)


def test_a_run_with_bf16_weights_holds_nothing_but_bf16_numbers(lesson):
    lesson.race.__globals__["unseen_loss"] = lambda net, count: 0.0
    runs = []
    for how in ({}, {"rounding": lesson.nearest}, {"rounding": lesson.stochastic}):
        runs.append(lesson.race(0, low=torch.bfloat16, **how))
        assert all(math.isfinite(loss) for loss in runs[-1].losses)
    nets = [list(run.net.parameters()) for run in runs]
    narrow = [all(torch.equal(p, p.bfloat16().float()) for p in net) for net in nets]
    assert narrow == [False, True, True]


def test_a_nudge_changes_each_weight_by_about_a_millionth(lesson):
    exact, nudged = lesson.new_net(64, 0), lesson.nudge(lesson.new_net(64, 0), 1)
    for before, after in zip(exact.parameters(), nudged.parameters(), strict=True):
        off = (after - before).norm() / before.norm().clamp(min=1e-9)
        assert off == 0 if not before.any() else 5e-7 < off < 2e-6
    others = [lesson.nudge(lesson.new_net(64, 0), number) for number in (1, 2)]
    assert not torch.equal(*(next(other.parameters()) for other in others))


def test_the_nudged_lane_is_float32_from_another_start(lesson):
    lesson.race.__globals__["unseen_loss"] = lambda net, count: 0.0
    exact, nudged = (lesson.race(0, nudged=nudged) for nudged in (False, True))
    pairs = list(zip(exact.net.parameters(), nudged.net.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2)


def test_large_values_and_late_positions_change_nothing_in_float32_and_much_in_fp16(lesson, pieces):
    net, (x, _) = awake(lesson), pieces
    lesson.in_16_bits.__globals__["trained"] = net
    exact = net(x)
    for part, patch in lesson.in_16_bits(torch.float32, 32, 4000).items():
        with patch:
            off = (net(x) - exact).abs().max()
        assert off < 0.02, part
    for part in ("norm", "scores", "positions"):
        with lesson.in_16_bits(torch.float16, 10_000, 4000)[part]:
            off = (net(x) - exact).abs().max()
        assert not off < 0.1, part
    assert torch.equal(net(x), exact), "the patches are gone again"


@each("low", [torch.float16, torch.bfloat16])
def test_safe_parts_survive_what_breaks_naive_ones(lesson, low):
    x = torch.full((2, 64), 300.0).to(low)
    torch.testing.assert_close(lesson.safe_norm(x), torch.ones_like(x), rtol=0, atol=0.01)
    scores = lesson.safe_scores(x, x, 1000.0)
    torch.testing.assert_close(scores, torch.full((2, 2), 5760.0).to(low), rtol=0.01, atol=0)
    assert not lesson.safe_norm(0 * x).any()
    if low == torch.float16:
        assert not lesson.naive_norm(x).any() and lesson.naive_scores(x, x, 1000.0).isinf().all()


@each("dtype", [torch.float16, torch.bfloat16])
def test_safe_parts_mend_the_model(lesson, pieces, dtype):
    net, (x, _) = awake(lesson), pieces
    lesson.in_16_bits.__globals__["trained"] = net
    exact, safe = net(x), (lesson.safe_scores, lesson.safe_norm)
    for part in ("norm", "scores"):
        with lesson.in_16_bits(dtype, 32, 4000, *safe)[part]:
            off = (net(x) - exact).abs().max()
        assert off < (0.1 if dtype == torch.float16 else 1), part


def test_a_cache_in_float32_changes_nothing(lesson, pieces):
    net, lines = awake(lesson), pieces[0]
    cached = lesson.cached_logits(net, lines, torch.float32)
    torch.testing.assert_close(cached, net(lines), rtol=1e-3, atol=1e-3)


@each(
    "way, bytes_per_parameter",
    [((torch.float32, None), [4, 0, 4, 8]), ((torch.bfloat16, None), [2, 0, 2, 4])],
)
def test_the_bytes_of_each_kind(lesson, pieces, way, bytes_per_parameter):
    held = lesson.held
    held.__globals__.update(x=pieces[0], y=pieces[1])
    held.__globals__["parameters"] = sum(p.numel() for p in lesson.new_net(64, 0).parameters())
    *kinds, _ = held(*way)
    assert kinds == bytes_per_parameter


def test_autocast_copies_weights_and_saves_what_waits_for_the_backward_pass(lesson):
    pieces = lesson.draw(lesson.learned, 32, 16, torch.Generator().manual_seed(0))
    lesson.held.__globals__.update(x=pieces[0], y=pieces[1], parameters=1)
    fp32, bf16 = (lesson.held(torch.float32, low) for low in (None, torch.bfloat16))
    net = lesson.new_net(64, 0)
    copied = sum(p.numel() for p in net.parameters()) - net.embedding.weight.numel()
    assert bf16[1] == 2 * copied and [*fp32[:1], *fp32[2:4]] == [*bf16[:1], *bf16[2:4]]
    assert 0.5 < bf16[4] / fp32[4] < 0.8
