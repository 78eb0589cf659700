"""A training step of the recipe taken apart: how much of it is products, casts, pointwise work, optimizer."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from amp_utils import models

KINDS = {"mm": "products", "addmm": "products", "_to_copy": "casts"}  # the rest is pointwise
PARTS = ("products", "casts", "pointwise, loss", "optimizer")


class Recipe:
    """Training steps of the recipe: three linear layers of `width` neurons under autocast."""

    def __init__(self, device: torch.device, dtype: torch.dtype, width: int, batch: int) -> None:
        self.net = models.mlp(width, width, width).to(device)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1e-3)
        self.inputs, self.targets = torch.randn(2, batch, width, device=device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.autocast = torch.autocast(device.type, dtype, enabled=dtype != torch.float32)

    def gradients(self, scaler) -> None:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = nn.functional.mse_loss(self.net(self.inputs), self.targets)
        scaler.scale(loss).backward()

    def update(self, scaler) -> None:
        scaler.step(self.optimizer)
        scaler.update()

    def train(self, steps: int = 1, scaler=None) -> None:
        """Take steps, with the recipe's own scaler unless another is given."""
        for _ in range(steps):
            self.gradients(scaler or self.scaler)
            self.update(scaler or self.scaler)

    def parts(self) -> dict[str, Callable[[], None]]:
        """The whole step, and each kind of its work alone: its kernels in order, on its tensors."""
        with Trace() as forward_backward:
            self.gradients(self.scaler)
        with Trace() as update:
            self.update(self.scaler)
        calls: dict[str, list[partial]] = {part: [] for part in PARTS}
        for call in forward_backward.calls:
            name = call.func.overloadpacket.__name__
            calls[KINDS.get(name, "pointwise, loss")].append(call)
        calls["optimizer"] = update.calls
        return {"step": self.train, **{part: partial(replay, calls[part]) for part in PARTS}}


class Trace(TorchDispatchMode):
    """Collects the kernels that run in a block, with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[partial] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = partial(func, *args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.calls.append(call)
        return call()


@torch.no_grad()
def replay(calls: Sequence[partial]) -> None:
    """Run the kernels again."""
    for call in calls:
        call()


def gain_by_parts(*seconds: float) -> float:
    """The gain that the parts predict over the measured one.

    `seconds` are those of a float32 step and its parts, then of a 16-bit step and its parts.

    >>> gain_by_parts(9.0, 6.0, 3.0, 3.0, 2.0, 1.0)
    1.0
    """
    half = len(seconds) // 2
    (fp32, *fp32_parts), (low, *low_parts) = seconds[:half], seconds[half:]
    return sum(fp32_parts) / sum(low_parts) / (fp32 / low)


def table(name: str, fp32: Sequence[float], low: Sequence[float]) -> str:
    """Where the seconds of a step go, step and parts given, and whether the parts explain its gain."""
    rows = {"step": (fp32[0], low[0]), "sum of its parts": (sum(fp32[1:]), sum(low[1:]))}
    rows |= dict(zip([f"  {part}" for part in PARTS], zip(fp32[1:], low[1:]), strict=True))
    lines = [f"\n{name:<24}{'fp32, ms':>12}{'16 bits, ms':>12}{'ratio':>9}"]
    for row, (wide, narrow) in rows.items():
        ratio = f"{wide / narrow:9.3f}" if "casts" not in row else ""
        lines.append(f"{row:<24}{1e3 * wide:12.2f}{1e3 * narrow:12.2f}{ratio}")
    apart = gain_by_parts(*fp32, *low) - 1
    within = "within" if abs(apart) <= 0.1 else "not within"
    return "\n".join([*lines, f"The parts predict the gain to {apart:+.1%}: {within} 10%."])
