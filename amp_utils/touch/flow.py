"""The dtypes that flow through a model under autocast: measured op by op for `flow.js`."""

import itertools
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from amp_utils import ledger
from amp_utils.modes import tensors
from amp_utils.touch import frame

COLORS = {"f": "#000000", "l": frame.BLUE}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def flow(model: nn.Module, *inputs: Tensor) -> None:
    """Show which dtype each op of ``model(*inputs)`` returns under autocast, to be guessed first.

    The reader chooses device and dtype, and switches autocast off for single ops.
    """
    data = measure(model, *inputs)
    low = {place: propagate(data, place + "bf16") for place in ("cpu", "cuda")}
    first = data["boxes"][0]
    alt = (
        f"{len(data['boxes'])} operations, from {first['label']} to {data['boxes'][-1]['label']}. "
        + " ".join(
            f"With bf16 on {place.upper()}, {row.count('l')} of them return bf16."
            for place, row in low.items()
        )
    )
    frame.show(
        "flow", data, label="Dtypes that flow through a model", alt=alt, still=still(data, low)
    )


def measure(model: nn.Module, *inputs: Tensor) -> dict[str, Any]:
    """The ops of ``model(*inputs)``, and what each returns for every mix of input dtypes.

    `boxes` hold an op's `label`, `op` and `kind`, and the boxes that its floating-point inputs
    come `from` (-1: from outside). `table[kind][device + dtype]` leads from the dtypes of these
    inputs, "f" for float32 and "l" for low, to the output's dtype and the number of casts, such as
    "l3"; its entry "off" is the op with autocast switched off and all inputs in float32. Measured
    by `ledger.record`, for "cuda" by `ledger.on_cuda`. TraceError if `torch.fx` cannot trace it.
    """
    walk = _Walk(fx.symbolic_trace(model))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some mixes are slow, and torch says so
        walk.run(*inputs)
    return {"boxes": walk.boxes, "table": walk.table}


class _Walk(fx.Interpreter):
    """Runs the model in float32 and keeps a box for each node that calculates."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.boxes, self.table, self.come_from = [], {}, {}

    def run_node(self, node: fx.Node) -> Any:
        with ledger.record() as rows:
            result = super().run_node(node)
        given = [n for n in tree_leaves((node.args, node.kwargs)) if isinstance(n, fx.Node)]
        floats = [n for n in given if any(t.is_floating_point() for t in tensors(self.env[n]))]
        sources = [self.come_from[n] for n in floats]
        self.come_from[node] = len(self.boxes) if rows else max(sources, default=-1)
        if rows:
            called, op = node.op == "call_module", rows[0].op
            kind = f"{op} {len(floats)} {len(rows[0].inputs)}"
            if kind not in self.table:
                function = self.fetch_attr(node.target) if called else node.target
                self.table[kind] = _rows(function, *self.fetch_args_kwargs_from_env(node))
            short = op.removeprefix("scaled_dot_product_")
            label = node.target if called else short
            self.boxes.append({"label": label, "op": short, "kind": kind, "from": sources})
        return result


class _Call(nn.Module):
    """A function of tensors, with the parameters that it brings along."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        super().__init__()
        self.function, self.arguments = function, (args, kwargs)

    def forward(self, *given: Tensor) -> Tensor:
        turn = iter(given)
        args, kwargs = tree_map(
            lambda leaf: next(turn) if isinstance(leaf, Tensor) else leaf, self.arguments
        )
        return self.function(*args, **kwargs)


def _rows(function: Callable, args: tuple, kwargs: dict) -> dict[str, dict[str, str]]:
    call, given = _Call(function, args, kwargs), tensors((args, kwargs))
    count = sum(tensor.is_floating_point() for tensor in given)
    mixes = ["".join(mix) for mix in itertools.product("fl", repeat=count)]
    rows = {}
    for device, short in itertools.product(("cpu", "cuda"), LOW):
        cells = {mix: _row(call, given, mix, device, LOW[short]) for mix in mixes}
        off = _row(call, given, "f" * count, device, LOW[short], enabled=False)
        rows[device + short] = cells | {"off": off}
    return rows


def _row(call, given, mix: str, device: str, low: torch.dtype, enabled: bool = True) -> str:
    dtypes = iter({"f": torch.float32, "l": low}[letter] for letter in mix)
    given = [t.to(next(dtypes)) if t.is_floating_point() else t for t in given]
    if device == "cuda":
        rows = ledger.on_cuda(call, *given, dtype=low, region=None if enabled else nullcontext())
    else:
        with ledger.record() as rows, torch.autocast("cpu", low, enabled=enabled):
            call(*given)
    (row,) = rows
    return ("l" if row.output == low else "f") + str(len(row.casts))


def propagate(data: dict[str, Any], where: str) -> str:
    """The dtype of each box's result, "f" or "l", with autocast on everywhere."""
    results = ""
    for box in data["boxes"]:
        given = "".join(results[source] if source >= 0 else "f" for source in box["from"])
        results += data["table"][box["kind"]][where][given][0]
    return results


def still(data: dict[str, Any], low: dict[str, str]) -> str:
    """A row for each op, with the dtype of its result on a CPU and on CUDA."""
    parts = [frame.text(x, 22, place) for x, place in ((190, "CPU"), (270, "CUDA"))]
    for i, box in enumerate(data["boxes"]):
        parts.append(frame.text(12, 46 + 22 * i, box["label"]))
        for x, row in zip((190, 270), low.values(), strict=True):
            words = "bf16" if row[i] == "l" else "fp32"
            parts.append(frame.path(f"M{x} {41 + 22 * i}h12", COLORS[row[i]], 12))
            parts.append(frame.text(x + 18, 46 + 22 * i, words))
    return frame.drawing(360, 46 + 22 * len(data["boxes"]), *parts)
