"""The autocast ledger: the dtype every op really ran in, and what autocast's policy for an op is.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from amp_utils.modes import IMPLICIT, Transparent, autocast_device, rules, tensors

# "bfloat16" first: it contains "float16".
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
# Like views, these calculate nothing.
_IDLE = {"clone", "_unsafe_view", "empty_like", "new_empty", "_local_scalar_dense", "device"}
_BACKWARD = {torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad}


class Row(NamedTuple):
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
    """Record what runs inside the ``with`` block: yields a list that grows a `Row` per op.

    No row: what only looks, views, copies or allocates, ops without a floating-point input, the
    backward pass, TorchScript. A conversion by the program, such as ``x.float()``, has a row and no
    cast *inserted*. A function that calls several ops, such as multi-head attention, has a row for
    each; a higher-order op, such as `torch.cond`, has one.

    Results stay what they are, except that `torch.nn.MultiheadAttention` and transformer layers do
    not take their fused shortcut, a compiled function runs eagerly, and `torch.linalg.svdvals` and
    its like take another kernel under any mode of torch's (the last bit may differ). What an op
    makes inside stays in memory until it is done. The block sees its own thread only.
    """
    calls = _Calls()
    with calls.kernels.block(), calls:
        yield calls.rows


def table(rows: list[Row]) -> str:
    """Aligned plain text, a line per row; equal neighbours are counted ("3× fp32")."""

    def cell(names: Iterable) -> str:
        runs = [(name, len(list(run))) for name, run in itertools.groupby(map(_name, names))]
        text = ", ".join(f"{n}× {name}" if n > 1 else name for name, n in runs) or "–"
        return functools.reduce(lambda text, names: text.replace(*names), _SHORT.items(), text)

    lines = [("op", "inputs", "ran in", "output", "casts inserted")]
    for row in rows:
        cells = row.inputs, [row.ran_in], [row.output] if row.output else [], row.casts
        lines.append((row.op, *map(cell, cells)))
    return aligned(lines)


def aligned(lines: list[Sequence[str]]) -> str:
    """Plain text of these lines of cells, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def policy(
    op: Callable, *args: Any, device: str = "cpu", dtype: torch.dtype | None = None, **kwargs: Any
) -> str:
    """What autocast does with ``op(*args, **kwargs)``: runs it with and without autocast.

    `args` hold small tensors, anywhere in them; `op` runs on copies that are all float32, all
    `dtype` (default: bfloat16 on "cpu", float16 on "cuda"), and mixed. On "cuda" these are fake
    tensors, which have no data and need no GPU; autograd, and tensors that `op` brings along, make
    it unavailable. Arguments, random state and autocast's state stay as they were; the running
    statistics of a BatchNorm module in training mode do not.

    - lower_precision: float32 inputs run in `dtype`
    - fp32: `dtype` inputs run in float32; of an op made of others, as cross_entropy is on CUDA,
      perhaps only a part (`on_cuda` shows the dtype in which it begins)
    - promote: mixed inputs are cast by autocast to the widest
    - passthrough: autocast does nothing; mixed inputs are the op's own affair
    - banned: autocast refuses to run it
    - unavailable: it cannot run here, so nothing is known

    ValueError for another `device` or `dtype`, or where `args` hold no floating-point tensor.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device = {device!r} is not allowed: give 'cpu' or 'cuda'.")
    low = dtype or (torch.bfloat16 if device == "cpu" else torch.float16)
    if low not in (torch.bfloat16, torch.float16):
        raise ValueError(f"dtype = {dtype} is not allowed: give torch.float16 or torch.bfloat16.")
    if not _floats((args, kwargs)):
        raise ValueError("args hold no floating-point tensor: give one, or nothing can be cast.")
    fp32 = torch.float32
    for dtypes, sought, answer in (
        ((fp32,), low, "lower_precision"),
        ((low,), fp32, "fp32"),
        ((low, fp32), None, "promote"),
    ):
        (on, casts, error), (off, own_casts, own_error) = (
            _observe(op, args, kwargs, device, low, dtypes, enabled) for enabled in (True, False)
        )
        if error and (not own_error or sought is low):
            return "banned" if "autocast" in error else "unavailable"
        # Autocast's doing is what differs from a run without it: some ops convert by themselves.
        if any(made is sought for _, made in on - off):
            return answer
    return "promote" if (low, fp32) in casts and casts != own_casts else "passthrough"


def on_cuda(
    model: torch.nn.Module,
    *inputs: torch.Tensor,
    dtype: torch.dtype = torch.float16,
    region: AbstractContextManager | None = None,
) -> list[Row]:
    """What `record` would show of ``model(*inputs)`` under CUDA's autocast, without a GPU.

    The model runs without autograd on tensors that have no data, in `region` instead if one is
    given. Rows tell what autocast decides (`inputs`, `casts`, `output`); which kernel a GPU would
    choose, and its `ran_in`, they cannot know. Raises what the model raises on such tensors: a
    size or a number that depends on data, as in ``x[mask]`` or ``x.item()``, is not known.
    """
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad(), _fake_cuda():
        state, inputs = tree_map(
            lambda t: torch.empty(t.shape, dtype=t.dtype, device="cuda"), (state, inputs)
        )
        with region or _region("cuda", dtype, True), record() as rows:
            torch.func.functional_call(model, state, inputs)
    return rows


class _Kernels(Transparent):
    """Below autocast: the casts and the kernels of the call that `state` belongs to."""

    state = None

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

    autograd = True

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.casts, self.ran_in = [], [], []
        self.kernels, self.stack = _Kernels(), []

    def __torch_function__(self, func, _, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if torch.is_grad_enabled() and not self.autograd:
            raise RuntimeError("no autograd without a GPU")
        # An attribute, such as x.shape, or the backward pass.
        if name in ("__get__", "__set__") or func in _BACKWARD:
            return func(*args, **kwargs)
        name = name.removeprefix("__").removesuffix("__")
        given, first, kernels = tensors((args, kwargs)), len(self.rows), self.kernels
        # What the kernels make is kept alive by its id, so that no id is used twice.
        own = types.SimpleNamespace(casts=[], ran_in=[], made={})
        outer = kernels.state, kernels.ruled
        kernels.state, kernels.ruled = own, f"aten::{name}" in rules(autocast_device(given))
        inside = None if func in self.stack else _below_its_check(func)
        indexes = name in ("getitem", "setitem") and type(given[0]).__name__ == "FakeTensor"
        self.stack.append(func)
        try:
            with self if inside else nullcontext():
                result = _indexed(func, args) if indexes else (inside or func)(*args, **kwargs)
        finally:
            self.stack.pop()
            kernels.state, kernels.ruled = outer
        self.casts += own.casts
        self.ran_in += own.ran_in
        inputs, output = _floats(given), next((t.dtype for t in tensors(result)), None)
        if own.ran_in:
            inserted = _inserted((args, kwargs), own.casts, output)
            self.rows.append(Row(name, inputs, own.ran_in[0], output, inserted))
        elif own.casts:
            self.rows.append(Row(name, inputs, own.casts[-1][1], output, ()))
        elif len(self.rows) == first + 1:
            # A Python function around one op: the caller knows it by the outer name.
            self.rows[first] = self.rows[first]._replace(op=name, inputs=inputs)
        return result


def _indexed(func: Callable, args: tuple) -> torch.Tensor | None:
    """x[i] or x[i] = y of fake tensors: on "cuda" torch would ask for the GPU, on "meta" not."""
    result = func(*tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, args))
    return None if result is None else torch.empty_like(result, device=args[0].device)


def _inserted(arguments: Any, casts: list, output: torch.dtype | None) -> tuple[str, ...]:
    """Those of a call's casts that are autocast's, by name."""
    devices = {autocast_device([tensor]) for tensor in tensors(arguments)}
    # A dtype among them is the caller's own wish, as in softmax(x, dtype=...).
    asked = any(isinstance(leaf, torch.dtype) for leaf in tree_leaves(arguments))
    if asked or not any(map(torch.is_autocast_enabled, devices)):
        return ()
    # Autocast widens to float32 or to the widest input, and then the result is not narrow.
    wide = {torch.float32, *_floats(arguments)}
    kept = [(a, b) for a, b in casts if torch.promote_types(a, b) != b or output != a and b in wide]
    return tuple(f"{_name(a)}→{_name(b)}" for a, b in kept)


def _below_its_check(func: Callable) -> Callable | None:
    """`func` with the mode still watching inside; None where there is no Python inside to watch.

    torch's Python functions first ask whether a mode wants the call. A copy whose question is
    answered "no" goes on to the body, and there the mode, active again, sees the ops.
    """
    code = getattr(func, "__code__", None)
    checks = [name for name in code.co_names if "has_torch_function" in name] if code else []
    if not checks:
        return None
    scope = {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)}
    copy = types.FunctionType(code, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def _observe(op, args, kwargs, device, low, dtypes, enabled) -> tuple[set, list, str]:
    """Run `op` once: the dtypes that kernels ran in and that came out, the casts, the error.

    It runs on copies: the first floating tensor in dtypes[0], the others in dtypes[-1].
    """
    turn = itertools.chain(dtypes[:1], itertools.repeat(dtypes[-1]))

    def fresh(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        as_dtype = next(turn) if leaf.is_floating_point() else leaf.dtype
        if device == "cuda":
            return torch.empty(leaf.shape, device=device, dtype=as_dtype)
        return leaf.detach().to("cpu", as_dtype, copy=True)

    calls = _Calls()
    # Autograd on fake CUDA tensors ends the process in a CPU build of torch.
    calls.autograd = device == "cpu"
    place = _fake_cuda() if device == "cuda" else nullcontext()
    with torch.no_grad(), torch.random.fork_rng(devices=[]), place:
        try:
            args, kwargs = tree_map(fresh, (args, kwargs))
            with _region(device, low, enabled), calls.kernels.block(), calls:
                output = _floats(op(*args, **kwargs))
        except Exception as error:  # whatever the op raises means the same: it cannot run here
            return set(), [], f"{type(error).__name__}: {error}"
    made = {("ran in", dtype) for dtype in calls.ran_in} | {("output", dtype) for dtype in output}
    return made, calls.casts, ""


@contextmanager
def _fake_cuda() -> Iterator[None]:
    """Tensors made on "cuda" inside have no data."""
    from torch._subclasses import fake_tensor  # slow to import

    # It logs a traceback for each op that fails; here a failure is an answer.
    logged, fake_tensor.log.disabled = fake_tensor.log.disabled, True
    try:
        with fake_tensor.FakeTensorMode():
            yield
    finally:
        fake_tensor.log.disabled = logged


def _region(device: str, dtype: torch.dtype, enabled: bool) -> torch.autocast:
    """An autocast region; torch.autocast refuses "cuda" where there is no GPU."""
    region = torch.autocast(device, dtype, enabled=False)
    region._enabled = enabled
    return region


def _floats(tree: Any) -> tuple[torch.dtype, ...]:
    return tuple(tensor.dtype for tensor in tensors(tree) if tensor.is_floating_point())


def _name(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")
