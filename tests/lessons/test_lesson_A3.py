"""The functions that appendix A3 defines, against torch's broadcasting and gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.each import each
from torch import nn

from amp_utils.course.notebook import ROOT, load, read

X = torch.linspace(-1, 1, 64).unsqueeze(1)
SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@pytest.fixture(scope="module")
def lesson():
    return load("A3", device=torch.device("cpu"), x=X, seed=5, steps=60)


@each("sizes", [(1, 1, 1, 1, 1), (5, 3, 5, 6, 10), (2, 7, 8, 1, 3)])
def test_merge_is_tile_and_concat_once_the_weights_are_shared(lesson, sizes):
    n, length, a_features, b_features, out = sizes
    torch.manual_seed(0)
    a, b = torch.randn(n, length, a_features), torch.randn(n, 1, b_features)
    joint, merge = (
        nn.Linear(a_features + b_features, out),
        lesson.Merge(a_features, b_features, out),
    )
    expected = (
        torch.einsum("nlf,of->nlo", torch.cat([a, b.expand(n, length, -1)], 2), joint.weight)
        + joint.bias
    )
    torch.testing.assert_close(lesson.tile_and_concat(joint, a, b), expected.clamp(min=0))
    before = merge(a, b)
    lesson.share(joint, merge)
    torch.testing.assert_close(merge(a, b), expected.clamp(min=0))
    assert out == 1 or not torch.allclose(before, merge(a, b))


@each("seed", range(2))
def test_a_missing_dimension_makes_the_fit_learn_the_mean(lesson, monkeypatch, seed):
    monkeypatch.setattr(lesson, "seed", seed)
    y = (5 * X + 3).squeeze(1)
    wrong, wrong_losses = lesson.fit_line(y)
    right, right_losses = lesson.fit_line(y.unsqueeze(1))
    assert abs(wrong.weight.item()) < 0.2 and abs(wrong.bias.item() - 3) < 0.2
    assert wrong_losses[-1] == pytest.approx(y.var(unbiased=False).item(), rel=0.05)
    assert abs(right.weight.item() - 5) < 0.2 and right_losses[-1] < 0.02


@settings(max_examples=300)
@given(SHAPES, SHAPES)
def test_matched_is_torchs_rule(lesson, first, second):
    try:
        expected = tuple(torch.broadcast_shapes(first, second))
    except RuntimeError:
        with pytest.raises(ValueError):
            lesson.matched(first, second)
    else:
        assert lesson.matched(first, second) == expected


@each("seed", range(3))
def test_learn_scores_finds_the_scores_of_the_words(lesson, seed):
    generator = torch.Generator().manual_seed(seed)
    counts = torch.rand(4, 4, generator=generator) + 9 * torch.eye(4)
    scores = torch.randn(4, generator=generator)
    target = (counts / counts.sum(dim=1, keepdim=True)) @ scores
    torch.testing.assert_close(
        lesson.learn_scores(counts, target).flatten(), scores, atol=1e-3, rtol=0
    )


@settings(max_examples=100)
@given(st.lists(st.integers(1, 3), max_size=4), st.data())
def test_unbroadcast_is_autograds_way_back(lesson, full, data):
    kept = full[data.draw(st.integers(0, len(full))) :]
    shape = [data.draw(st.sampled_from([1, size])) for size in kept]
    small = torch.zeros(shape, requires_grad=True)
    gradient = torch.arange(float(torch.Size(full).numel())).reshape(full)
    small.expand(full).backward(gradient)
    result = lesson.unbroadcast(gradient.half(), tuple(shape))
    assert result.dtype == torch.float32 and result.equal(small.grad)


def learner(shares: str, difference: str) -> str:
    """The training of exercise 2 with these two lines, as a learner may leave them."""
    return f"""def learn_scores(counts, target):
            shares = {shares}
            scores = torch.zeros(4, 1, requires_grad=True)
            optimizer = torch.optim.SGD([scores], lr=1.0)
            for _ in range(500):
                loss = ({difference}).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return scores.detach()"""


KEPT, DROPPED = "counts / counts.sum(1, keepdim=True)", "counts / counts.sum(1)"
COLUMN, VECTOR = "shares @ scores - target[:, None]", "shares @ scores - target"

CHEATS = [  # what an exercise rules out, and what its check says
    ("cA3-54", learner(DROPPED, VECTOR), "both mistakes are left"),
    ("cA3-54", learner(DROPPED, COLUMN), "the loss is right, but the rows of shares"),
    ("cA3-54", learner(KEPT, VECTOR), "the shares are right, but the loss compares"),
    (
        "cA3-54",
        "def learn_scores(counts, target): return torch.zeros(4)",
        "the scores are [0.0, 0.0, 0.0, 0.0], not [1, 2, 3, 4]",
    ),
    (
        "cA3-59",
        "def unbroadcast(gradient, shape): return gradient.float().sum_to_size(shape)",
        "add up yourself, without sum_to_size and without autograd",
    ),
    (
        "cA3-59",
        """def unbroadcast(gradient, shape):
            small = torch.zeros(shape, requires_grad=True)
            small.expand(gradient.shape).backward(gradient.float())
            return small.grad""",
        "add up yourself, without sum_to_size and without autograd",
    ),
]


@each("check, cheat, said", CHEATS)
def test_a_check_refuses_what_its_exercise_rules_out(capsys, check, cheat, said):
    (source,) = [
        cell.source
        for cell in read(ROOT / "notebooks/A3_broadcasting.ipynb").cells
        if cell.id == check
    ]
    space = vars(load("A3"))
    exec(cheat, space)
    exec(source, space)
    assert capsys.readouterr().out.startswith(f"✗ not yet: {said}")
