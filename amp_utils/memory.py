"""Bytes that tensors hold while a block runs: live now, and at the peak; on a CPU too, and for tensors without data."""

import weakref
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class watch(TorchDispatchMode):
    """Counts the storages of all tensors that are made inside the block, each once, until it is freed.

    >>> with watch() as memory:
    ...     a = torch.zeros(1000)
    ...     b = a.view(10, 100) + 1
    ...     del a
    >>> memory.live, memory.peak
    (4000, 8000)

    `live` and `peak` are bytes. Views count nothing, and neither does what a kernel takes and gives back inside one
    operation, such as a BLAS library's workspace. Watching costs time: never read a clock inside the block.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages: dict[int, weakref.ref] = {}

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        result = func(*args, **(kwargs or {}))
        # What an op gets was made before the block, unless it was noted when it was made.
        known = {
            id(leaf.untyped_storage())
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in known:
                self._note(leaf.untyped_storage())
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


def without_data() -> AbstractContextManager:
    """Inside the block tensors have shapes and dtypes but no data: a network of any size "runs", on any machine.

    torch's fake tensors, on the CPU; meant for `watch` and for dtypes. What asks for a value (`item`, `if`) raises.
    """
    from torch._subclasses.fake_tensor import (
        FakeTensorMode,
    )  # slow to import, so only where it is needed

    return FakeTensorMode()
