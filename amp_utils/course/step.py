"""Training steps to measure, and the parts that a step's time goes to."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Run = Callable[[], object]
PARTS = ("products", "casts", "pointwise, loss", "optimizer")
KINDS = {"mm": "products", "addmm": "products", "_to_copy": "casts"}


class Steps:
    """Training steps of a network on one batch, under autocast unless `dtype` is float32."""

    def __init__(
        self, net: nn.Module, inputs: Tensor, targets: Tensor, dtype: torch.dtype, Optimizer: type
    ) -> None:
        device = inputs.device.type
        self.net, self.inputs, self.targets = net.to(device), inputs, targets
        self.optimizer = Optimizer(self.net.parameters(), lr=1e-3)
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

    def parts(self) -> dict[str, Run]:
        """For each part the kernels of a step, with the tensors they had there, to run alone."""
        calls: dict[str, list[Run]] = {part: [] for part in PARTS}
        with Trace() as gradients:
            self.gradients()
        for call in gradients.calls:
            kind = KINDS.get(call.func.overloadpacket.__name__, "pointwise, loss")
            calls[kind].append(call)
        with Trace() as update:
            self.update()
        calls["optimizer"] = update.calls
        return {part: partial(replay, calls[part]) for part in PARTS}


class Trace(TorchDispatchMode):
    """Collects the kernels that run in a block, with their arguments; views cost nothing."""

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
    """Results are kept to the end: as in the step, each takes memory that is not in the caches."""
    _ = [call() for call in calls]


def gain_by_parts(*seconds: float) -> float:
    """The gain that the parts predict, relative to the measured one.

    `seconds` are those of a float32 step and its parts, then of a 16-bit step and its parts.

    >>> gain_by_parts(9.0, 6.0, 3.0, 3.0, 2.0, 1.0)
    1.0
    """
    half = len(seconds) // 2
    (fp32, *fp32_parts), (low, *low_parts) = seconds[:half], seconds[half:]
    return sum(fp32_parts) / sum(low_parts) / (fp32 / low)


def table(name: str, seconds: Sequence[float]) -> str:
    """Where the time goes, and whether the parts explain the gain; `seconds` as above."""
    half = len(seconds) // 2
    pairs = list(zip(seconds[:half], seconds[half:], strict=True))
    total = tuple(map(sum, zip(*pairs[1:], strict=True)))
    lines = [f"\n{name:<24}{'fp32, ms':>12}{'16 bits, ms':>13}{'gain':>8}"]
    rows = zip(("step", *PARTS, "sum of the parts"), (*pairs, total), strict=True)
    for row, (fp32, low) in rows:
        gain = "–" if row == "casts" else f"{fp32 / low:.3f}"
        lines.append(f"{row:<24}{1e3 * fp32:12.2f}{1e3 * low:13.2f}{gain:>8}")
    apart = gain_by_parts(*seconds) - 1
    within = "within" if abs(apart) <= 0.1 else "not within"
    return "\n".join([*lines, f"The parts predict the gain to {apart:+.1%}, {within} 10%."])
