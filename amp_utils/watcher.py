"""What a training step does, in order, seen without touching its code.

`Watcher` stands where torch lets others listen: hooks of all optimizers and modules, the entry of the
autograd engine, autocast's own `__enter__`, the methods of the gradient scalers, and, below autocast, a
dispatch mode for products, casts and updates in place. It records plain data and decides nothing;
`amp_utils.doctor` reads it.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from amp_utils.scaler import LossScaler
from amp_utils.timing import synchronize

aten = torch.ops.aten
UPDATES = {"mul_", "add_", "sub_", "div_", "lerp_", "addcmul_", "addcdiv_"}
SCALER = {"scale": "scale", "unscale_": "unscale", "step": "scaler_step", "update": "update"}
CLAMPS, NORMS = {"clamp_", "clamp_min_", "clamp_max_"}, {"norm", "linalg_vector_norm"}


@dataclass(frozen=True)
class Event:
    """One thing that happened; `who` is the optimizer, scaler or scheduler it happened to.

    kind: forward, scale, backward, unscale, clip, optimizer (it really stepped), scaler_step, update,
    scheduler. `region` numbers the outermost autocast region it happened in (None: outside of any), `dtype`
    is autocast's there (None: switched off), `call` the number of the training step.
    """

    kind: str
    who: Any
    call: int
    region: int | None
    dtype: torch.dtype | None


@dataclass
class Product:
    """Matrix products, convolutions and attention of one dtype in one module ("backward": in none)."""

    flops: int = 0
    calls: int = 0
    seconds: float = 0.0
    misaligned: int = 0  # FLOPs whose sizes are not all multiples of 8


@dataclass
class Cast:
    """Conversions of one tensor from one floating dtype to another within one autocast region."""

    module: str
    source: torch.dtype
    target: torch.dtype
    nbytes: int
    of_parameter: bool
    count: int = 0


@dataclass
class Log:
    """Everything that was seen."""

    events: list[Event] = field(default_factory=list)
    products: dict[tuple[str, torch.dtype], Product] = field(default_factory=dict)
    casts: dict[tuple, Cast] = field(default_factory=dict)
    # By optimizer: share of the weights that it should have moved and that stayed what they were, by dtype.
    still: dict[int, dict[torch.dtype, float]] = field(default_factory=dict)
    # Updates in place of 16-bit tensors outside of optimizers: (op, dtype, share that changed nothing).
    idle_updates: list[tuple[str, torch.dtype, float]] = field(default_factory=list)
    angles: list[tuple[str, torch.dtype, float]] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)  # modules with finite inputs, in order
    bad_inputs: list[str] = field(default_factory=list)  # what the model was given is not finite
    reads: int = 0  # values that Python asked for, each of which waits for a GPU
    scales: list[float] = field(default_factory=list)  # after each update
    calls: int = 0


class Watcher:
    """Context manager: fills `log` while training steps run; call `begin()` before each of them.

    With `fp32=True` autocast stays off and scalers do nothing, so that the same step shows its true numbers.
    `on_output(module name, tensor)` is called with every floating output of a module without children.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fp32: bool = False,
        before_first: Callable[[Any], None] = lambda _: None,
        on_output: Callable[[str, Tensor], None] | None = None,
    ) -> None:
        self.log, self.model, self.fp32 = Log(), model, fp32
        self.before_first, self.on_output = before_first, on_output
        self.names = {id(module): name or "model" for name, module in model.named_modules()}
        self.parameters = {p.data_ptr() for p in model.parameters()}
        self.inside: list[str] = []  # what is running: "backward", "optimizer", "scaler"
        self.modules: list[str] = []
        self.depth = self.region = 0
        self._seen: set[int] = set()
        self._cloned: dict[int, list] = {}
        self._stack = ExitStack()

    def begin(self) -> None:
        """A new training step begins."""
        self.log.calls += 1
        self.inside.clear()
        self.modules.clear()

    def note(self, kind: str, who: Any = None) -> None:
        """Add an event."""
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        on = torch.is_autocast_enabled(device)
        outside = not on and not self.depth
        region = None if outside else self.region
        dtype = torch.get_autocast_dtype(device) if on else None
        self.log.events.append(Event(kind, who, self.log.calls, region, dtype))

    def first(self, who: Any) -> None:
        """Let the owner save the state of an optimizer, scaler or scheduler before it changes."""
        if id(who) not in self._seen:
            self._seen.add(id(who))
            self.before_first(who)

    def __enter__(self) -> "Watcher":
        with ExitStack() as stack:
            self._replace(stack, autocast, "__enter__", self._enter_region)
            self._replace(stack, autocast, "__exit__", self._exit_region)
            self._replace(stack, torch.autograd, "_engine_run_backward", self._backward)
            for scaler in (torch.amp.GradScaler, LossScaler):
                for method in SCALER:
                    self._replace(stack, scaler, method, partial(self._scaler, method))
            for scheduler in _subclasses(LRScheduler):
                if "step" in vars(scheduler):
                    self._replace(stack, scheduler, "step", self._scheduler_step)
            for handle in (
                register_optimizer_step_pre_hook(self._optimizer_begins),
                register_optimizer_step_post_hook(self._optimizer_ends),
                nn.modules.module.register_module_forward_pre_hook(self._module_begins),
                nn.modules.module.register_module_forward_hook(self._module_ends),
            ):
                stack.callback(handle.remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(_Kernels(self))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @staticmethod
    def _replace(stack: ExitStack, owner: Any, name: str, listener: Callable) -> None:
        original = getattr(owner, name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            return listener(original, *args, **kwargs)

        stack.enter_context(mock.patch.object(owner, name, heard))

    def _enter_region(self, enter: Callable, region: autocast) -> Any:
        self.region += self.depth == 0
        self.depth += 1
        enabled = region._enabled
        if self.fp32:
            region._enabled = False
        try:
            return enter(region)
        finally:
            region._enabled = enabled

    def _exit_region(self, leave: Callable, region: autocast, *error: Any) -> Any:
        self.depth -= 1
        return leave(region, *error)

    def _backward(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        self.note("backward")
        return self._during("backward", run, *args, **kwargs)

    def _during(self, what: str, run: Callable, *args: Any, **kwargs: Any) -> Any:
        self.inside.append(what)
        try:
            return run(*args, **kwargs)
        finally:
            if self.inside:
                self.inside.pop()

    def _scaler(self, method: str, call: Callable, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self.first(scaler)
        if "scaler" not in self.inside:  # else it calls itself, as `step` calls `unscale_`
            self.note(SCALER[method], args[0] if method in ("unscale_", "step") else scaler)
        if self.fp32:
            return args[0].step(*args[1:], **kwargs) if method == "step" else (*args, None)[0]
        result = self._during("scaler", call, scaler, *args, **kwargs)
        if method == "update":
            self.log.scales.append(self._during("scaler", scaler.get_scale))
        return result

    def _scheduler_step(self, step: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.first(scheduler.optimizer)
        self.first(scheduler)
        self.note("scheduler", scheduler)
        return step(scheduler, *args, **kwargs)

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.first(optimizer)
        self.inside.append("optimizer")
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips by itself
        if found_inf is None or not found_inf.item():
            self.note("optimizer", optimizer)
            if id(optimizer) not in self.log.still and not self.fp32:
                with torch.no_grad():
                    self._cloned[id(optimizer)] = [
                        (p, p.detach().clone(), (p.grad != 0) | (bool(decay) & (p != 0)))
                        for group in optimizer.param_groups
                        for decay in [group.get("weight_decay", 0)]
                        for p in group["params"]
                        if p.grad is not None and not p.grad.is_sparse
                    ]

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        counts: dict[torch.dtype, list[int]] = {}
        for p, before, due in self._cloned.pop(id(optimizer), []):
            moved, total = counts.setdefault(p.dtype, [0, 0])
            counts[p.dtype] = [
                moved + int(((p.detach() == before) & due).sum()),
                total + int(due.sum()),
            ]
        if counts:
            shares = {dtype: still / max(total, 1) for dtype, (still, total) in counts.items()}
            self.log.still[id(optimizer)] = shares
        if self.inside:
            self.inside.pop()

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            return
        if module is self.model:
            self.note("forward")
        self.modules.append(name)

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self.names.get(id(module))
        if name is None or not self.modules:
            return
        self._during("watcher", self._look, name, module, args, output)
        self.modules.pop()

    def _look(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        given, made = _float_tensors(args), _float_tensors(output)
        fine = all(t.isfinite().all() for t in given)
        if module is self.model and not fine:
            self.log.bad_inputs.append(name)
        if fine and not all(t.isfinite().all() for t in made) and not self.log.not_finite:
            self.log.not_finite.append(name)
        if self.on_output and not any(True for _ in module.children()):
            for tensor in made:
                self.on_output(name, tensor)


class _Kernels(TorchDispatchMode):
    """Below autocast: products, casts, and what is updated in place."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher, self.log, self.normed = watcher, watcher.log, -1

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, watcher = kwargs or {}, self.watcher
        packet, inside = getattr(func, "overloadpacket", None), watcher.inside
        name = getattr(packet, "__name__", "").removeprefix("_foreach_")
        if packet in flop_registry:
            return self._product(packet, func, args, kwargs)
        if packet is aten._local_scalar_dense and not inside and not watcher.modules:
            self.log.reads += 1
        if name in UPDATES | CLAMPS | NORMS and not inside and not watcher.modules:
            return self._by_hand(name, func, args, kwargs)
        result = func(*args, **kwargs)
        if packet is aten._to_copy:
            self._cast(args[0], result)
        elif packet in (aten.sin, aten.cos, aten.arange):
            self._angle(packet, args, result)
        return result

    def _where(self) -> str:
        if "backward" in self.watcher.inside:
            return "backward"
        return self.watcher.modules[-1] if self.watcher.modules else "outside of the model"

    def _product(self, packet: Any, func: Any, args: Any, kwargs: Any) -> Any:
        given = _float_tensors((args, kwargs))
        device = given[0].device if given else "cpu"
        synchronize(device)
        start = perf_counter()
        result = func(*args, **kwargs)
        synchronize(device)
        seconds = perf_counter() - start
        with suppress(Exception):  # a formula that does not know a call is no reason to stop it
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            dtype = given[0].dtype
            row = self.log.products.setdefault((self._where(), dtype), Product())
            if (
                "conv" in packet.__name__
            ):  # the channels count, but the few of a picture cannot be helped
                sizes = [
                    n
                    for n in given[-1 if packet is aten.convolution_backward else 1].shape[:2]
                    if n > 4
                ]
            else:
                sizes = [n for tensor in given for n in tensor.shape[-2:]]
            row.flops, row.calls, row.seconds = (
                row.flops + flops,
                row.calls + 1,
                row.seconds + seconds,
            )
            row.misaligned += flops * any(size % 8 for size in sizes)
        return result

    def _cast(self, source: Tensor, result: Tensor) -> None:
        if not (source.is_floating_point() and result.is_floating_point()):
            return
        if source.dtype == result.dtype or self.watcher.inside[:1] == ["optimizer"]:
            return
        region = self.watcher.region, self.log.calls
        key = (
            *region,
            source.data_ptr(),
            source.shape,
            result.dtype,
            "backward" in self.watcher.inside,
        )
        nbytes = source.nbytes + result.nbytes
        cast = self.log.casts.setdefault(
            key,
            Cast(
                self._where(),
                source.dtype,
                result.dtype,
                nbytes,
                source.data_ptr() in self.watcher.parameters and not key[-1],
            ),
        )
        cast.count += 1

    def _angle(self, packet: Any, args: Any, result: Tensor) -> None:
        """Angles and positions so large that their format skips whole numbers."""
        values = result if packet is aten.arange else args[0]
        if values.dtype in (torch.float16, torch.bfloat16) and values.numel():
            largest = values.abs().amax().item()
            if largest > 2 / torch.finfo(values.dtype).eps:
                self.log.angles.append((self._where(), values.dtype, largest))

    def _by_hand(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """The loop's own arithmetic: a clip of gradients, or an update in place such as a moving average's."""
        tensors = [t for t in tree_leaves(args[0]) if isinstance(t, Tensor)]
        gradients = {
            p.grad.data_ptr() for p in self.watcher.model.parameters() if p.grad is not None
        }
        if any(t.data_ptr() in gradients for t in tensors):
            # To multiply a gradient is harmless by itself; after its norm was taken it is a clip.
            if name in NORMS:
                self.normed = len(self.log.events)
            elif name in CLAMPS or self.normed == len(self.log.events):
                self.watcher.note("clip")
            return func(*args, **kwargs)
        narrow = [t for t in tensors if t.dtype in (torch.float16, torch.bfloat16)]
        before = [] if torch.is_grad_enabled() else [t.clone() for t in narrow]
        result = func(*args, **kwargs)
        if before and name in UPDATES:
            same = sum(int((a == b).sum()) for a, b in zip(before, narrow, strict=True))
            share = same / max(1, sum(t.numel() for t in narrow))
            self.log.idle_updates.append((name, narrow[0].dtype, share))
        return result


def _float_tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _subclasses(cls: type) -> list[type]:
    return [cls, *(deeper for below in cls.__subclasses__() for deeper in _subclasses(below))]
