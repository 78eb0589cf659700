"""What a training step does, seen without touching its code, and undone afterwards.

`Watcher` listens where torch lets others listen: at all optimizers and modules, the entry of the
autograd engine, autocast's own `__enter__`, the methods of gradient scalers and schedulers, and,
below autocast, at every kernel. It records plain data; `amp_utils.doctor` judges. `Saved` copies
what a step changes, and puts it back.
"""

import copy
import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from statistics import median
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

from amp_utils import formats
from amp_utils.modes import Transparent, tensors
from amp_utils.scaler import LossScaler
from amp_utils.timing import cpu_clock, synchronize

aten = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
UPDATES = {"mul_", "add_", "sub_", "div_", "lerp_", "addcmul_", "addcdiv_"}
CLAMPS, NORMS = {"clamp_", "clamp_min_", "clamp_max_"}, {"norm", "linalg_vector_norm"}
SCALER = {"scale": "A", "unscale_": "U", "step": "S", "update": "P", "get_scale": ""}
RANDOM = [
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
]


class Saved:
    """Copies of what a training step changes, each made before its first change."""

    def __init__(self, *things: Any) -> None:
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.random = [get() for get, _ in RANDOM]
        self.grad = torch.is_grad_enabled()
        self.keep(*things)

    def keep(self, *things: Any) -> None:
        """Copy tensors and their gradients; also what modules, optimizers, … and lists hold."""
        for it in things:
            if isinstance(it, (nn.Module, Optimizer, LRScheduler)) or hasattr(it, "unscale_"):
                it = vars(it)
            if id(it) in self.kept:
                continue
            if isinstance(it, Tensor):
                grad = it.grad if it.is_leaf else None
                copies = it.detach().clone(), None if grad is None else grad.clone()
                self.kept[id(it)] = it, (it.requires_grad, grad, *copies)
            elif isinstance(it, (dict, list)):
                self.kept[id(it)] = it, copy.copy(it)
                self.keep(*(it.values() if isinstance(it, dict) else it))

    def restore(self) -> None:
        """Put everything back where it was, into the same objects; may be called again."""
        with torch.no_grad():
            for it, was in self.kept.values():
                if isinstance(it, list):
                    it[:] = was
                elif isinstance(it, dict):
                    it.clear()
                    it.update(was)
                else:
                    requires_grad, grad, value, grad_value = was
                    it.copy_(value)
                    if it.is_leaf:
                        it.grad = grad if grad is None else grad.copy_(grad_value)
                        it.requires_grad_(requires_grad)
        for (_, put), state in zip(RANDOM, self.random, strict=True):
            put(state)
        torch.set_grad_enabled(self.grad)


class Watcher(Transparent):
    """Records what training steps do. Its plain data, of all steps together:

    `trace`: what happened, in order, with the optimizer, scheduler or weight it happened to, or
    None. F forward under autocast and its cache, f any other; A scale, a by a scaler that is off;
    B backward under autocast, b outside; U unscale_; C clip; S scaler's step; o the optimizer
    really stepped in it, O outside; P update; L scheduler; ( and ) an autocast region's ends.

    `ops`, by (module, "forward" or "backward", kernel, dtype): calls, flops, misaligned (flops of
    sizes that are not multiples of 8), nbytes (of casts), repeats (casts of a weight that the same
    region had cast before). `updates`, by (who updates, kernel, dtype), of 16-bit values: due (so
    many float32 would have moved), stay (so many of them stayed). `angles`: the largest angle or
    position, by (module, dtype), where the format's whole numbers have gaps.

    `seconds`: in products and casts, by step. `sample`: FLOPs, kernel and shapes of a typical
    product. `wild`: modules that made infinities or NaN of finite inputs. `bad_inputs`: calls of
    the model with such values. `reads`: values that Python asked for, each of which waits for a
    GPU. `scales`: after each update.

    With `on_values` autocast stays off and scalers do nothing, so that the same step shows its true
    numbers: `on_values(module, kind, tensor)` gets the outputs of modules without children, their
    gradients, and the weights' gradients, all of them as the backward pass makes them.
    """

    def __init__(
        self, model: nn.Module, saved: Saved, on_values: Callable[..., None] | None = None
    ) -> None:
        super().__init__()
        self.model, self.saved, self.on_values = model, saved, on_values
        self.ops, self.updates = defaultdict(Counter), defaultdict(Counter)
        self.trace, self.seconds, self.scales, self.wild = [], [], [], []
        self.angles, self.sample, self.bad_inputs, self.reads = {}, None, 0, 0

        self.device = next(model.parameters()).device
        self.clock = cpu_clock if self.device.type == "cpu" else perf_counter
        self.names = {id(module): name or "model" for name, module in model.named_modules()}
        self.weights = {p.data_ptr(): n.rpartition(".")[0] for n, p in model.named_parameters()}
        self.inside: list[str] = []  # what is running: backward, optimizer, scaler, watcher
        self.modules: list[str] = []
        self.owners: dict[int, str] = {}  # module by the autograd node's sequence number
        self.cast: set[tuple] = set()  # weights that this region has cast
        self.hooked: set[int] = set()  # weights whose gradients are looked at
        self.depth, self.normed, self.far, self.overhead = 0, -1, math.inf, 0.0

    def watch(self, step: Callable[[], Any], times: int) -> Exception | None:
        """Run a training step so many times; what it raised."""
        with ExitStack() as self.stack:
            stack = self.stack
            replace = partial(_replace, stack)
            replace(autocast, "__enter__", self._enter)
            replace(autocast, "__exit__", self._exit)
            replace(torch.autograd, "_engine_run_backward", self._backward)
            for scaler, method in product((torch.amp.GradScaler, LossScaler), SCALER):
                replace(scaler, method, partial(self._scaler, method))
            for scheduler in _family(LRScheduler):
                if "step" in vars(scheduler):
                    replace(scheduler, "step", self._scheduler)
            for handle in (
                optimizer.register_optimizer_step_pre_hook(self._optimizer_begins),
                optimizer.register_optimizer_step_post_hook(self._optimizer_ends),
                hooks.register_module_forward_pre_hook(self._module_begins),
                hooks.register_module_forward_hook(self._module_ends, always_call=True),
            ):
                stack.callback(handle.remove)
            stack.enter_context(self.block())
            self._calibrate()
            try:
                for _ in range(times):
                    self.seconds.append(Counter())
                    self.cast.clear()
                    step()
            except Exception as error:  # a finding, whatever it is
                return error
        return None

    def _calibrate(self) -> None:
        """The seconds that watching adds to a kernel: what a cast of one number takes."""
        tiny, costs = torch.zeros(1, device=self.device), []
        for _ in range(9):
            self.seconds.append(Counter())
            tiny.half()
            costs.append(self.seconds.pop()["casts"])
        self.overhead = median(costs)
        self.ops.clear()

    @contextmanager
    def _during(self, what: str) -> Iterator[None]:
        self.inside.append(what)
        try:
            yield
        finally:
            self.inside.remove(what)

    def _keep(self, thing: Any) -> None:
        with self._during("watcher"):
            self.saved.keep(thing)

    def _enter(self, enter: Callable, region: autocast) -> Any:
        if self.depth == 0:
            self.trace.append(("(", None))
            self.cast.clear()
        self.depth += 1
        with mock.patch.object(region, "_enabled", region._enabled and not self.on_values):
            return enter(region)

    def _exit(self, leave: Callable, region: autocast, *error: Any) -> Any:
        self.depth -= 1
        self.trace += [(")", None)] * (self.depth == 0)
        return leave(region, *error)

    def _backward(self, run: Callable, *args: Any, **kwargs: Any) -> Any:
        if "backward" not in self.inside:  # else a checkpoint computes again
            self.trace.append(("bB"[torch.is_autocast_enabled(self.device.type)], None))
        with self._during("backward"):
            return run(*args, **kwargs)

    def _scaler(self, method: str, call: Callable, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        self._keep(scaler)
        letter, on = SCALER[method], scaler.is_enabled()
        if letter and "scaler" not in self.inside and (on or letter == "A"):
            who = next((arg for arg in args if isinstance(arg, Optimizer)), None)
            self.trace.append((letter if on else "a", who))
        if self.on_values:
            vars(scaler).update(_enabled=False, enabled=False)
        with self._during("scaler"):
            result = call(scaler, *args, **kwargs)
            if method == "update":
                self.scales.append(scaler.get_scale())
        return result

    def _scheduler(self, step: Callable, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._keep(scheduler)
        self.trace.append(("L", scheduler))
        return step(scheduler, *args, **kwargs)

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._keep(optimizer)
        if not getattr(optimizer, "found_inf", 0):  # a fused optimizer skips by itself
            self.trace.append(("Oo"["scaler" in self.inside], optimizer))
        self.inside.append("optimizer")

    def _optimizer_ends(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.inside.remove("optimizer")

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        if not self.modules and "backward" not in self.inside:
            cached = torch.is_autocast_cache_enabled()
            on = torch.is_autocast_enabled(self.device.type) and cached
            self.trace.append(("fF"[on], None))
            for p in module.parameters() if self.on_values else ():
                if p.requires_grad and id(p) not in self.hooked:
                    name = self.weights.get(p.data_ptr(), "other weights")
                    hook = p.register_hook(partial(self._value, name, "weight gradients"))
                    self.stack.callback(hook.remove)
                    self.hooked.add(id(p))
        if id(module) not in self.names:
            self._keep(module)
            self.names[id(module)] = type(module).__name__
        self.modules.append(self.names[id(module)])

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        made, name = floats(output), self.modules.pop()
        with self._during("watcher"):
            if not all(t.isfinite().all() for t in made):
                given = all(t.isfinite().all() for t in floats(args))
                self.bad_inputs += not given and module is self.model
                self.wild += [name] * given
        if self.on_values and "backward" not in self.inside and not any(module.children()):
            for tensor in made:
                self._value(name, "activations", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._value, name, "gradients"))

    def _value(self, name: str, kind: str, tensor: Tensor) -> None:
        with self._during("watcher"):
            self.on_values(name, kind, tensor)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, inside = kwargs or {}, self.inside[-1:]
        run = partial(self.run, func, types, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload) or inside in (["scaler"], ["watcher"]):
            return run()[0]
        packet = func.overloadpacket
        name = packet.__name__.removeprefix("_foreach_")
        by_loop = not inside and not self.modules and self._by_loop(packet, name, args)
        if by_loop or inside == ["optimizer"]:
            by = "the loop" if by_loop else "optimizer"
            return self._update(by, name, func, run, args, kwargs)
        kind = {packet in flop_registry: "products", packet is aten._to_copy: "casts"}.get(True)
        if kind:
            synchronize(self.device)
        start = self.clock()
        result, seen = run()  # seen: it only called other kernels
        if kind:
            synchronize(self.device)
            taken = self.clock() - start - self.overhead
            self.seconds[-1][kind] += max(0.0, taken) if seen is None else 0.0
        if seen is None and floats((args, kwargs)) and not func.is_view:
            self._count(packet, func, args, kwargs, result)
        if packet in (aten.sin, aten.cos, aten.arange):
            values = result if packet is aten.arange else args[0]
            if values.dtype in NARROW and values.numel():
                largest = values.abs().amax().item()
                if largest > 2 / torch.finfo(values.dtype).eps:
                    module, spacing = self._where()[0], formats.of(values.dtype).ulp(largest)
                    row = {"module": module, "largest": largest, "spacing": spacing}
                    self.angles[module, values.dtype] = row
        return result

    def _where(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node() if "backward" in self.inside else None
        if node:
            return self.owners.get(node._sequence_nr(), "the loss"), "backward"
        module = self.modules[-1] if self.modules else "the loss"
        if torch.is_grad_enabled():
            self.owners[torch.autograd._get_sequence_nr() - 1] = module
        return module, "forward"

    def _count(self, packet: Any, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        given, made = floats((args, kwargs)), floats(result)
        source, (module, phase), name = given[0], self._where(), packet.__name__
        if packet is aten._to_copy:
            if not made or made[0].dtype == source.dtype:
                return
            name = f"cast to {str(made[0].dtype)[6:]}"
        row = self.ops[module, phase, name, source.dtype]
        row["calls"] += 1
        if packet is aten._to_copy:
            row.update(casts=1, nbytes=source.nbytes + made[0].nbytes)
            key = source.data_ptr(), made[0].dtype
            if source.data_ptr() in self.weights and phase == "forward":
                row["repeats"] += key in self.cast
                self.cast.add(key)
        with suppress(Exception):  # no product, or a call that the formula does not know
            flops = flop_registry[packet](*args, **kwargs, out_val=result)
            sizes = [n for tensor in given for n in tensor.shape[-2:]]
            if "conv" in name:  # the channels; a picture's few cannot be helped
                weight = given[-1 if packet is aten.convolution_backward else 1]
                sizes = [n for n in weight.shape[:2] if n > 4]
            row.update(flops=flops, misaligned=flops * any(size % 8 for size in sizes))
            # The largest; on a CPU, which may be slow in 16 bits, the one nearest to 3·10^7 FLOPs.
            goal = 3e7 if self.device.type == "cpu" else 1e30
            far = abs(math.log(flops / goal))
            if phase == "forward" and far < self.far:
                shapes = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
                self.far, self.sample = far, (flops, func, shapes)

    def _by_loop(self, packet: Any, name: str, args: Any) -> bool:
        """Listen to the loop's own arithmetic; is it an update in place, as of an average?"""
        if packet is aten._local_scalar_dense and args[0].is_floating_point():
            self.reads += args[0].device == self.device
        if name not in UPDATES | CLAMPS | NORMS:
            return False
        first = tensors(args[:1])
        grads = {p.grad.data_ptr(): p for p in self.model.parameters() if p.grad is not None}
        clipped = [grads[t.data_ptr()] for t in first if t.data_ptr() in grads]
        if clipped:
            # Multiplying a gradient is harmless by itself; after taking its norm it is a clip.
            if name in NORMS:
                self.normed = len(self.trace)
            elif name in CLAMPS or self.normed == len(self.trace):
                self.trace.append(("C", clipped[0]))
        elif name in UPDATES and not torch.is_grad_enabled():
            self._keep(first)
            return True
        return False

    def _update(self, by: str, name: str, func: Any, run: Callable, args: Any, kwargs: Any) -> Any:
        """Count the values of 16-bit tensors that stay where float32 would have moved them."""
        narrow, known = floats(args[:1]), name in UPDATES or name.startswith("_fused_")
        if not narrow or {t.dtype for t in narrow} - {*NARROW} or not known:
            return run()[0]
        wide = tree_map_only(Tensor, lambda t: t.float() if t.dtype in NARROW else t.clone(), args)
        before = [t.float() for t in narrow]
        func(*wide, **kwargs)
        result, _ = run()
        for was, exact, now in zip(before, tensors(wide[:1]), narrow, strict=True):
            due = exact != was
            stay = int((due & (now == was)).sum())
            self.updates[by, name, now.dtype].update(due=int(due.sum()), stay=stay)
        return result


def floats(tree: Any) -> list[Tensor]:
    """The floating-point tensors anywhere in it."""
    return [t for t in tensors(tree) if t.is_floating_point()]


def _replace(stack: ExitStack, owner: Any, name: str, listener: Callable) -> None:
    """For now `listener` is called in place of a function, which is its first argument."""
    original = getattr(owner, name)
    heard = lambda *args, **kwargs: listener(original, *args, **kwargs)  # noqa: E731
    stack.enter_context(mock.patch.object(owner, name, heard))


def _family(cls: type) -> set[type]:
    return {cls}.union(*map(_family, cls.__subclasses__()))
