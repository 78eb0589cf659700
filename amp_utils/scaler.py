"""Dynamic loss scaling from scratch, and a flight recorder for any scaler.

The idea is that of Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, section 3.2: multiply the
loss, and by the chain rule every gradient, by a scale that lifts them above fp16's smallest number; divide before
the optimizer sees them; leave out a step whose gradients overflowed. The scale then follows what happened.
"""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaler:
    """Dynamic loss scaling in plain tensor code, call-compatible with `torch.amp.GradScaler` and bit-equal to it.

    scale(loss).backward(), then unscale_(optimizer) if you want to see or clip the gradients, then step(optimizer),
    and at the end update(). Misuse raises what torch raises. The scale is a 0-d float32 tensor, made by the first
    call of `scale` on the device of what it is given. With enabled=False, or device="cuda" without a GPU (which
    warns), nothing is scaled and `step` is the optimizer's own.

    Differs from torch: a fused optimizer gets its gradients unscaled like any other, not inside its kernel, which
    rounds differently when the scale is no power of two.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if enabled and device == "cuda" and not torch.cuda.is_available():
            warnings.warn(
                "LossScaler found no CUDA GPU and is disabled; for the CPU give device='cpu'.",
                stacklevel=2,
            )
            enabled = False
        if enabled and growth_factor <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if enabled and backoff_factor >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        self._device, self._enabled = device, enabled
        self._init_scale, self._scale = init_scale, None
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = growth_interval, 0
        # Since the last update, by id(optimizer): was an inf or NaN found (None: no gradients)? Who called step?
        self._found_inf: dict[int, Tensor | None] = {}
        self._stepped: set[int] = set()

    def scale(self, outputs: Tensor | Iterable) -> Tensor | Iterable:
        """Multiply a tensor, or each tensor in nested iterables, by the scale; ValueError for anything else."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._scale = torch.tensor(
                    self._init_scale, dtype=torch.float32, device=outputs.device
                )
            return outputs * self._scale.to(outputs.device)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note whether one was inf or NaN.

        Raises RuntimeError for a second call, or one after `step`, before `update`; ValueError for float16 gradients,
        in which dividing would lose what scaling has saved.
        """
        if not self._enabled:
            return
        self._require_scale("unscale_")
        if id(optimizer) in self._stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if id(optimizer) in self._found_inf:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last update()."
            )
        parameters = [
            p for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        gradients = [p.grad._values() if p.grad.is_sparse else p.grad for p in parameters]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        # Taken in float64 and rounded once: float32 division is inexact under some compiler settings.
        inverse = self._scale.double().reciprocal().float()
        finite = [gradient.isfinite().all().to(inverse.device) for gradient in gradients]
        for gradient in gradients:
            gradient.mul_(inverse.to(gradient.device))
        self._found_inf[id(optimizer)] = ~torch.stack(finite).all() if finite else None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale, if that is still to do, and return optimizer.step(...); None if an inf or NaN made it skip."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._require_scale("step")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if id(optimizer) not in self._found_inf:
            self.unscale_(optimizer)
        found_inf = self._found_inf[id(optimizer)]
        if found_inf is None:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = None if found_inf else optimizer.step(*args, **kwargs)  # `if` waits for the device
        self._stepped.add(id(optimizer))
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Close the iteration: shrink the scale if any optimizer met an inf or NaN, else grow it when that is due.

        Growth is due after `growth_interval` good iterations in a row, and left out if it would reach infinity. A
        `new_scale`, a float or a 0-d tensor on the scaler's device, is taken instead of all that.
        """
        if not self._enabled:
            return
        self._require_scale("update")
        found_inf = [found for found in self._found_inf.values() if found is not None]
        if isinstance(new_scale, float):
            self._scale.fill_(new_scale)
        elif new_scale is not None:
            if (
                new_scale.device.type != self._device
                or new_scale.numel() != 1
                or new_scale.requires_grad
            ):
                kinds = "a float or a 1-element torch.cuda.FloatTensor or torch.FloatTensor with requires_grad=False."
                raise AssertionError(f"new_scale should be {kinds}")
            self._scale.copy_(new_scale)
        elif not found_inf:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            self._adapt(any(found_inf))
        self._found_inf, self._stepped = {}, set()

    def _adapt(self, found_inf: bool) -> None:
        self._growth_tracker = 0 if found_inf else self._growth_tracker + 1
        if found_inf:
            self._scale.copy_(
                self._scale.double() * self._backoff_factor
            )  # rounds once, as it copies to float32
        elif self._growth_tracker == self._growth_interval:
            grown = (self._scale.double() * self._growth_factor).float()
            self._scale.copy_(torch.where(grown.isfinite(), grown, self._scale))
            self._growth_tracker = 0

    def _require_scale(self, caller: str) -> None:
        if self._scale is None:
            fix = "This may indicate your script did not use scaler.scale(loss or outputs) earlier in the iteration."
            raise AssertionError(f"Attempted {caller} but _scale is None.  {fix}")

    def get_scale(self) -> float:
        """The scale as a Python float, 1.0 when disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

    def is_enabled(self) -> bool:
        return self._enabled

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        self._growth_interval = new_interval

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, in the keys of torch's scaler; empty when disabled. Call it after `update`."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the state of a LossScaler or of torch's scaler; RuntimeError if it was saved disabled."""
        if not self._enabled:
            return
        if len(state_dict) == 0:
            saved = "possibly because it was saved from a disabled instance of GradScaler."
            raise RuntimeError(f"The source state dict is empty, {saved}")
        self._init_scale = state_dict["scale"]
        if self._scale is not None:
            self._scale.fill_(self._init_scale)
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]


class Row(NamedTuple):
    """One iteration, as a scaler saw it."""

    step: int  # 1, 2, 3, …
    scale: float  # with which this iteration's gradients were made
    found_inf: bool  # an optimizer met an inf or NaN gradient
    skipped: int  # how many optimizers did not step
    growth_tracker: int  # good iterations in a row, after the update


class FlightRecorder:
    """Stands in for a `LossScaler` or a `torch.amp.GradScaler` and adds a Row to `rows` at each update.

    Everything else is the scaler's own. A disabled scaler is recorded too, with scale 1. On a GPU each update waits
    for the device, since the scale is read back.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.rows: list[Row] = []
        # Since the last update, by id(optimizer): did it step? None: it was unscaled, and step not called yet.
        self._ran: dict[int, bool | None] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "scaler":  # only while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.scaler, name)

    def unscale_(self, optimizer: Optimizer) -> None:
        """The scaler's `unscale_`."""
        self.scaler.unscale_(optimizer)
        self._ran.setdefault(id(optimizer), None)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """The scaler's `step`; a hook, removed again, tells whether the optimizer really stepped."""
        ran = False

        def note(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            nonlocal ran
            # Torch's scaler always calls a fused optimizer, which skips by itself if this attribute says so.
            ran = not getattr(optimizer, "found_inf", False)

        hook = optimizer.register_step_pre_hook(note)
        try:
            result = self.scaler.step(optimizer, *args, **kwargs)
        finally:
            hook.remove()
        self._ran[id(optimizer)] = ran
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The scaler's `update`; adds a row."""
        scale, before = self.scaler.get_scale(), self.scaler.state_dict()
        self.scaler.update(new_scale)
        after = self.scaler.state_dict()
        ran = self._ran.values()
        # A scaler keeps the finding of an optimizer that was unscaled and never stepped to itself: ask the scale.
        found_inf = False in ran or (
            None in ran and new_scale is None and _backed_off(before, after)
        )
        skipped = len(ran) - sum(map(bool, ran))
        tracker = after.get("_growth_tracker", 0)
        self.rows.append(Row(len(self.rows) + 1, float(scale), found_inf, skipped, tracker))
        self._ran = {}


def _backed_off(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether an update met an inf: it alone starts the tracker anew without growth being due."""
    if not before or after["_growth_tracker"] != 0:
        return False
    growth_was_due = before["_growth_tracker"] + 1 == before["growth_interval"]
    return not growth_was_due or after["scale"] < before["scale"]
