"""Bytes that tensors hold while a block runs, now and at the peak, on a CPU too."""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from amp_utils.modes import Transparent, tensors

_ROWS, _COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys([torch.sparse_csr, torch.sparse_bsr], (*_ROWS, "values")),
    **dict.fromkeys([torch.sparse_csc, torch.sparse_bsc], (*_COLUMNS, "values")),
}


class watch(Transparent):
    """Counts the storages of the tensors made inside the block, each once, until it is freed.

    >>> with watch() as memory:
    ...     a = torch.zeros(1000)
    ...     b = a.view(10, 100) + 1
    ...     del a
    >>> memory.live, memory.peak
    (4000, 8000)

    `live` and `peak` are bytes. Views count nothing, and neither does what a kernel takes and gives
    back inside one operation, such as a BLAS library's workspace. A compiled function runs eagerly.
    Watching costs time: never read a clock inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result, _ = self.run(func, types, args, kwargs or {})
        # What an op gets was made before the block, unless it was noted when it was made.
        known = {id(storage) for storage in _storages((args, kwargs))}
        for storage in _storages(result):
            if id(storage) not in known:
                self._note(storage)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._storages and self._storages[key]() is storage:
            return

        def freed(_: weakref.ref) -> None:
            self.live -= size

        self._storages[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for tensor in tensors(tree):
        if not tensor.is_mkldnn:  # those blocks are opaque
            parts = [getattr(tensor, part)() for part in _PARTS.get(tensor.layout, ())]
            yield from (part.untyped_storage() for part in parts or [tensor])


def without_data() -> AbstractContextManager:
    """Tensors made inside have shapes and dtypes but no data: any network "runs" anywhere.

    torch's fake tensors, on the CPU; meant for `watch` and for dtypes. What asks for a value
    (`item`, `if`) raises.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    return FakeTensorMode()
