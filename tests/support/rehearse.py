"""Run a lesson as `gpu` does, then its networks on fake CUDA tensors: arguments LESSON OUT JSON.

Prints one JSON object: the lesson's `error`, how many networks were `tried`, those that stopped
because a tensor was left on the CPU (`strays`), and those that need a real GPU (`unknown`).
"""

import json
import os
import re
import sys
from pathlib import Path

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


def empty(value):
    return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value


def main(lesson: str, out: str, parameters: str) -> None:
    path, watch = Path(lesson).resolve(), Watch()
    before = hooks.register_module_forward_pre_hook(watch.enter)
    after = hooks.register_module_forward_hook(watch.leave)
    os.chdir(path.parent)
    notebook = cells.run(path, Path(out), json.loads(parameters), lambda *_: None)
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
    print(json.dumps({"error": error, "tried": tried, "strays": strays, "unknown": unknown}))


if __name__ == "__main__":
    main(*sys.argv[1:])
