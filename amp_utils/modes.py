"""A base for instruments that watch torch's kernels and leave every result as it is."""

import functools
import operator
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

IMPLICIT = DispatchKey.CompositeImplicitAutograd


class Transparent(TorchDispatchMode):
    """A dispatch mode under which ops do what they do without one, by calling `run`.

    Inside `__torch_dispatch__`, torch switches off autocast for the ops that a kernel calls, which
    are autocast when unwatched, except inside an op that autocast has a rule for (`ruled`).
    """

    supports_higher_order_operators = True
    ruled = False

    @contextmanager
    def block(self) -> Iterator[Self]:
        """Watch a block of the program."""
        # flex_attention compiles itself, which torch refuses under a mode.
        compiles = sys.modules.keys() & {"torch._dynamo", "torch.nn.attention.flex_attention"}
        with torch.compiler.set_stance("force_eager") if compiles else nullcontext(), self:
            yield self

    def run(self, func, types, args, kwargs) -> tuple[Any, DispatchKey | None]:
        """(result, key of the kernel if that only called other ops, seen by this mode)."""
        if isinstance(func, HigherOrderOperator) or func.namespace == "prim":
            return func(*args, **kwargs), None
        inputs, outer = tensors((args, kwargs)), self.ruled
        self.ruled = outer or func._schema.name in rules(autocast_device(inputs))
        # Nested tensors and subclasses have kernels of their own; fake tensors take the usual ones.
        special = [t for t in types if t.__name__ != "FakeTensor"]
        special += [tensor for tensor in inputs if tensor.is_nested or tensor.is_mkldnn]
        kernel = _composite(func) if inputs and not special else None
        if self.ruled and kernel != IMPLICIT:
            kernel = None
        if func.is_view and kernel is None:
            return func(*args, **kwargs), None
        try:
            with _unwatched(self.ruled):
                if kernel is None:
                    return func(*args, **kwargs), None
                with self:
                    return func._op_dk(kernel, *args, **kwargs), kernel
        finally:
            self.ruled = outer


@contextmanager
def _unwatched(ruled: bool) -> Iterator[None]:
    """Autocast, and what resolves lazy conjugates, as a kernel finds them without a mode."""
    excluded = torch._C._dispatch_tls_local_exclude_set
    with torch._C._RestorePythonTLSSnapshot():
        outside = excluded()  # as it was where the program called torch
    inside = excluded() - ((_LAZY if ruled else _LAZY | _AUTOCAST) - outside)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), inside):
        yield


@functools.cache
def _composite(func: OpOverload) -> DispatchKey | None:
    """The key of `func`'s kernel, if that calculates nothing itself and only calls other ops.

    With autograd on, torch takes most of these apart before a mode sees them.
    """
    has = functools.partial(torch._C._dispatch_has_kernel_for_dispatch_key, func.name())
    if has(IMPLICIT):
        return IMPLICIT
    copies = func.is_view or func.overloadpacket.__name__ in ("clone", "_to_copy", "empty_like")
    wraps = "Scalar" in func._overloadname  # a number in a tensor, which Python could not hand on
    if func.namespace != "aten" or copies or wraps or has("CPU") or has("CUDA"):
        return None
    keys = DispatchKey.CompositeExplicitAutograd, DispatchKey.CompositeExplicitAutogradNonFunctional
    return next(filter(has, keys), None)


@functools.cache
def rules(device: str) -> set[str]:
    """The ops that autocast on `device` has a rule for, such as "aten::mm"."""
    key = f"Autocast{torch._C._dispatch_key_for_device(device)}"
    overloads = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {overload.split(".")[0] for overload in overloads}


def tensors(tree: Any) -> list[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, faster than torch's pytree finds them."""
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        return [tensor for leaf in tree for tensor in tensors(leaf)]
    return [tree] if isinstance(tree, torch.Tensor) else []


def autocast_device(inputs: list[torch.Tensor]) -> str:
    """The type of device whose autocast decides."""
    device = inputs[0].device.type if inputs else "cpu"
    return device if torch.amp.is_autocast_available(device) else "cpu"


def _keys(names: Iterable[str]) -> DispatchKeySet:
    keys = (DispatchKeySet(DispatchKey.__members__[name]) for name in names)
    return functools.reduce(operator.or_, keys)


_LAZY = _keys(["Conjugate", "Negative", "ZeroTensor"])
_AUTOCAST = _keys(name for name in DispatchKey.__members__ if name.startswith("Autocast"))
