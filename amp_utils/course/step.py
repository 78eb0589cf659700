"""Training steps to measure, and the parts of the time that a step takes."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], object]
KINDS = {"mm": "products", "addmm": "products", "_to_copy": "casts"}
PARTS = ("products", "casts", "pointwise, loss", "optimizer")


class Steps:
    """Training steps of a network on one batch, under autocast unless `dtype` is float32."""

    def __init__(
        self, net: nn.Module, batch: Sequence[Tensor], dtype: torch.dtype, kind=torch.optim.SGD
    ) -> None:
        self.inputs, self.targets = batch
        self.net, device = net.to(self.inputs.device), self.inputs.device.type
        self.optimizer = kind(self.net.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
        self.autocast = torch.autocast(device, dtype, enabled=dtype != torch.float32)

    def gradients(self) -> None:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = nn.functional.mse_loss(self.net(self.inputs), self.targets)
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, count: int = 1) -> None:
        for _ in range(count):
            self.gradients()
            self.update()

    def parts(self) -> list[Run]:
        """Each of PARTS alone: its kernels in order, with the tensors that they get in a step."""
        calls: dict[str, list[Run]] = {part: [] for part in PARTS}
        with Trace() as trace:
            self.gradients()
        for call in trace.calls:
            calls[KINDS.get(call.func.overloadpacket.__name__, "pointwise, loss")].append(call)
        with Trace() as trace:
            self.update()
        calls["optimizer"] = trace.calls
        return [partial(replay, calls[part]) for part in PARTS]


class Trace(TorchDispatchMode):
    """Collects the kernels that run in a block, with their arguments; views are free."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[partial] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        call = partial(func, *args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.calls.append(call)
        return call()


@torch.no_grad()
def replay(calls: Sequence[Run]) -> None:
    """Keep the results to the end: in a step, too, they take new memory that no cache holds."""
    _ = [call() for call in calls]


def gain_by_parts(*seconds: float) -> float:
    """The gain that the parts predict over the measured one.

    `seconds` are those of a float32 step and its parts, then of a 16-bit step and its parts.
    """
    half = len(seconds) // 2
    (fp32, *fp32_parts), (low, *low_parts) = seconds[:half], seconds[half:]
    return sum(fp32_parts) / sum(low_parts) / (fp32 / low)


def table(name: str, seconds: Sequence[float], gain_by_parts: float) -> str:
    """Where a step's time goes, and how well the parts explain the gain."""
    half = len(seconds) // 2
    rows = dict(
        zip(("step", *PARTS), zip(seconds[:half], seconds[half:], strict=True), strict=True)
    )
    rows["sum of the parts"] = sum(seconds[1:half]), sum(seconds[half + 1 :])
    lines = [f"\n{name:<20}{'fp32, ms':>10}{'16 bits, ms':>13}{'gain':>8}"]
    for row, (fp32, low) in rows.items():
        gain = "" if row == "casts" else f"{fp32 / low:8.3f}"
        lines.append(f"{row:<20}{1e3 * fp32:10.2f}{1e3 * low:13.2f}{gain}")
    within = "within" if abs(gain_by_parts - 1) <= 0.1 else "not within"
    return "\n".join([*lines, f"Gain by the parts: {gain_by_parts - 1:+.1%}, {within} 10%."])
