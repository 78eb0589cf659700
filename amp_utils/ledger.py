"""The autocast ledger: the dtype every op really ran in, and what autocast's policy for an op is.

It stands at two of torch's own observation points. Above autocast, a TorchFunctionMode sees the
call that the program wrote and the dtypes it passed; below, a TorchDispatchMode sees the
conversions that autocast put in front of it, and the kernel that was reached. A row of the ledger
is the difference.

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
from typing import Any, Literal, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_utils.modes import IMPLICIT, Transparent, autocast_device, rules, tensors

Policy = Literal["lower_precision", "fp32", "promote", "passthrough", "banned", "unavailable"]

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
# Like views, these calculate nothing.
_IDLE = {"clone", "_unsafe_view", "empty_like", "new_empty", "_local_scalar_dense", "device"}
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


@dataclass(frozen=True)
class Row:
    """One op of a forward pass.

    `inputs` are the floating dtypes that its caller passed, `ran_in` is that of the first kernel
    that calculated, `output` that of the result (None: no tensor), and `casts` names every
    conversion of those inputs that autocast inserted, such as "float32→bfloat16".
    """

    op: str
    inputs: tuple[torch.dtype, ...]
    ran_in: torch.dtype
    output: torch.dtype | None
    casts: tuple[str, ...]


@contextmanager
def record() -> Iterator[list[Row]]:
    """Record what runs inside the ``with`` block, forward: yields a list that grows a `Row` per op.

    Ops that only look, view, copy or allocate have no row, and neither have ops without a
    floating-point input, nor the backward pass. ``x.float()`` and ``x.to(dtype)`` have a row of
    their own, with no cast *inserted*. A function such as multi-head attention that calls several
    ops has a row for each of them; a higher-order op such as `torch.cond` is one row.

    Results stay what they are, except that `torch.nn.MultiheadAttention` and the transformer
    layers do not take their fused shortcut, a compiled function runs eagerly, and
    `torch.linalg.svdvals` and its like take another kernel under any of torch's modes (the last
    bit may differ). TorchScript leaves no rows. What an op makes inside stays in memory until the
    op is done. The block sees its own thread only, as autocast does: start the ledger in the
    thread that runs the model.
    """
    rows: list[Row] = []
    kernels = _Kernels()
    with kernels, _Calls(rows, kernels):
        yield rows


def table(rows: list[Row]) -> str:
    """Aligned plain text, a line per row; equal neighbours are counted ("3× fp32")."""

    def count(names: list[str]) -> str:
        runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
        return ", ".join(f"{n}× {name}" if n > 1 else name for name, n in runs) or "–"

    def short(name: str) -> str:
        return "→".join(_SHORT.get(part, part) for part in name.split("→"))

    lines = [("op", "inputs", "ran in", "output", "casts inserted")]
    for row in rows:
        ran_in, output = short(_name(row.ran_in)), short(_name(row.output)) if row.output else "–"
        inputs, casts = count([short(_name(d)) for d in row.inputs]), count(map(short, row.casts))
        lines.append((row.op, inputs, ran_in, output, casts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def policy(
    op: Callable, *args: Any, device: str = "cpu", dtype: torch.dtype | None = None, **kwargs: Any
) -> Policy:
    """What autocast does with ``op(*args, **kwargs)``: runs it with and without autocast.

    `args` hold small tensors, anywhere in them; their floating dtypes do not matter, since the op
    runs on copies that are all float32, all `dtype` (default: bfloat16 on "cpu", float16 on
    "cuda"), and mixed. On "cuda" the copies are torch's fake tensors, which have a dtype but no
    data, and no GPU is needed or used; autograd, and tensors that `op` brings along itself, make
    it unavailable. Arguments, random state and autocast's own state stay as they were; the running
    statistics of a BatchNorm module in training mode do not.

    - lower_precision: float32 inputs run in `dtype`
    - fp32: `dtype` inputs run in float32
    - promote: mixed inputs are cast by autocast to the widest
    - passthrough: autocast does nothing; mixed inputs are the op's own affair
    - banned: autocast refuses to run it
    - unavailable: it cannot run here, so nothing is known

    Raises ValueError for another `device` or `dtype`, and where `args` hold no floating-point
    tensor.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r} is not allowed: give 'cpu' or 'cuda'.")
    low = dtype or (torch.bfloat16 if device == "cpu" else torch.float16)
    if low not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype = {dtype} is not allowed: give torch.float16 or torch.bfloat16.")
    if not _floats((args, kwargs)):
        raise ValueError("args hold no floating-point tensor: give one, or nothing can be cast.")
    fp32 = torch.float32
    trials = (
        ((fp32,), low, "lower_precision"),
        ((low,), fp32, "fp32"),
        ((low, fp32), None, "promote"),
    )
    for dtypes, sought, answer in trials:
        on, off = (
            _observe(op, args, kwargs, device, low, dtypes, enabled) for enabled in (True, False)
        )
        if on.error and (not off.error or sought is low):
            return "banned" if "autocast" in on.error else "unavailable"
        # Autocast's doing is what differs from a run without it: some ops convert by themselves.
        if any(made is sought for _, made in on.dtypes - off.dtypes):
            return answer
    return "promote" if (low, fp32) in on.casts and on.casts != off.casts else "passthrough"


@dataclass
class _State:
    """What the kernels of one call did."""

    casts: list[tuple[torch.dtype, torch.dtype]] = field(default_factory=list)
    ran_in: list[torch.dtype] = field(default_factory=list)
    # By id, and kept alive, so that no id is used twice.
    made: dict[int, torch.Tensor] = field(default_factory=dict)


class _Kernels(Transparent):
    """Below autocast: the casts and the kernels of the call that `state` belongs to."""

    state: _State | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, state = kwargs or {}, self.state
        ran = len(state.ran_in if state else ())
        result, kernel = self.run(func, types, args, kwargs)
        if state is None or kernel == IMPLICIT or len(state.ran_in) > ran:
            return result  # nobody asks, or the ops inside have answered
        inputs, higher = tensors((args, kwargs)), isinstance(func, HigherOrderOperator)
        got, made = _floats(inputs), _floats(result)
        # What an op calculates and then converts (attention does it) is the op's own affair.
        inside = any(id(tensor) in state.made for tensor in inputs)
        idle = not higher and (func.is_view or func.overloadpacket.__name__ in _IDLE)
        if inside or not idle:
            state.made |= {id(tensor): tensor for tensor in tensors(result)}
        if func is torch.ops.aten._to_copy.default:
            if got and made and got[0] != made[0] and not inside:
                state.casts.append((got[0], made[0]))
        elif got and not idle:
            state.ran_in.append(made[0] if made else functools.reduce(torch.promote_types, got))
        return result


class _Calls(TorchFunctionMode):
    """Above autocast: the calls as the program wrote them; a kernel belongs to the innermost."""

    def __init__(self, rows: list[Row], kernels: _Kernels) -> None:
        super().__init__()
        self.rows, self.kernels, self.stack, self.states = rows, kernels, [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # an attribute, such as x.shape
            return func(*args, **kwargs)
        if name.startswith("__") and name.endswith("__"):
            name = name[2:-2]
        given, first, kernels = tensors((args, kwargs)), len(self.rows), self.kernels
        own = None if func in _BACKWARD else _State()
        outer = kernels.state, kernels.ruled
        kernels.state, kernels.ruled = own, f"aten::{name}" in rules(autocast_device(given))
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
            kernels.state, kernels.ruled = outer
        if own is None:
            return result
        own.made.clear()
        self.states.append(own)
        inputs, output = _floats(given), next((t.dtype for t in tensors(result)), None)
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
    devices = {autocast_device([tensor]) for tensor in tensors(arguments)}
    if not any(map(torch.is_autocast_enabled, devices)):
        return ()
    if any(isinstance(leaf, torch.dtype) for leaf in tree_leaves(arguments)):
        return ()  # the caller's own wish, as in softmax(x, dtype=...)
    # Where autocast widens, it is to float32 or the widest input, and the result is not narrow; an
    # op that hands back the narrow dtype has widened by itself, as attention without a fused
    # kernel does.
    wide = {torch.float32, *_floats(arguments)}
    return tuple(
        f"{_name(a)}→{_name(b)}"
        for a, b in casts
        if torch.promote_types(a, b) != b or (output != a and b in wide)
    )


def _below_its_check(func: Callable) -> Callable | None:
    """`func` with the mode still watching inside; None where there is no Python inside to watch.

    torch's Python functions first ask whether a mode wants the call. A copy whose question is
    answered "no" goes on to the body, and there the mode, active again, sees the ops.
    """
    code = getattr(func, "__code__", None)
    checks = [
        name for name in getattr(code, "co_names", ()) if name.startswith("has_torch_function")
    ]
    if not checks:
        return None
    scope = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = types.FunctionType(code, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


class _Observation(NamedTuple):
    dtypes: set[tuple[str, torch.dtype]] = frozenset()  # that kernels ran in and that came out
    casts: tuple[tuple[torch.dtype, torch.dtype], ...] = ()
    error: str = ""


def _observe(op, args, kwargs, device, low, dtypes, enabled) -> _Observation:
    """Run `op` once on copies: the first floating tensor in dtypes[0], the others in dtypes[-1]."""
    turn = itertools.chain(dtypes[:1], itertools.repeat(dtypes[-1]))

    def fresh(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        as_dtype = next(turn) if leaf.is_floating_point() else leaf.dtype
        if device == "cuda":
            return torch.empty(leaf.shape, device=device, dtype=as_dtype)
        return leaf.detach().to("cpu", as_dtype, copy=True)

    kernels = _Kernels()
    calls = _Calls([], kernels)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        if device == "cuda":
            from torch._subclasses import fake_tensor  # slow to import

            stack.enter_context(fake_tensor.FakeTensorMode())
            stack.enter_context(_NoAutograd())
            # It logs a traceback for each op that fails; here a failure is an answer.
            stack.callback(setattr, fake_tensor.log, "disabled", fake_tensor.log.disabled)
            fake_tensor.log.disabled = True
        try:
            args, kwargs = tree_map(fresh, (args, kwargs))
            # torch.autocast would switch itself off for "cuda" where there is no GPU.
            stack.callback(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
            stack.callback(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
            stack.callback(
                lambda: torch.autocast_decrement_nesting() or torch.clear_autocast_cache()
            )
            torch.autocast_increment_nesting()
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, low)
            stack.enter_context(kernels)
            stack.enter_context(calls)
            output = _floats(op(*args, **kwargs))
        except Exception as error:  # whatever the op raises means the same: it cannot run here
            return _Observation(error=f"{type(error).__name__}: {error}")
    ran_in = [("ran in", dtype) for state in calls.states for dtype in state.ran_in]
    casts = tuple(cast for state in calls.states for cast in state.casts)
    return _Observation({*ran_in, *(("output", dtype) for dtype in output)}, casts)


class _NoAutograd(TorchFunctionMode):
    """Refuse autograd: on fake CUDA tensors it ends the process in a CPU build of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if torch.is_grad_enabled():
            raise RuntimeError("no autograd without a GPU")
        return func(*args, **(kwargs or {}))


def _floats(tree: Any) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors(tree) if tensor.is_floating_point())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
