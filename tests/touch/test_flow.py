"""The dtypes that flow are those of torch.autocast, in whatever boxes it is switched off."""

import random
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from support.figures import html
from torch import nn

from amp_utils import ledger, touch

figure = import_module("amp_utils.touch.flow")
full = pytest.mark.full


class Block(nn.Module):
    """A small transformer block; `regions[i]` is the region of the op that runs as number i."""

    def __init__(self, regions=None):
        super().__init__()
        self.regions = regions
        self.embedding, self.norm = nn.Embedding(8, 4), nn.LayerNorm(4)
        self.qkv, self.project = nn.Linear(4, 12), nn.Linear(4, 4)
        self.up, self.head = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, tokens):
        turn = iter(self.regions or [])

        def op(function, *inputs, **kwargs):
            """Under autocast; or, where it is switched off, on widened inputs."""
            if not self.regions or (off := next(turn)) is None:
                return function(*inputs, **kwargs)
            with off:
                inputs = [t.float() if t.is_floating_point() else t for t in inputs]
                return function(*inputs, **kwargs)

        x = op(self.embedding, tokens)
        query, key, value = op(self.qkv, op(self.norm, x)).chunk(3, dim=-1)
        key = op(F.rms_norm, key, normalized_shape=(4,))
        mixed = op(F.scaled_dot_product_attention, query, key, value, is_causal=True)
        x = op(torch.add, x, op(self.project, mixed))
        x = op(torch.softmax, op(F.silu, op(self.up, x)), dim=-1)
        return op(self.head, x)


def off_region(device: str) -> torch.autocast:
    return torch.autocast(device, enabled=False)


@full
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("short", ["bf16", "fp16"])
def test_any_boxes_switched_off_the_dtypes_are_those_of_a_real_run(arithmetic, device, short):
    data = figure.measure(Block(), tokens := torch.arange(8).reshape(1, 8))
    count, low, run = len(data["boxes"]), figure.LOW[short], arithmetic("flow")
    offs = [[], *([i] for i in range(count)), *([*random_subset(count)] for _ in range(40))]
    flowed = run(
        "given[0].map(off => propagate(given[1], given[2], off))", [offs, data, device + short]
    )
    for off, results in zip(offs, flowed, strict=True):
        block = Block([off_region(device) if i in off else None for i in range(count)])
        if device == "cuda":
            rows = ledger.on_cuda(block, tokens, dtype=low)
        else:
            with ledger.record() as rows, torch.autocast("cpu", low):
                block(tokens)
        rows = [row for row in rows if row.op != "float"]
        torchs = [{"low": row.output == low, "casts": len(row.casts)} for row in rows]
        assert results == torchs, off


def random_subset(count: int) -> list[int]:
    return random.sample(range(count), random.randint(2, count))


@full
def test_every_row_of_the_table_is_python_s(arithmetic):
    data = figure.measure(Block(), torch.arange(8).reshape(1, 8))
    run = arithmetic("flow")
    looked = 0
    for kind, places in data["table"].items():
        for where, cells in places.items():
            for mix, cell in cells.items():
                # A box for each input, and behind them the one in question.
                inputs = "" if mix == "off" else mix
                known = {f"is {letter}": {where: {"": f"{letter}0"}} for letter in "fl"}
                boxes = [{"kind": f"is {letter}", "from": []} for letter in inputs]
                boxes.append({"kind": kind, "from": [*range(len(inputs))]})
                off = [0] if mix == "off" else []
                given = [{"boxes": boxes, "table": data["table"] | known}, where, off]
                got = run("propagate(...given).at(-1)", given)
                assert got == {"low": cell[0] == "l", "casts": int(cell[1:])}, (kind, where, mix)
                looked += 1
    assert looked > 100


@full
def test_each_kind_agrees_with_the_policy_of_its_op():
    """A box's row says what `ledger.policy` says of the op."""
    data = figure.measure(Block(), torch.arange(8).reshape(1, 8))
    square = torch.rand(4, 4)
    ops = {
        "linear 1 3": (F.linear, square, square),
        "softmax 1 1": (torch.softmax, square, 1),
        "silu 1 1": (F.silu, square),
        "layer_norm 1 3": (F.layer_norm, square, (4,)),
    }
    for kind, (op, *args) in ops.items():
        for device in ("cpu", "cuda"):
            cells = data["table"][kind][device + "bf16"]
            policy = ledger.policy(op, *args, device=device, dtype=torch.bfloat16)
            meant = {"lower_precision": ["l", "l"], "fp32": ["f", "f"], "passthrough": ["f", "l"]}
            assert [cells["f"][0], cells["l"][0]] == meant[policy], (kind, device)


@full
def test_guess_show_and_switch_off_by_keyboard_alone(opened):
    page = opened(html(lambda: touch.flow(Block(), torch.arange(8).reshape(1, 8))))
    said = page.get_by_role("status")
    page.get_by_role("button", name="embedding returns fp32").press("Enter")
    page.get_by_role("button", name="norm returns bf16", exact=True).press("Space")
    assert said.inner_text() == "1 of 2 guesses are right."
    page.get_by_role("button", name="Show all").press("Enter")
    page.get_by_role("button", name="enabled=False for qkv").press("Enter")
    assert "With enabled=False in 1 of 11 boxes, 2 results changed dtype." in said.inner_text()
    page.get_by_role("combobox", name="device").select_option("cuda")
    assert "With enabled=False in 1 of 11 boxes, 1 result changed dtype." in said.inner_text()
