"""What a training step does, seen without touching its code, and undone afterwards.

`Watcher` listens where torch lets others listen: at all optimizers and modules, the entry of the
autograd engine, the end of autocast's regions, the methods of gradient scalers and schedulers, and,
below autocast, at every kernel. It records plain data; `amp_utils.doctor` judges. `Saved` copies
what a step changes, and puts it back.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from time import perf_counter
from typing import Any
from unittest import mock

import numpy
import torch
from torch import Tensor, nn
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
RNNS = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer")  # fused; torch counts no FLOPs in them
SAMPLE = 2048  # values of a tensor that are kept
SCALER = {"scale": "A", "unscale_": "U", "step": "S", "update": "P", "get_scale": "G"}
LISTEN = [  # owner, function, its letter in the trace, what runs inside it
    (torch, "clear_autocast_cache", ")", "region"),
    (torch.autograd, "_engine_run_backward", "B", "backward"),
    *((s, "step", "L", "scheduler") for s in [LRScheduler, *LRScheduler.__subclasses__()]),
    *((s, *call, "scaler") for s in (torch.amp.GradScaler, LossScaler) for call in SCALER.items()),
]
ON_GRADIENTS = {  # what the loop's own kernels do
    **dict.fromkeys(["norm", "linalg_vector_norm"], "n"),
    **dict.fromkeys(["mul_", "add_", "sub_", "div_", "lerp_", "addcmul_", "addcdiv_"], "m"),
    **dict.fromkeys(["clamp_", "clamp_min_", "clamp_max_"], "c"),
}
SETTINGS = [  # a step may change these too
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    (torch.is_grad_enabled, torch.set_grad_enabled),
]


def flops_of(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Floating-point operations of a kernel's matrix products; KeyError if it makes none."""
    name = packet.__name__
    if name.removesuffix("_backward") in RNNS:
        given, *weights = tensors(args[:5])
        products = 2 * given.shape[:-1].numel() * sum(w.numel() for w in weights if w.ndim == 2)
        return 2 * products if name.endswith("_backward") else products
    return flop_registry[packet](*args, **kwargs, out_val=result)


class Saved(AbstractContextManager):
    """Copies of what a training step changes; after a `with` block all is as it was at first."""

    def __init__(self, *things: Any) -> None:
        self.kept: dict[int, tuple[Any, Any]] = {}
        self.settings = [(put, get()) for get, put in SETTINGS]
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
                self.kept[id(it)] = it, (it.detach().clone(), it.requires_grad, grad)
                self.keep(grad)
            elif isinstance(it, (dict, list)):
                self.kept[id(it)] = it, it.copy()
                self.keep(*(it.values() if isinstance(it, dict) else it))

    def __exit__(self, *error: Any) -> None:
        with torch.no_grad():
            for it, was in self.kept.values():
                if isinstance(it, Tensor):
                    value, requires_grad, grad = was
                    it.copy_(value)
                    if it.is_leaf:
                        it.grad = grad
                        it.requires_grad_(requires_grad)
                else:
                    it.clear()
                    (it.update if isinstance(it, dict) else it.extend)(was)
        for put, state in self.settings:
            put(state)


class Watcher(Transparent):
    """Records what training steps do. Its plain data, of all steps together:

    `trace`: what happened, in order, with the optimizer, scheduler or weight it happened to. F
    forward under autocast and its cache, f any other; B backward under autocast, b outside; LISTEN,
    a scaler's small where it is off; o an optimizer really stepped in one, O outside; ON_GRADIENTS.
    `ops`, by (module, "forward" or "backward", kernel, dtype): calls, flops, misaligned (flops of
    sizes that are not multiples of 8), nbytes of casts, repeats (casts of a weight that the same
    region had cast before). `updates`, by (who, kernel, dtype), of 16-bit values: due (so many
    float32 would have moved), stay (so many of them stayed). `angles`: by module, the largest where
    its dtype's whole numbers have gaps. `seconds`: in products and casts, by step. `sample`: FLOPs,
    kernel and shapes of a typical product. `wild`: modules that made infinities or NaN of finite
    inputs. `bad_inputs`: calls of the model with such values. `reads`: values that Python asked
    for, each of which waits for a GPU. `scales`: after each update.

    A `wide` one keeps autocast and scalers off, so that the same step shows its true numbers:
    `values`, samples, and `largest`, by (module, kind), of the outputs of modules without children,
    of their gradients, and of the weights' gradients as the backward pass makes them.
    """

    def __init__(self, model: nn.Module, saved: Saved, wide: bool = False) -> None:
        super().__init__()
        self.model, self.saved, self.wide = model, saved, wide
        self.ops, self.updates = defaultdict(Counter), defaultdict(Counter)
        self.trace, self.seconds, self.scales, self.wild = [], [], [], []
        self.angles, self.sample, self.bad_inputs, self.reads = {}, None, 0, 0
        self.values, self.largest = defaultdict(list), Counter()

        self.device = next(model.parameters()).device
        self.clock = cpu_clock if self.device.type == "cpu" else perf_counter
        self.far = self.overhead = math.inf  # seconds that watching adds to a kernel
        self.names = {id(module): name or "model" for name, module in model.named_modules()}
        self.weights = {p.data_ptr() for p in model.parameters()}
        self.inside, self.modules = ["the loop"], ["the loss"]  # what runs now
        self.owners: dict[int, str] = {}  # module by the autograd node's sequence number
        self.cast: set[tuple] = set()  # weights that this region has cast

    def watch(self, step: Callable[[], Any], times: int) -> Exception | None:
        """Run a training step so many times; what it raised."""
        handles = [
            optimizer.register_optimizer_step_pre_hook(self._optimizer_begins),
            optimizer.register_optimizer_step_post_hook(lambda *_: self.inside.remove("optimizer")),
            hooks.register_module_forward_pre_hook(self._module_begins),
            hooks.register_module_forward_hook(self._module_ends, always_call=True),
        ]
        for name, p in self.model.named_parameters():
            if self.wide and p.requires_grad:
                module = name.rpartition(".")[0] or "model"
                handles.append(p.register_hook(partial(self._look, module, "weight gradients")))
        with ExitStack() as stack:
            for handle in handles:
                stack.callback(handle.remove)
            for owner, name, letter, what in LISTEN:
                heard = self._heard(getattr(owner, name), letter, what)
                stack.enter_context(mock.patch.object(owner, name, heard))
            if self.wide:
                off = mock.patch.object(torch, "set_autocast_enabled", lambda *device_and_on: None)
                stack.enter_context(off)
            stack.enter_context(self.block())
            try:
                for _ in range(times):
                    self.seconds.append(Counter())
                    self.cast.clear()
                    step()
            except Exception as error:  # a finding, whatever it is
                return error
        return None

    @contextmanager
    def _during(self, what: str) -> Iterator[None]:
        self.inside.append(what)
        try:
            yield
        finally:
            self.inside.remove(what)

    def _keep(self, *things: Any) -> None:
        with self._during("watcher"):
            self.saved.keep(*things)

    def _note(self, letter: str, *args: Any) -> None:
        kinds = Optimizer, LRScheduler, nn.Parameter
        who = next((arg for arg in args if isinstance(arg, kinds)), None)
        self.trace.append((letter, who))
        self._keep(*args[:1], who)

    def _heard(self, call: Callable, letter: str, what: str) -> Callable:
        """`call`, noted except where one of its kind calls it."""

        def heard(*args: Any, **kwargs: Any) -> Any:
            if what not in self.inside:
                on = what != "backward" or torch.is_autocast_enabled(self.device.type)
                on = on and (what != "scaler" or args[0].is_enabled())
                self._note(letter if on else letter.lower(), *args)
            if what == "region":
                self.cast.clear()
            if what == "scaler" and self.wide:
                vars(args[0]).update(_enabled=False, enabled=False)
            with self._during(what):
                result = call(*args, **kwargs)
                if letter == "P":
                    self.scales.append(args[0].get_scale())
                return result

        return heard

    def _optimizer_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not getattr(optimizer, "found_inf", 0):  # a fused optimizer skips by itself
            self._note("Oo"["scaler" in self.inside], optimizer)
        self.inside.append("optimizer")

    def _module_begins(self, module: nn.Module, args: Any) -> None:
        if self.modules == ["the loss"] and "backward" not in self.inside:
            cached = torch.is_autocast_cache_enabled()
            self._note("fF"[torch.is_autocast_enabled(self.device.type) and cached])
        if id(module) not in self.names:
            self._keep(module)
            self.names[id(module)] = type(module).__name__
        self.modules.append(self.names[id(module)])

    def _module_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        name, made = self.modules.pop(), floats(output)
        with self._during("watcher"):
            if not all(tensor.isfinite().all() for tensor in made):
                finite = all(tensor.isfinite().all() for tensor in floats(args))
                self.wild += [name] * finite
                self.bad_inputs += module is self.model and not finite
        if self.wide and "backward" not in self.inside and not any(module.children()):
            for tensor in made:
                self._look(name, "activations", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look, name, "gradients"))

    def _look(self, module: str, kind: str, tensor: Tensor) -> None:
        with self._during("watcher"):
            key, values = (module, kind), tensor.detach().to_dense().flatten()
            if len(values):
                self.values[key].append(values[:: len(values) // SAMPLE + 1].clone())
                largest = values.abs().nan_to_num(math.inf, math.inf).max().item()
                self.largest[key] = max(self.largest[key], largest)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, by = kwargs or {}, self.inside[-1]
        run = partial(self.run, func, types, args, kwargs)
        if not isinstance(func, torch._ops.OpOverload) or by in ("scaler", "watcher"):
            return run()[0]
        packet = func.overloadpacket
        name = packet.__name__.removeprefix("_foreach_")
        by_loop = by == "the loop" and self.modules == ["the loss"]
        if by == "optimizer" or by_loop and self._by_loop(packet, name, args):
            return self._update(by, name, func, run, args, kwargs)
        synchronize(self.device)
        start = self.clock()
        result, seen = run()  # seen: it only called other kernels
        synchronize(self.device)
        if seen is None and floats((args, kwargs)) and not func.is_view:
            self._count(func, args, kwargs, result, self.clock() - start)
        if packet in (aten.sin, aten.cos, aten.arange):
            self._look_at_angles(result if packet is aten.arange else args[0])
        return result

    def _where(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node() if "backward" in self.inside else None
        if node:
            return self.owners.get(node._sequence_nr(), "the loss"), "backward"
        if torch.is_grad_enabled():
            self.owners[torch.autograd._get_sequence_nr() - 1] = self.modules[-1]
        return self.modules[-1], "forward"

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, seconds: float) -> None:
        given, made, packet = floats((args, kwargs)), floats(result), func.overloadpacket
        source, (module, phase), name = given[0], self._where(), packet.__name__
        counts = {"calls": 1}
        self.overhead = min(self.overhead, seconds)  # of the cheapest kernel nearly all
        if packet is aten._to_copy:
            if not made or made[0].dtype == source.dtype:
                return
            name = f"cast to {str(made[0].dtype)[6:]}"
            counts["nbytes"] = source.nbytes + made[0].nbytes
            self.seconds[-1]["casts"] += seconds - self.overhead
            if source.data_ptr() in self.weights and phase == "forward":
                key = source.data_ptr(), made[0].dtype
                counts["repeats"] = key in self.cast
                self.cast.add(key)
        with suppress(Exception):  # no product, or a call that the formula does not know
            flops = flops_of(packet, args, kwargs, result)
            # Of a convolution the channels; what is as small as a picture's cannot be helped.
            which = slice(1, 2) if "conv" in name else slice(-2, None)
            sizes = [size for tensor in given + made for size in tensor.shape[which] if size > 4]
            counts |= {"flops": flops, "misaligned": flops * any(size % 8 for size in sizes)}
            self.seconds[-1]["products"] += seconds - self.overhead
            # The largest; on a CPU, which may be slow in 16 bits, the one nearest to 3·10^7 FLOPs.
            far = abs(math.log(flops / (3e7 if self.device.type == "cpu" else 1e30)))
            fused = "attention" in name or name in RNNS
            if phase == "forward" and not fused and far < self.far:
                shapes = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
                self.far, self.sample = far, (flops, func, shapes)
        self.ops[module, phase, name, source.dtype].update(counts)

    def _look_at_angles(self, values: Tensor) -> None:
        if values.dtype in NARROW and values.numel():
            largest, fmt = values.abs().amax().item(), formats.of(values.dtype)
            if largest * fmt.eps > 2:
                module, spacing = self._where()[0], fmt.ulp(largest)
                self.angles[module] = {"module": module, "largest": largest, "spacing": spacing}

    def _by_loop(self, packet: Any, name: str, args: Any) -> bool:
        """Listen to the loop's own arithmetic; is it an update in place, as of an average?"""
        if packet is aten._local_scalar_dense and args[0].is_floating_point():
            self.reads += args[0].device == self.device
        letter, first = ON_GRADIENTS.get(name), tensors(args[:1])
        if letter is None:
            return False
        grads = {p.grad.data_ptr(): p for p in self.model.parameters() if p.grad is not None}
        whose = next((grads[t.data_ptr()] for t in first if t.data_ptr() in grads), None)
        if whose is not None:
            self._note(letter, whose)
        elif letter == "m" and not torch.is_grad_enabled():
            self._keep(first)
            return True
        return False

    def _update(self, by: str, name: str, func: Any, run: Callable, args: Any, kwargs: Any) -> Any:
        """Count the values of 16-bit tensors that stay where float32 would have moved them."""
        narrow = floats(args[:1])
        known = ON_GRADIENTS.get(name) == "m" or name.startswith("_fused_")
        if not (narrow and known and {t.dtype for t in narrow} <= {*NARROW}):
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
