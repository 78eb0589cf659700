"""Dynamic loss scaling from scratch, and a flight recorder for any scaler.

After Micikevicius et al., *Mixed Precision Training*, arXiv 1710.03740, section 3.2.
"""

import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partialmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(eq=False)
class LossScaler:
    """Dynamic loss scaling in plain tensor code, call-compatible with `torch.amp.GradScaler`.

    Call scale(loss).backward(), unscale_(optimizer) if you want to see or clip the gradients,
    step(optimizer), and at the end update(). Misuse raises torch's errors. With enabled=False, or
    device="cuda" without a GPU, which warns, nothing is scaled and `step` is the optimizer's own.

    Bit-equal to torch's scaler on the CPU. On a GPU a bfloat16 gradient may differ in its last bit
    if the scale is no power of two. An optimizer that calls torch's private methods will not run.
    """

    device: str = "cuda"
    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True
    _saved = ("growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")

    def __post_init__(self) -> None:
        if self.enabled and self.device == "cuda" and not torch.cuda.is_available():
            warnings.warn("No CUDA GPU: LossScaler is disabled. Try device='cpu'.", stacklevel=3)
            self.enabled = False
        if self.enabled and not self.growth_factor > 1.0 > self.backoff_factor:
            raise AssertionError("growth_factor must be > 1.0, and backoff_factor < 1.0.")
        self._scale, self._growth_tracker = None, 0
        # Since the last update, by id(optimizer). A finding is empty where there are no gradients.
        self._found_inf: dict[int, dict[torch.device, Tensor]] = {}
        self._called: dict[int, str] = {}  # "unscale_", then "step"

    def scale(self, outputs: Tensor | Iterable) -> Tensor | Iterable:
        """Multiply a tensor, or each tensor in nested iterables, by the scale."""
        if not self.enabled:
            return outputs
        if isinstance(outputs, Tensor):
            if self._scale is None:
                self._scale = outputs.new_full((), self.init_scale, dtype=torch.float32)
            return outputs * self._scale.to(outputs.device)
        if isinstance(outputs, Iterable):
            scaled = map(self.scale, outputs)
            return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled
        raise ValueError("outputs must be a Tensor or an iterable of Tensors")

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, in place, and note inf and NaN.

        ValueError for float16 gradients, in which dividing would lose what scaling has saved.
        """
        if not self.enabled:
            return
        self._require_scale("unscale_")
        if called := self._called.get(id(optimizer)):
            raise RuntimeError(f"unscale_() after {called}() and before update().")
        if any(gradient.dtype == torch.float16 for gradient in _gradients(optimizer)):
            raise ValueError("Attempting to unscale FP16 gradients.")
        self._find_inf(optimizer)
        # Taken in float64, rounded once: float32 division is inexact under some compiler settings.
        inverse = self._scale.double().reciprocal().float()
        for gradient in _gradients(optimizer):
            gradient.mul_(inverse.to(gradient.device))
        self._called[id(optimizer)] = "unscale_"

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that is still to do, then return optimizer.step(...), or skip it after an inf.

        An optimizer that handles scaling itself, as fused ones do, is always called.
        """
        if not self.enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._require_scale("step")
        if self._called.get(id(optimizer)) == "step":
            raise RuntimeError("step() has already been called since the last update().")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            result = self._step_scaled(optimizer, *args, **kwargs)
        else:
            if id(optimizer) not in self._called:
                self.unscale_(optimizer)
            if not (found_inf := self._found_inf_per_device(optimizer).values()):
                raise AssertionError("No inf checks were recorded for this optimizer.")
            result = None if any(found_inf) else optimizer.step(*args, **kwargs)  # any() waits
        self._called[id(optimizer)] = "step"
        return result

    def _step_scaled(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step an optimizer that divides by `grad_scale`, and skips if `found_inf`, by itself."""
        if "grad_scaler" in inspect.signature(optimizer.step).parameters:  # the older contract
            return optimizer.step(*args, **kwargs, grad_scaler=self)
        if id(optimizer) in self._called:
            optimizer.grad_scale = getattr(optimizer, "grad_scale", None)
        else:
            self._find_inf(optimizer)
            optimizer.grad_scale = self._scale * getattr(optimizer, "grad_scale", 1)
        optimizer.found_inf = sum(self._found_inf_per_device(optimizer).values())
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf

    def _find_inf(self, optimizer: Optimizer) -> None:
        gradients, home = _gradients(optimizer), self._scale.device
        if any(gradient.is_complex() for gradient in gradients):
            raise NotImplementedError("Attempting to unscale complex gradients.")
        bad = [~gradient.isfinite().all().to(home) for gradient in gradients]
        self._found_inf[id(optimizer)] = {home: torch.stack(bad).any().float()} if bad else {}

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[torch.device, Tensor]:
        """Named as in torch, so that FlightRecorder can ask either scaler."""
        return self._found_inf.get(id(optimizer), {})

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Shrink the scale after an inf or NaN; grow it after `growth_interval` good iterations.

        It never grows to infinity. `new_scale`, a float or one-element tensor, replaces all that.
        """
        if not self.enabled:
            return
        self._require_scale("update")
        found_inf = [inf for found in self._found_inf.values() for inf in found.values()]
        if isinstance(new_scale, float):
            self._scale.fill_(new_scale)
        elif new_scale is not None:
            place, size = new_scale.device.type, new_scale.numel()
            if (place, size, new_scale.requires_grad) != (self.device, 1, False):
                raise AssertionError("new_scale should be a float or a 1-element tensor.")
            self._scale.copy_(new_scale)
        elif not found_inf:
            raise AssertionError("No inf checks were recorded prior to update.")
        elif any(found_inf):
            self._scale.copy_(self._scale.double() * self.backoff_factor)  # rounded once
            self._growth_tracker = 0
        else:
            self._growth_tracker += 1
            if self._growth_tracker == self.growth_interval:
                grown = (self._scale.double() * self.growth_factor).float()
                self._scale.copy_(torch.where(grown.isfinite(), grown, self._scale))
                self._growth_tracker = 0
        self._found_inf, self._called = {}, {}

    def _require_scale(self, caller: str) -> None:
        if self._scale is None:
            raise AssertionError(f"Attempted {caller} but _scale is None: call scale(loss) first.")

    def get_scale(self) -> float:
        """The scale as a Python float, 1.0 when disabled. Waits for the device."""
        if not self.enabled:
            return 1.0
        return self.init_scale if self._scale is None else self._scale.item()

    def is_enabled(self) -> bool:
        return self.enabled

    get_growth_factor = partialmethod(getattr, "growth_factor")
    set_growth_factor = partialmethod(setattr, "growth_factor")
    get_backoff_factor = partialmethod(getattr, "backoff_factor")
    set_backoff_factor = partialmethod(setattr, "backoff_factor")
    get_growth_interval = partialmethod(getattr, "growth_interval")
    set_growth_interval = partialmethod(setattr, "growth_interval")

    def state_dict(self) -> dict[str, Any]:
        """The state to save after `update`, in the keys of torch's scaler; empty when disabled."""
        if not self.enabled:
            return {}
        return {"scale": self.get_scale()} | {name: getattr(self, name) for name in self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a LossScaler or of torch's; RuntimeError if it was saved disabled."""
        if not self.enabled:
            return
        if not state_dict:
            raise RuntimeError("The source state dict is empty: was its scaler disabled?")
        self.init_scale = state_dict["scale"]
        if self._scale is not None:
            self._scale.fill_(self.init_scale)
        for name in self._saved:
            setattr(self, name, state_dict[name])

    def __getstate__(self) -> dict[str, Any]:
        """Pickled without its tensor, so that it can be loaded where there is no GPU."""
        if self._found_inf or self._called:
            raise AssertionError("A scaler may only be pickled at the end, after update().")
        return self.__dict__ | {"init_scale": self.get_scale(), "_scale": None}


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """The optimizer's gradients; of a sparse one, the values it stores."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    return [g._values() if g.is_sparse else g for g in gradients if g is not None]


class Row(NamedTuple):
    """One iteration, as a scaler saw it."""

    step: int  # 1, 2, 3, …
    scale: float  # with which this iteration's gradients were made
    found_inf: bool  # the scaler found an inf or NaN gradient
    skipped: int  # how many optimizers did not step
    growth_tracker: int  # good iterations in a row, after the update


class FlightRecorder:
    """Stands in for a `LossScaler` or a `torch.amp.GradScaler` and adds a Row to `rows` per update.

    An optimizer skipped if the scaler found an inf or NaN, or if it was unscaled and never stepped.
    A disabled scaler is recorded too, with scale 1. On a GPU each update waits for the device.
    """

    def __init__(self, scaler: LossScaler | torch.amp.GradScaler) -> None:
        self.scaler, self.rows = scaler, []
        self._seen, self._stepped = set(), set()  # optimizers, since the last update

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("scaler"), name)  # None only while being unpickled

    def unscale_(self, optimizer: Optimizer) -> None:
        self._seen.add(optimizer)
        self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self._seen.add(optimizer)
        result = self.scaler.step(optimizer, *args, **kwargs)
        self._stepped.add(optimizer)
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """The scaler's `update`; adds a row."""
        scale = float(self.scaler.get_scale())
        # Torch has no public way to ask, and `update` does not tell if it is given a new scale.
        ask = self._found_inf_per_device if self.is_enabled() else lambda optimizer: {}
        bad = {optimizer for optimizer in self._seen if any(ask(optimizer).values())}
        self.scaler.update(new_scale)
        skipped = self._seen - (self._stepped - bad)
        tracker = self.scaler.state_dict().get("_growth_tracker", 0)
        self.rows.append(Row(len(self.rows) + 1, scale, bool(bad), len(skipped), tracker))
        self._seen, self._stepped = set(), set()
