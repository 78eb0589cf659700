"""Run a lesson as `gpu` does, then its networks on fake CUDA tensors: arguments LESSON OUT JSON.

Each question's cells run twice, as they do for somebody who guesses and then runs them again.
Prints one JSON object: the lesson's `error`, how many questions were `asked` twice, those that
`changed` their answer or failed the second time, how many networks were `tried`, those that
stopped because a tensor was left on the CPU (`strays`), and those that need a real GPU (`unknown`).
"""

import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_map

from amp_utils import ledger
from amp_utils.course import cells

STRAY = re.compile("same device|different devices|Device Propagation")


class Watch:
    """Keeps every network that is called from outside of another one, with its inputs' shapes."""

    def __init__(self) -> None:
        self.inside, self.networks = [], {}

    def enter(self, network, inputs) -> None:
        if torch.compiler.is_compiling():  # the outermost network has been noted before
            return
        if not self.inside:
            tensors = [*inputs, *network.parameters()]
            shapes = [tuple(t.shape) for t in tensors if isinstance(t, torch.Tensor)]
            self.networks.setdefault((type(network), *shapes), (network, tree_map(empty, inputs)))
        self.inside.append(network)

    def leave(self, network, *_) -> None:
        if torch.compiler.is_compiling():
            return
        while self.inside and self.inside.pop() is not network:  # those that raised
            continue


class Again:
    """An `after` for `cells.run`: once a question is answered, its cells run a second time."""

    def __init__(self) -> None:
        self.question, self.changed, self.asked = [], [], 0

    def __call__(self, cell: Mapping[str, Any], namespace: dict[str, Any]) -> None:
        source = "".join(cell["source"])
        if "guess" in cell["metadata"].get("tags", []):
            namespace[source.split()[0]] = ...  # asks for the answer
            self.question = [source]
            return
        if not self.question:
            return
        self.question.append(source)
        if "lesson.predict(" in source:
            name, *sources = self.question
            self.question, self.asked = [], self.asked + 1
            outputs = [cells.execute(again, f"<again {name}>", namespace) for again in sources]
            failed = [o for some in outputs for o in some if o["output_type"] == "error"]
            here = cell["metadata"].get("tags", [])
            same = "nbval-ignore-output" in here or answers(cell["outputs"]) == answers(outputs[-1])
            if failed or not same:
                self.changed.append(f"{name}: {failed or answers(outputs[-1])}")


def answers(outputs: list[dict[str, Any]]) -> list[str]:
    lines = "".join(o.get("text", "") for o in outputs).splitlines()
    return [line for line in lines if line.startswith("measured: ")]


def empty(value):
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def main(lesson: str, out: str, parameters: str) -> None:
    path, watch, again = Path(lesson).resolve(), Watch(), Again()
    before = hooks.register_module_forward_pre_hook(watch.enter)
    after = hooks.register_module_forward_hook(watch.leave)
    os.chdir(path.parent)
    notebook = cells.run(path, Path(out), json.loads(parameters), again)
    before.remove()
    after.remove()
    strays, unknown = [], []
    for network, inputs in watch.networks.values():
        try:
            ledger.on_cuda(network.eval(), *inputs)  # batch norm trains on a real GPU only
        except Exception as error:  # anything that this build cannot do without a GPU
            text = f"{type(network).__name__}: {type(error).__name__}: {error}".splitlines()[0]
            (strays if STRAY.search(str(error)) else unknown).append(text)
    error, tried = notebook["metadata"]["amp_utils"]["error"], len(watch.networks)
    result = {"error": error, "asked": again.asked, "changed": again.changed, "tried": tried}
    print(json.dumps(result | {"strays": strays, "unknown": unknown}))


if __name__ == "__main__":
    main(*sys.argv[1:])
