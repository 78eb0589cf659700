"""Bytes that tensors hold while a block runs, now and at the peak, on a CPU too."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from amp_utils.modes import Transparent, tensors

_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys([torch.sparse_csr, torch.sparse_bsr], _ROWS),
    **dict.fromkeys([torch.sparse_csc, torch.sparse_bsc], _COLUMNS),
}


def watch() -> AbstractContextManager["Memory"]:
    """Count the storages of the tensors made inside the block, each once, until it is freed.

    >>> with watch() as memory:
    ...     a = torch.zeros(1000)
    ...     b = a.view(10, 100) + 1
    ...     del a
    >>> memory.live, memory.peak
    (4000, 8000)

    Views count nothing, and neither does a kernel's workspace. A compiled function runs eagerly.
    Watching costs time: never read a clock inside the block.
    """
    return Memory().block()


class Memory(Transparent):
    """Bytes: `live` now, and at the `peak`."""

    live = peak = 0

    def __init__(self) -> None:
        super().__init__()
        self._known = weakref.WeakSet()

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result, _ = self.run(func, types, args, kwargs or {})
        self._known.update(_storages((args, kwargs)))  # made before the block, if not known yet
        for storage in _storages(result):
            if storage not in self._known:
                self._known.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors(tree):
        if not tensor.is_mkldnn:  # those blocks are opaque
            parts = [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]
            yield from (part.untyped_storage() for part in parts or [tensor])


@contextmanager
def saved(*known: Tensor) -> Iterator[dict[str, int]]:
    """Bytes by kind of what autograd keeps from the block for the backward pass.

    >>> layer, x = torch.nn.Linear(100, 10), torch.zeros(5, 100)
    >>> with saved(*layer.parameters(), x) as kept:
    ...     with torch.autocast("cpu", dtype=torch.bfloat16):
    ...         y = layer(x)
    >>> kept
    {'16-bit activations': 1000}

    Kinds are "32-bit activations" (or as many bits as there are) and "casts of weights". Each
    storage counts once and whole; those of `known` tensors, which exist anyway, do not count.
    """
    kept: dict[str, int] = {}
    counted = {storage._cdata: storage for storage in _storages(known)}  # alive: no address twice

    def keep(tensor: Tensor) -> Tensor:
        for storage in _storages(tensor):
            if storage._cdata not in counted:
                counted[storage._cdata] = storage
                bits = f"{8 * tensor.itemsize}-bit activations"
                kind = "casts of weights" if is_cast_of_parameter(tensor) else bits
                kept[kind] = kept.get(kind, 0) + storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def is_cast_of_parameter(tensor: Tensor) -> bool:
    """Whether this tensor, or what it is a view of, is a leaf's copy in another dtype.

    Its `grad_fn` says so: a conversion, and before that the end of the graph.
    """
    whole = tensor if tensor._base is None else tensor._base
    if whole.grad_fn is None or "ToCopy" not in whole.grad_fn.name():
        return False
    return "AccumulateGrad" in whole.grad_fn.next_functions[0][0].name()


def without_data() -> AbstractContextManager:
    """Tensors made inside have shapes and dtypes but no data; what asks for a value raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode()
