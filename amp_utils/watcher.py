"""What a training step does, in order, seen without touching its code, and undone afterwards.

`Watcher` listens where torch lets others listen: at all optimizers and modules, the entry of the
autograd engine, autocast's own `__enter__`, the methods of gradient scalers and schedulers, and,
below autocast, at every kernel. It records plain data; `amp_utils.doctor` judges. `Saved` copies
what a step changes, and puts it back.
"""

import copy
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.nn.modules import module as hooks
from torch.optim import Optimizer, optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from amp_utils.modes import Transparent, tensors
from amp_utils.scaler import LossScaler
from amp_utils.timing import cpu_clock, synchronize

aten = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
UPDATES = {"mul_", "add_", "sub_", "div_", "lerp_", "addcmul_", "addcdiv_", "copy_"}
CLAMPS, NORMS = {"clamp_", "clamp_min_", "clamp_max_"}, {"norm", "linalg_vector_norm"}
RANDOM = [
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
]


@dataclass(frozen=True)
class Event:
    """One thing that happened, and the optimizer, scaler or scheduler it happened to.

    kind: forward, scale, backward, unscale_, clip, optimizer (it really stepped), step (of the
    scaler), update or scheduler. `region` numbers the outermost autocast region with a cache,
    `dtype` is autocast's; None outside of any. `by_scaler`: it happened inside the scaler.
    """

    kind: str
    who: Any
    region: int | None
    dtype: torch.dtype | None
    by_scaler: bool


@dataclass
class Op:
    """What one kernel did in one dtype, module and phase, in all steps together."""

    calls: int = 0
    flops: int = 0
    misaligned: int = 0  # FLOPs of sizes that are not multiples of 8
    nbytes: int = 0  # of casts, read and written
    repeats: int = 0  # casts of a weight that the same region had cast before


@dataclass
class Log:
    """Everything that was seen."""

    events: list[Event] = field(default_factory=list)
    # By (module, "forward" or "backward", kernel, dtype).
    ops: dict[tuple[str, str, str, torch.dtype], Op] = field(default_factory=dict)
    seconds: list[Counter[str]] = field(default_factory=list)  # in products and casts, by step
    sample: tuple[int, Callable, Any] | None = None  # a product: FLOPs, kernel, shapes
    # Values in 16 bits that float32 would have moved, by (who updates, kernel, dtype), and those
    # of them that stayed what they were.
    due: Counter[tuple] = field(default_factory=Counter)
    stayed: Counter[tuple] = field(default_factory=Counter)
    angles: dict[tuple[str, torch.dtype], float] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)  # modules with finite inputs, in order
    bad_inputs: int = 0  # calls of the model with values that are not finite
    reads: int = 0  # values that Python asked for, each of which waits for a GPU
    scales: list[float] = field(default_factory=list)  # after each update


class Saved:
    """Copies of what a training step changes, each made before its first change."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[int, tuple] = {}
        self.modules: dict[int, tuple] = {}
        self.objects: dict[int, tuple[Any, dict]] = {}
        self.random = [get() for get, _ in RANDOM]
        self.grad = torch.is_grad_enabled()
        self.keep_module(model)

    def keep_module(self, root: nn.Module) -> None:
        """Copy what a module, and each one inside it, holds."""
        for m in root.modules():
            self.modules.setdefault(id(m), (m, dict(vars(m)), {**m._parameters}, {**m._buffers}))
        self.keep([*root.parameters(), *root.buffers()])

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Copy tensors and their gradients."""
        for t in tensors:
            if id(t) not in self.tensors:
                grad = t.grad if t.is_leaf else None
                copies = t.detach().clone(), None if grad is None else grad.clone()
                self.tensors[id(t)] = t, t.requires_grad, grad, *copies

    def keep_object(self, who: Any) -> None:
        """Copy an optimizer, scaler or scheduler, and those inside it."""
        if id(who) not in self.objects:
            self.objects[id(who)] = who, {}
            if isinstance(who, Optimizer):
                self.keep(p for group in who.param_groups for p in group["params"])
            for part in vars(who).values():
                if isinstance(part, Optimizer) or hasattr(part, "unscale_"):
                    self.keep_object(part)
            self.objects[id(who)] = who, self._copied(vars(who))

    def _copied(self, attributes: dict) -> dict:
        known = [row[0] for row in [*self.tensors.values(), *self.objects.values()]]
        memo, kept = {id(it): it for it in known}, dict(attributes)
        for name, value in attributes.items():
            with suppress(Exception):  # an open file, a lock: nothing that a step changes
                kept[name] = copy.deepcopy(value, memo)
        return kept

    def restore(self) -> None:
        """Put everything back; may be called again."""
        for module, attributes, parameters, buffers in self.modules.values():
            vars(module).update(attributes)
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        with torch.no_grad():
            for tensor, requires_grad, grad, value, grad_value in self.tensors.values():
                tensor.copy_(value)
                if tensor.is_leaf:
                    tensor.grad = grad if grad is None else grad.copy_(grad_value)
                    tensor.requires_grad_(requires_grad)
        for who, kept in self.objects.values():
            vars(who).clear()
            vars(who).update(self._copied(kept))
        for (_, put), state in zip(RANDOM, self.random, strict=True):
            put(state)
        torch.set_grad_enabled(self.grad)


class Watcher:
    """Context manager: fills `log` while training steps run; call `begin()` before each of them.

    With `fp32=True` autocast stays off and scalers do nothing, so that the same step shows its true
    numbers. `on_values(module, kind, tensor)` gets the outputs of modules without children,
    their gradients, and the weights' gradients when an optimizer steps.
    """

    def __init__(
        self,
        model: nn.Module,
        saved: Saved,
        fp32: bool = False,
        on_values: Callable[[str, str, Tensor], None] | None = None,
    ) -> None:
        self.log, self.model, self.saved, self.fp32 = Log(), model, saved, fp32
        self.on_values = on_values
        self.device = next(model.parameters()).device
        self.names = {id(module): name or "model" for name, module in model.named_modules()}
        self.weights = {p.data_ptr(): n.rpartition(".")[0] for n, p in model.named_parameters()}
        self.inside: list[str] = []  # what is running: backward, optimizer, scaler, watcher
        self.modules: list[str] = []
        self.depth = self.region = 0

    def begin(self) -> None:
        """A new training step begins."""
        self.log.seconds.append(Counter())

    def note(self, kind: str, who: Any = None) -> None:
        """Add an event."""
        on = self.depth > 0 and torch.is_autocast_enabled(self.device.type)
        dtype = torch.get_autocast_dtype(self.device.type) if on else None
        region = self.region if on and torch.is_autocast_cache_enabled() else None
        self.log.events.append(Event(kind, who, region, dtype, "scaler" in self.inside))

    def __enter__(self) -> "Watcher":
        with ExitStack() as stack:
            replace = partial(self._replace, stack)
            replace(autocast, "__enter__", self._enter_region)
            replace(autocast, "__exit__", self._exit_region)
            replace(torch.autograd, "_engine_run_backward", self._backward)
            for scaler in (torch.amp.GradScaler, LossScaler):
                for method in ("scale", "unscale_", "step", "update", "get_scale"):
                    replace(scaler, method, partial(self._scaler, method))
            for scheduler in _family(LRScheduler):
                if "step" in vars(scheduler):
                    replace(scheduler, "step", self._scheduler_step)
            for handle in (
                optimizer.register_optimizer_step_pre_hook(self._optimizer_begins),
                optimizer.register_optimizer_step_post_hook(self._optimizer_ends),
                hooks.register_module_forward_pre_hook(self._module_begins),
                hooks.register_module_forward_hook(self._module_ends, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(_Kernels(self).block())
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
        with mock.patch.object(region, "_enabled", region._enabled and not self.fp32):
            return enter(region)

    def _exit_region(self, leave: Callable, region: autocast, *error: Any) -> Any:
        self.depth -= 1
        return leave(region, *error)

    def _during(self, what: str, run: Callable, *args: Any, **kwargs: Any) -> Any:
        self.inside.append(what)
        try:
            return run(*args, **kwargs)
        finally:
            self.inside.remove(what)

    def _backward(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        if "backward" not in self.inside:  # else a checkpoint computes again
            self.note("backward")
        return self._during("backward", run, *args, **kwargs)

    def _scaler(self, method: str, call: Callable, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._during("watcher", self.saved.keep_object, scaler)
        if "scaler" not in self.inside and method != "get_scale":
            self.note(method, args[0] if method in ("unscale_", "step") else scaler)
        if self.fp32 and method == "step":
            return args[0].step(*args[1:], **kwargs)
        if self.fp32:
            return {"scale": [*args, None][0], "get_scale": 1.0}.get(method)
        result = self._during("scaler", call, scaler, *args, **kwargs)
        if method == "update":
            self.log.scales.append(self._during("scaler", scaler.get_scale))
        return result

    def _scheduler_step(self, step: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._during("watcher", self.saved.keep_object, scheduler)
        self.note("scheduler", scheduler)
        return step(scheduler, *args, **kwargs)

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._during("watcher", self.saved.keep_object, optimizer)
        if not getattr(optimizer, "found_inf", 0):  # a fused optimizer skips by itself
            self.note("optimizer", optimizer)
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            if self.on_values and p.grad is not None and not p.grad.is_sparse:
                module = self.weights.get(p.data_ptr(), "other weights")
                self.on_values(module, "weight gradients", p.grad)
        self.inside.append("optimizer")

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.inside.remove("optimizer")

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        if not self.modules and "backward" not in self.inside:
            self.note("forward")
        if id(module) not in self.names:
            self._during("watcher", self.saved.keep_module, module)
            self.names[id(module)] = type(module).__name__
        self.modules.append(self.names[id(module)])

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        self._during("watcher", self._look, module, args, output)
        self.modules.pop()

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        made, name = floats(output), self.modules[-1]
        if not all(t.isfinite().all() for t in made):
            given = all(t.isfinite().all() for t in floats(args))
            self.log.bad_inputs += not given and module is self.model
            self.log.not_finite += [name] * given
        if self.on_values and "backward" not in self.inside and not any(module.children()):
            for tensor in made:
                self.on_values(name, "activations", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._gradient, name))

    def _gradient(self, name: str, gradient: Tensor) -> None:
        self._during("watcher", self.on_values, name, "gradients", gradient)


class _Kernels(Transparent):
    """Below autocast: every kernel, and what the loop itself updates in place."""

    def __init__(self, watcher: Watcher) -> None:
        super().__init__()
        self.watcher, self.log, self.normed = watcher, watcher.log, -1
        self.owners: dict[int, str] = {}  # module by the autograd node's sequence number
        self.cast: set[tuple] = set()
        self.far = math.inf
        self.clock = cpu_clock if watcher.device.type == "cpu" else perf_counter

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, inside = kwargs or {}, self.watcher.inside[-1:]
        if not isinstance(func, torch._ops.OpOverload) or inside in (["scaler"], ["watcher"]):
            return self.run(func, types, args, kwargs)[0]
        packet = func.overloadpacket
        name = packet.__name__.removeprefix("_foreach_")
        if inside == ["optimizer"]:
            return self._update("optimizer", name, func, types, args, kwargs)
        if not inside and not self.watcher.modules:
            if packet is aten._local_scalar_dense and args[0].is_floating_point():
                self.log.reads += args[0].device == self.watcher.device
            if name in UPDATES | CLAMPS | NORMS:
                return self._by_hand(name, func, types, args, kwargs)
        kind = {packet in flop_registry: "products", packet is aten._to_copy: "casts"}.get(True)
        if kind:
            synchronize(self.watcher.device)
        start = self.clock()
        result, seen = self.run(func, types, args, kwargs)  # seen: it only called other kernels
        if kind:
            synchronize(self.watcher.device)
            self.log.seconds[-1][kind] += self.clock() - start
        if seen is None and floats((args, kwargs)) and not func.is_view:
            self._count(packet, func, args, kwargs, result)
        if packet in (aten.sin, aten.cos, aten.arange):
            values = result if packet is aten.arange else args[0]
            if values.dtype in NARROW and values.numel():
                # Past this format's largest exact whole number, angles and positions collapse.
                largest = values.abs().amax().item()
                if largest > 2 / torch.finfo(values.dtype).eps:
                    self.log.angles[self._where()[0], values.dtype] = largest
        return result

    def _where(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node() if "backward" in self.watcher.inside else None
        if node:
            return self.owners.get(node._sequence_nr(), "the loss"), "backward"
        module = self.watcher.modules[-1] if self.watcher.modules else "the loss"
        if torch.is_grad_enabled():
            self.owners[torch.autograd._get_sequence_nr() - 1] = module
        return module, "forward"

    def _count(self, packet: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = floats((args, kwargs)), floats(result)
        source, where, name = given[0], self._where(), packet.__name__
        if packet is aten._to_copy:
            if not made or made[0].dtype == source.dtype:
                return
            name = f"cast to {str(made[0].dtype)[6:]}"
        row = self.log.ops.setdefault((*where, name, source.dtype), Op())
        row.calls += 1
        if packet is aten._to_copy:
            row.nbytes += source.nbytes + made[0].nbytes
            key = (self.watcher.region, len(self.log.seconds), source.data_ptr(), made[0].dtype)
            if source.data_ptr() in self.watcher.weights and where[1] == "forward":
                row.repeats += key in self.cast
                self.cast.add(key)
        with suppress(Exception):  # no product, or a call that the formula does not know
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            sizes = [n for tensor in given for n in tensor.shape[-2:]]
            if "conv" in name:  # the channels; a picture's few cannot be helped
                weight = given[-1 if packet is aten.convolution_backward else 1]
                sizes = [n for n in weight.shape[:2] if n > 4]
            row.flops += flops
            row.misaligned += flops * any(size % 8 for size in sizes)
            # The largest; on a CPU, which may be slow in 16 bits, the one nearest to 3·10^7 FLOPs.
            goal = 3e7 if self.watcher.device.type == "cpu" else 1e30
            far = abs(math.log(flops / goal))
            if where[1] == "forward" and far < self.far:
                shapes = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
                self.far, self.log.sample = far, (flops, func, shapes)

    def _by_hand(self, name: str, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The loop's own arithmetic: a clip, or an update in place such as a moving average's."""
        grads = {p.grad.data_ptr() for p in self.watcher.model.parameters() if p.grad is not None}
        if not grads.isdisjoint(t.data_ptr() for t in tensors(args[:1])):
            # Multiplying a gradient is harmless by itself; after taking its norm it is a clip.
            if name in NORMS:
                self.normed = len(self.log.events)
            elif name in CLAMPS or self.normed == len(self.log.events):
                self.watcher.note("clip")
        elif name in UPDATES and not torch.is_grad_enabled():
            self.watcher.saved.keep(tensors(args[:1]))
            return self._update("the loop", name, func, types, args, kwargs)
        return self.run(func, types, args, kwargs)[0]

    def _update(self, who: str, name: str, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Which values of 16-bit tensors stay where float32 would have moved them."""
        narrow = floats(args[:1])
        if (
            not narrow
            or {t.dtype for t in narrow} - set(NARROW)
            or not (name in UPDATES - {"copy_"} or name.startswith("_fused_"))
        ):
            return self.run(func, types, args, kwargs)[0]
        wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype in NARROW else t.clone(), args)
        before = [t.float() for t in narrow]
        func(*wide, **kwargs)
        result, _ = self.run(func, types, args, kwargs)
        for was, exact, now in zip(before, tensors(wide[:1]), narrow, strict=True):
            due = exact != was
            self.log.due[who, name, now.dtype] += int(due.sum())
            self.log.stayed[who, name, now.dtype] += int((due & (now == was)).sum())
        return result


def floats(tree: Any) -> list[Tensor]:
    """The floating-point tensors anywhere in it."""
    return [t for t in tensors(tree) if t.is_floating_point()]


def _family(cls: type) -> set[type]:
    return {cls}.union(*map(_family, cls.__subclasses__()))
