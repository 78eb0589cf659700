"""Bytes that tensors hold while a block runs, now and at the peak, on a CPU too."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

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


def without_data() -> AbstractContextManager:
    """Tensors made inside have shapes and dtypes but no data; what asks for a value raises."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode()
