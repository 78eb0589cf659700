"""Dynamic loss scaling from scratch, and a flight recorder for any scaler.

`LossScaler` does what `torch.amp.GradScaler` does, bit for bit, in plain tensor code (the algorithm is that of
Micikevicius et al., arXiv 1710.03740, section 3.2, as torch made it dynamic): multiply the loss by a scale, divide the
gradients by it, leave out the step when a gradient is inf or NaN, and let the scale follow what happened.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass
class _Seen:
    """What has happened to one optimizer since the last update."""

    unscaled: bool = False
    stepped: bool = False
    found_inf: bool | None = None  # None: its gradients were not looked at


class LossScaler:
    """Dynamic loss scaling, call-compatible with `torch.amp.GradScaler` and equal to it bit for bit.

    scale(loss).backward() → unscale_(optimizer), if the gradients are to be looked at → step(optimizer) → update().
    The scale is a float32 tensor; it appears with the first call of `scale`. With enabled=False, or for device "cuda"
    where there is no GPU, everything passes through.
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
        self._device = device
        self._enabled = enabled and (device != "cuda" or torch.cuda.is_available())
        if self._enabled and growth_factor <= 1.0:
            raise AssertionError("The growth factor must be > 1.0.")
        if self._enabled and backoff_factor >= 1.0:
            raise AssertionError("The backoff factor must be < 1.0.")
        self._growth_factor, self._backoff_factor = growth_factor, backoff_factor
        self._growth_interval, self._growth_tracker = growth_interval, 0
        self._init_scale, self._scale = init_scale, None
        self._seen: dict[int, _Seen] = {}

    def scale(self, outputs: Tensor | Iterable) -> Tensor | Iterable:
        """Multiply a tensor, or every tensor of a nested iterable, by the scale. Raises ValueError for others."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._scale = torch.tensor(self._init_scale, dtype=torch.float32, device=outputs.device)
            return outputs * self._scale.to(outputs.device)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note whether any was inf or NaN.

        Raises RuntimeError when called twice, or after `step`; ValueError for float16 gradients, in which the division
        would lose what the scale has saved.
        """
        if not self._enabled:
            return
        seen = self._since_update(optimizer, "unscale_")
        if seen.stepped:
            raise RuntimeError("unscale_() is being called after step().")
        if seen.unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        gradients = _gradients(optimizer)
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        # The reciprocal in float64 and rounded once, as torch does it: float32 division differs on some devices.
        inverse = self._scale.double().reciprocal().float()
        finite = [torch.isfinite(gradient).all().to(inverse.device) for gradient in gradients]
        with torch.no_grad():
            for gradient in gradients:
                gradient.mul_(inverse.to(gradient.device))
        seen.unscaled = True
        seen.found_inf = not torch.stack(finite).all().item() if finite else None

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale if that has not been done, then step the optimizer, unless a gradient was inf or NaN."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        seen = self._since_update(optimizer, "step")
        if seen.stepped:
            raise RuntimeError("step() has already been called since the last update().")
        if not seen.unscaled:
            self.unscale_(optimizer)
        if seen.found_inf is None:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = None if seen.found_inf else optimizer.step(*args, **kwargs)
        seen.stepped = True
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Let the scale back off after an inf or NaN, grow after `growth_interval` good steps, or become `new_scale`."""
        if not self._enabled:
            return
        self._require_scale("update")
        if new_scale is not None:
            self._set_scale(new_scale)
        else:
            found = [seen.found_inf for seen in self._seen.values() if seen.found_inf is not None]
            if not found:
                raise AssertionError("No inf checks were recorded prior to update.")
            self._adapt(any(found))
        self._seen = {}

    def _adapt(self, found_inf: bool) -> None:
        if found_inf:
            self._scale.copy_(self._scale.double() * self._backoff_factor)
            self._growth_tracker = 0
            return
        self._growth_tracker += 1
        if self._growth_tracker == self._growth_interval:
            grown = (self._scale.double() * self._growth_factor).float()
            if math.isfinite(grown.item()):
                self._scale.copy_(grown)
            self._growth_tracker = 0

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            usable = new_scale.device.type == self._device and new_scale.numel() == 1 and not new_scale.requires_grad
            if not usable:
                raise AssertionError(
                    "new_scale should be a float or a 1-element torch.cuda.FloatTensor or "
                    "torch.FloatTensor with requires_grad=False."
                )
        self._scale.copy_(torch.as_tensor(new_scale).reshape(()))

    def get_scale(self) -> float:
        """The scale as a Python float; 1.0 when disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else self._scale.item()

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

    def is_enabled(self) -> bool:
        return self._enabled

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, under the names that torch's scaler uses; empty when disabled."""
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
        """Take over the state of a scaler of this class or of torch's. Raises RuntimeError for an empty state."""
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled instance of GradScaler."
            )
        self._init_scale = state_dict["scale"]
        if self._scale is not None:
            self._scale.fill_(state_dict["scale"])
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._growth_tracker = state_dict["_growth_tracker"]

    def _require_scale(self, caller: str) -> None:
        if self._scale is None:
            raise AssertionError(
                f"Attempted {caller} but _scale is None.  This may indicate your script did not use "
                "scaler.scale(loss or outputs) earlier in the iteration."
            )

    def _since_update(self, optimizer: Optimizer, caller: str) -> _Seen:
        self._require_scale(caller)
        return self._seen.setdefault(id(optimizer), _Seen())


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """The values of all gradients that there are; of a sparse one those that are stored."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]


class Row(NamedTuple):
    """One optimiser step, from one update to the next."""

    step: int  # 1, 2, 3, …
    scale: float  # the scale this step was made with
    found_inf: bool  # an optimizer met an inf or NaN gradient
    skipped: int  # how many optimizers left out their step
    growth_tracker: int  # good steps in a row, after the update


class FlightRecorder:
    """Wraps a `LossScaler` or `torch.amp.GradScaler`: use it in the scaler's place and read `rows` afterwards.

    Everything else is the scaler's own. A disabled scaler is recorded too: scale 1, nothing skipped.
    """

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.rows: list[Row] = []
        self._skipped = 0

    def __getattr__(self, name: str) -> Any:
        if name == "scaler":  # not there yet while copying or unpickling
            raise AttributeError(name)
        return getattr(self.scaler, name)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """The scaler's step; notes whether the optimizer was really stepped."""
        stepped = False

        def note(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            nonlocal stepped
            # A fused optimizer is always called and skips by itself: torch tells it so in this attribute.
            found_inf = getattr(optimizer, "found_inf", None)
            stepped = found_inf is None or found_inf.item() == 0

        hook = optimizer.register_step_pre_hook(note)
        try:
            result = self.scaler.step(optimizer, *args, **kwargs)
        finally:
            hook.remove()
        self._skipped += not stepped
        return result

    def update(self, *args: Any, **kwargs: Any) -> None:
        """The scaler's update; adds a row."""
        scale = self.scaler.get_scale()
        self.scaler.update(*args, **kwargs)
        tracker = self.scaler.state_dict().get("_growth_tracker", 0)
        self.rows.append(Row(len(self.rows) + 1, scale, self._skipped > 0, self._skipped, tracker))
        self._skipped = 0
