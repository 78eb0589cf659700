"""The autocast ledger: the dtype every op really ran in, and what autocast's policy for an op is.

It stands at two of torch's own observation points, one above autocast and one below: a TorchFunctionMode
sees the call that the program wrote and the dtypes it passed; a TorchDispatchMode sees the conversions that
autocast put in front of it, and the kernel that was reached. A row of the ledger is the difference.

>>> layer, x = torch.nn.Linear(4, 2), torch.ones(3, 4)
>>> with record() as rows:
...     with torch.autocast("cpu", dtype=torch.bfloat16):
...         y = torch.relu(layer(x))
>>> print(table(rows))
op      inputs   ran in  output  casts inserted
linear  3× fp32  bf16    bf16    3× fp32→bf16
relu    bf16     bf16    bf16    –
>>> policy(torch.softmax, x, 1, device="cpu"), policy(torch.softmax, x, 1, device="cuda")
('passthrough', 'fp32')
"""

import functools
import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Policy = Literal["lower_precision", "fp32", "promote", "passthrough", "banned", "unavailable"]

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}
# Neither these nor views calculate anything.
_IDLE = {"clone", "_unsafe_view", "empty_like", "new_empty", "_local_scalar_dense", "device"}
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


@dataclass(frozen=True)
class Row:
    """One op of a forward pass.

    `inputs` are the floating dtypes that its caller passed, `ran_in` is that of the first kernel that
    calculated, `output` that of the result (None: no tensor), and `casts` names every conversion of those
    inputs that autocast inserted, such as "float32→bfloat16".
    """

    op: str
    inputs: tuple[torch.dtype, ...]
    ran_in: torch.dtype
    output: torch.dtype | None
    casts: tuple[str, ...]


@contextmanager
def record() -> Iterator[list[Row]]:
    """Record what runs inside the ``with`` block, forward: yields a list that grows a `Row` per op.

    Ops that only look, view, copy or allocate have no row, and neither have ops without a floating-point
    input, nor the backward pass. ``x.float()`` and ``x.to(dtype)`` have a row of their own, with no cast
    *inserted*. A function such as multi-head attention that calls several ops has a row for each of them.

    The block sees its own thread only, as autocast does: start the ledger in the thread that runs the
    model. While it watches, `torch.nn.MultiheadAttention` and the transformer layers do not take their
    fused shortcut.
    """
    rows: list[Row] = []
    kernels = _Kernels()
    with kernels, _Calls(rows, kernels):
        yield rows


def table(rows: list[Row]) -> str:
    """Aligned plain text, a line per row, short dtype names; equal neighbours are counted ("3× fp32")."""

    def count(names: list[str]) -> str:
        runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
        return ", ".join(f"{n}× {name}" if n > 1 else name for name, n in runs) or "–"

    def short_cast(cast: str) -> str:
        return "→".join(_short(getattr(torch, name)) for name in cast.split("→"))

    lines = [("op", "inputs", "ran in", "output", "casts inserted")]
    for row in rows:
        inputs, casts = (
            count([_short(d) for d in row.inputs]),
            count([short_cast(c) for c in row.casts]),
        )
        lines.append((row.op, inputs, _short(row.ran_in), _short(row.output), casts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def policy(
    op: Callable, *args: Any, device: str = "cpu", dtype: torch.dtype | None = None, **kwargs: Any
) -> Policy:
    """What autocast does with ``op(*args, **kwargs)``, found by running it with and without autocast.

    `args` hold small tensors, anywhere in them; their floating dtypes do not matter, since the op runs on
    copies that are all float32, all `dtype` (default: bfloat16 on "cpu", float16 on "cuda"), and mixed. On
    "cuda" the copies are torch's fake tensors, which have a dtype but no data, and no GPU is needed or
    used; tensors that `op` brings along itself make it unavailable. Arguments, random state and autocast's
    own state stay as they were.

    - lower_precision: float32 inputs run in `dtype`
    - fp32: `dtype` inputs run in float32
    - promote: mixed inputs are cast by autocast to the widest
    - passthrough: autocast does nothing; mixed inputs are the op's own affair
    - banned: autocast refuses to run it
    - unavailable: it cannot run here, so nothing is known

    Raises ValueError for another `device` or `dtype`, and where `args` hold no floating-point tensor.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r} is not allowed: give 'cpu' or 'cuda'.")
    low = dtype or (torch.bfloat16 if device == "cpu" else torch.float16)
    if low not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype = {dtype} is not allowed: give torch.float16 or torch.bfloat16.")
    if not _floats((args, kwargs)):
        raise ValueError(
            "args hold no floating-point tensor: give one at least, or autocast has nothing to decide."
        )
    fp32, call = torch.float32, functools.partial(_observe, op, args, kwargs, device, low)

    on = call((fp32,), autocast=True)
    if on.banned:
        return "banned"
    if on.failed:
        return "unavailable"
    if low in on.ran_in + on.output:
        return "lower_precision"
    # Autocast's doing is what differs from a run without it: some ops widen by themselves.
    on, off = call((low,), autocast=True), call((low,), autocast=False)
    if on.failed and not off.failed:
        return "unavailable"
    if (fp32 in on.ran_in and fp32 not in off.ran_in) or (
        fp32 in on.output and fp32 not in off.output
    ):
        return "fp32"
    on, off = call((low, fp32), autocast=True), call((low, fp32), autocast=False)
    if on.failed and not off.failed:
        return "unavailable"
    return "promote" if (low, fp32) in on.casts and on.casts != off.casts else "passthrough"


@dataclass
class _State:
    casts: list[tuple[torch.dtype, torch.dtype]] = field(default_factory=list)
    ran_in: list[torch.dtype] = field(default_factory=list)
    made: dict[int, Any] = field(
        default_factory=dict
    )  # kept by id, and alive, so that no id is used twice


class _Kernels(TorchDispatchMode):
    """Below autocast: the casts and the kernels of the call that `state` belongs to."""

    def __init__(self) -> None:
        super().__init__()
        self.state: _State | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result, state = func(*args, **(kwargs or {})), self.state
        if state is None:
            return result
        got, made = _floats((args, kwargs)), _floats(result)
        # What is made inside an op and converted there (attention does it) is the op's own affair.
        inside = any(id(leaf) in state.made for leaf in tree_leaves((args, kwargs)))
        if inside or not func.is_view:
            state.made |= {id(leaf): leaf for leaf in tree_leaves(result)}
        if func is torch.ops.aten._to_copy.default:
            if got and made and got[0] != made[0] and not inside:
                state.casts.append((got[0], made[0]))
        elif got and not func.is_view and func.overloadpacket.__name__ not in _IDLE:
            state.ran_in.append(made[0] if made else functools.reduce(torch.promote_types, got))
        return result


class _Calls(TorchFunctionMode):
    """Above autocast: the calls as the program wrote them. A kernel belongs to the innermost of them."""

    def __init__(self, rows: list[Row], kernels: _Kernels) -> None:
        super().__init__()
        self.rows, self.kernels, self.stack = rows, kernels, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # an attribute, such as x.shape
            return func(*args, **kwargs)
        inputs, first = _floats((args, kwargs)), len(self.rows)
        own = None if func in _BACKWARD else _State()
        outer, self.kernels.state = self.kernels.state, own
        self.stack.append(func)
        try:
            inside = None if own is None or func in self.stack[:-1] else _below_its_check(func)
            if inside is None:
                result = func(*args, **kwargs)
            else:
                with self:
                    result = inside(*args, **kwargs)
        finally:
            self.stack.pop()
            self.kernels.state = outer
        if own is None:
            return result
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
        output = _output(result)
        if own.ran_in:
            inserted = _inserted((args, kwargs), own.casts, output)
            self.rows.append(Row(name, inputs, own.ran_in[0], output, inserted))
        elif own.casts:
            self.rows.append(Row(name, inputs, own.casts[-1][1], output, ()))
        elif len(self.rows) == first + 1:
            # A Python function around one op: the caller knows it by the outer name.
            self.rows[first] = replace(self.rows[first], op=name, inputs=inputs)
        return result


def _inserted(arguments: Any, casts: list, output: torch.dtype | None) -> tuple[str, ...]:
    """Those of a call's casts that are autocast's, by name."""
    leaves = tree_leaves(arguments)
    devices = {leaf.device.type for leaf in leaves if _is_tensor(leaf)}
    if not any(
        torch.amp.is_autocast_available(d) and torch.is_autocast_enabled(d) for d in devices
    ):
        return ()
    if any(isinstance(leaf, torch.dtype) for leaf in leaves):
        return ()  # the caller's own wish, as in softmax(x, dtype=...)
    # What autocast widens comes back wide; an op that hands back the narrow dtype has widened by itself, as
    # attention does where there is no fused kernel.
    kept = [(a, b) for a, b in casts if torch.promote_types(a, b) != b or output == b]
    return tuple(f"{_name(a)}→{_name(b)}" for a, b in kept)


def _below_its_check(func: Callable) -> Callable | None:
    """`func` with the mode still watching inside; None where there is no Python inside to watch.

    torch's Python functions first ask whether a mode wants the call. A copy whose question is answered "no"
    goes on to the body, and there the mode, active again, sees the ops.
    """
    code = getattr(func, "__code__", None)
    checks = (
        [name for name in code.co_names if name.startswith("has_torch_function")] if code else []
    )
    if not checks:
        return None
    scope = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = types.FunctionType(code, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


@dataclass(frozen=True)
class _Observation:
    casts: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    ran_in: tuple[torch.dtype, ...] = ()
    output: tuple[torch.dtype, ...] = ()
    failed: bool = False
    banned: bool = False


def _observe(op, args, kwargs, device, low, dtypes, autocast) -> _Observation:
    """Run `op` once on copies, the first floating tensor in dtypes[0] and the others in dtypes[-1]."""
    turn = itertools.chain(dtypes[:1], itertools.repeat(dtypes[-1]))

    def fresh(leaf):
        if not _is_tensor(leaf):
            return leaf
        as_dtype = next(turn) if leaf.is_floating_point() else leaf.dtype
        if device == "cuda":
            return torch.empty(leaf.shape, device=device, dtype=as_dtype)
        return leaf.detach().to("cpu", as_dtype, copy=True)

    with ExitStack() as stack:
        # Autograd on fake CUDA tensors ends the process in a CPU build of torch.
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if device == "cuda":
            from torch._subclasses import fake_tensor  # slow to import, so only where it is needed

            stack.enter_context(fake_tensor.FakeTensorMode())
            # It logs a traceback for each op that fails; here a failure is an answer.
            stack.callback(setattr, fake_tensor.log, "disabled", fake_tensor.log.disabled)
            fake_tensor.log.disabled = True
        try:
            args, kwargs = tree_map(fresh, (args, kwargs))
            stack.enter_context(_autocast_state(device, low, autocast))
            kernels = stack.enter_context(_Kernels())
            kernels.state = _State()
            output = _floats(op(*args, **kwargs))
        except Exception as error:  # whatever the op raises means the same: it cannot run here
            banned = isinstance(error, RuntimeError) and "autocast" in str(error)
            return _Observation(failed=True, banned=banned)
        return _Observation(tuple(kernels.state.casts), tuple(kernels.state.ran_in), output)


@contextmanager
def _autocast_state(device: str, dtype: torch.dtype, enabled: bool) -> Iterator[None]:
    """`torch.autocast`, which would switch itself off for "cuda" where there is no GPU."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.autocast_increment_nesting()
    try:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _floats(tree: Any) -> tuple[torch.dtype, ...]:
    return tuple(t.dtype for t in tree_leaves(tree) if _is_tensor(t) and t.is_floating_point())


def _output(result: Any) -> torch.dtype | None:
    return next((t.dtype for t in tree_leaves(result) if _is_tensor(t)), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _short(dtype: torch.dtype | None) -> str:
    return "–" if dtype is None else _SHORT.get(dtype, _name(dtype))
