"""The functions that lesson 3 defines."""

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from torch import nn

from amp_utils import ledger
from amp_utils.course.notebook import load

LOW, WIDE = "lower_precision", "fp32"
RULES = {
    "linear": LOW,
    "matmul": LOW,
    "scaled_dot_product_attention": LOW,
    "cross_entropy": WIDE,
    "mse_loss": WIDE,
}


@pytest.fixture(scope="module")
def lesson():
    rules = {"cpu": RULES, "cuda": RULES | {"rms_norm": WIDE}}
    return load("03", device=torch.device("cpu"), low=torch.bfloat16, steps=5, RULES=rules)


@pytest.fixture
def block(lesson):
    torch.manual_seed(0)
    return lesson.Block(), torch.randint(32, (2, 8))


def dtypes(rows):
    return [(row.op, row.ran_in, row.output) for row in rows]


@each("name", ["my_autocast", "my_cached_autocast"])
@each("dtype", [torch.bfloat16, torch.float16])
def test_my_autocast_is_torchs_on_the_cpu_to_the_last_bit(lesson, block, dtype, name):
    (model, tokens), region = block, getattr(lesson, name)
    with torch.autocast("cpu", dtype=dtype), ledger.record() as theirs:
        logits = model(tokens)
    with region("cpu", dtype), ledger.record() as mine:
        own = model(tokens)
    assert torch.equal(own, logits)
    assert dtypes(mine) == dtypes(theirs)

    def losses(around):
        torch.manual_seed(1)
        return lesson.train(lesson.Block(), tokens, tokens.flatten(), around)

    torchs = losses(torch.autocast("cpu", dtype=dtype))
    assert losses(region("cpu", dtype)) == torchs and len({*torchs}) == 5


def test_my_autocast_is_torchs_under_the_rules_of_cuda(lesson, block):
    theirs = ledger.on_cuda(*block)
    assert dtypes(ledger.on_cuda(*block, region=lesson.my_autocast("cuda", torch.float16))) == (
        dtypes(theirs)
    )


@each("name", ["my_autocast", "my_cached_autocast"])
def test_my_autocast_nests_and_spares_what_no_rule_names(lesson, name):
    mine, x, double = getattr(lesson, name), torch.ones(2, 2), torch.ones(2, 2).double()
    with mine("cpu", torch.float16):
        assert (x @ x).dtype == torch.float16 and (x + x).dtype == torch.float32
        assert F.linear(input=x, weight=x).dtype == torch.float16
        assert (double @ double).dtype == torch.float64
        with mine("cpu", enabled=False):
            assert (x @ x).dtype == torch.float32
        with mine("cpu", torch.bfloat16):
            assert (x @ x).dtype == torch.bfloat16
    assert (x @ x).dtype == torch.float32


def test_my_cached_autocast_casts_a_weight_once_in_a_region_and_anew_in_the_next(lesson):
    torch.manual_seed(0)
    x, layer, region = torch.randn(2, 4), nn.Linear(4, 4), lesson.my_cached_autocast("cpu")
    with region:
        with torch.no_grad():
            before = layer(x)
        layer.weight.data.zero_()
        assert torch.equal(layer(x), before)
        layer(x).sum().backward()  # a copy made under no_grad leads back to the weight
    assert layer.weight.grad is not None
    with region:
        assert not torch.equal(layer(x), before)


def test_one_region_around_the_loop_repeats_the_first_loss(lesson):
    torch.manual_seed(0)
    x, labels, model = torch.randn(8, 8), torch.arange(8), nn.Linear(8, 8)
    region = torch.autocast("cpu", dtype=torch.bfloat16)
    assert len({*lesson.train(model, x, labels, torch.enable_grad(), region)}) == 1
    assert len({*lesson.train(model, x, labels, region)}) == 5


def test_angles_keep_positions_apart_in_any_region(lesson):
    positions, frequencies = torch.arange(4096.0), torch.tensor([1.0, 0.1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        angles = lesson.angles(positions, frequencies)
    torch.testing.assert_close(angles, torch.outer(positions, frequencies))


def test_angles_keep_float32_under_the_rules_of_cuda(lesson):
    model = nn.Module()
    model.forward = lesson.angles
    *_, last = ledger.on_cuda(model, torch.arange(8.0), torch.ones(2))
    assert last.output == torch.float32
