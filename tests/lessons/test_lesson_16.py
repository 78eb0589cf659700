"""The functions that lesson 16 defines."""

import math

import pytest
import torch
from support.each import each

from amp_utils.course import ROOT
from amp_utils.course.notebook import cells, choose, load

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


def test_rope_turns_each_pair_by_position_times_frequency(lesson):
    x = torch.randn(3, 8)
    turned = torch.view_as_complex(torch.stack(lesson.rope(x).chunk(2, -1), -1))
    pairs = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1))
    angles = torch.arange(3.0)[:, None] * 10_000 ** -(torch.arange(4) / 4)
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
    ways = None, lesson.nearest, lesson.stochastic, lesson.Remembering()
    for way in ways:
        runs.append(lesson.race(0, low=torch.bfloat16, rounding=way))
        assert all(math.isfinite(loss) for loss in runs[-1].losses)
    nets = [list(run.net.parameters()) for run in runs]
    narrow = [all(torch.equal(p, p.bfloat16().float()) for p in net) for net in nets]
    assert narrow == [False, True, True, True]


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


def test_naive_parts_overflow_in_float16_and_not_in_float32(lesson):
    x = torch.full((2, 64), 300.0)
    torch.testing.assert_close(lesson.naive_norm(x), torch.ones_like(x))
    torch.testing.assert_close(lesson.naive_scores(x, x, 1000.0), torch.full((2, 2), 5760.0))
    x = x.half()
    assert not lesson.naive_norm(x).any() and lesson.naive_scores(x, x, 1000.0).isinf().all()


def test_what_remembering_keeps_is_the_rest_of_a_float32_weight(lesson):
    torch.manual_seed(0)
    rounding = lesson.Remembering()
    weights = [torch.randn(50).bfloat16().float() for _ in range(2)]
    exact = [weight.clone() for weight in weights]
    for _ in range(300):
        for weight, right in zip(weights, exact, strict=True):
            move = 1e-4 * torch.randn(50)
            right.add_(move)
            weight.add_(move).copy_(rounding(weight))
    for weight, right in zip(weights, exact, strict=True):
        assert torch.equal(weight, weight.bfloat16().float())
        torch.testing.assert_close(weight + rounding.lost[weight], right, rtol=0, atol=1e-5)


MISTAKES = [  # what somebody may write in exercise 2, and what the check says
    ("weight + self.lost.get(weight, 0)", "weight", "is still 1"),
    ("[weight] = wanted - rounded", "[weight] = weight - rounded", "is still 1"),
    ("[weight] = wanted - rounded", "[weight] = rounded - wanted", "is still 1"),
    ("[weight] = wanted - rounded", "[weight] = 2 * (wanted - rounded)", "not near"),
    ("weight]", "0]", "whose bits are these?"),
    ("return rounded", "return wanted", "is no bf16 number"),
    ("return rounded", "return rounded.bfloat16()", "not float32"),
    ("return rounded", "pass", "returns nothing"),
    ("return rounded", "return rounded", "✓ correct"),
    ("weight]", "id(weight)]", "✓ correct"),
]


@each("line, instead, said", MISTAKES)
def test_the_check_of_the_lost_bits_names_the_mistake(lesson, capsys, line, instead, said):
    sources = {cell.id: cell.source for cell in cells(choose(["16"], ROOT / "notebooks")[0])}
    solution = sources["slm-101"].split("\n\n\ncheck")[0]
    assert line in solution
    if line == "weight]":
        solution = solution.replace("get(weight,", f"get({instead[:-1]},")
    exec(solution.replace(line, instead), vars(lesson))
    exec(sources["slm-99"], vars(lesson))
    assert said in capsys.readouterr().out


def a_real_cache(net, lines, dtype, lesson):
    """The logits of `net`, read one column at a time; each block keeps keys and values."""
    caches, read = [([], []) for _ in net.blocks], []
    for t in range(lines.shape[1]):
        x = lesson.norm(net.embedding(lines[:, t : t + 1]))
        for block, (keys, values) in zip(net.blocks, caches, strict=True):
            pieces = block.qkv(lesson.norm(x)).unflatten(-1, (3, block.heads, -1))
            q, k, v = pieces.permute(2, 0, 3, 1, 4)
            before = torch.zeros_like(q).expand(-1, -1, t, -1)
            q, k = (lesson.rope(torch.cat([before, part], 2))[:, :, -1:] for part in (q, k))
            keys.append(k.to(dtype))
            values.append(v.to(dtype))
            k, v = (torch.cat(kept, 2).float() for kept in (keys, values))
            found = torch.nn.functional.scaled_dot_product_attention(q, k, v)
            x = x + block.mixed(found.transpose(1, 2).flatten(2))
            x = x + block.down(block.up(lesson.norm(x)).relu().square())
        read.append(net.logits(x))
    return torch.cat(read, dim=1)


@each("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rounding_in_attention_is_what_a_cache_does(lesson, pieces, dtype):
    net, lines = awake(lesson), pieces[0]
    exact, cached = net(lines), lesson.cached_logits(net, lines, dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(cached, exact, rtol=1e-3, atol=1e-3)
    else:
        assert (cached - exact).abs().max() > 1e-3
    off = (cached - a_real_cache(net, lines, dtype, lesson)).abs().max()
    assert off <= 1e-3 + 0.2 * (cached - exact).abs().max()


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
