"""The recipe's training step and its products in every precision that a device has."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from amp_utils.timing import Timing

# Dense peaks in TFLOP/s, sums in float32, by a part of the device's name: NVIDIA's data sheets
# (H200, H100, A100, L4, T4, V100) and its Ada and Ampere GA102 white papers (RTX).
PEAKS = {
    "H200": {"fp32": 67, "tf32": 494, "bf16": 989, "fp16": 989, "fp8": 1979},
    "H100 80GB HBM3": {"fp32": 67, "tf32": 494, "bf16": 989, "fp16": 989, "fp8": 1979},
    "H100 PCIe": {"fp32": 51, "tf32": 378, "bf16": 756, "fp16": 756, "fp8": 1513},
    "A100": {"fp32": 19.5, "tf32": 156, "bf16": 312, "fp16": 312},
    "L4": {"fp32": 30.3, "tf32": 60, "bf16": 121, "fp16": 121, "fp8": 242},
    "T4": {"fp32": 8.1, "fp16": 65},
    "V100": {"fp32": 15.7, "fp16": 125},
    "RTX 4090": {"fp32": 82.6, "tf32": 82.6, "bf16": 165, "fp16": 165, "fp8": 330},
    "RTX 3090": {"fp32": 35.6, "tf32": 35.6, "bf16": 71, "fp16": 71},
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}


def in_tf32(run: Callable[[], object]) -> None:
    """Call `run` while float32 products on CUDA round their inputs to TF32."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        run()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def names(device: torch.device) -> list[str]:
    """The precisions that the device computes in; TF32 and fp8 need CUDA and its newer units."""
    if device.type != "cuda":
        return ["fp32", "bf16", "fp16"]
    newest = torch.cuda.get_device_capability(device)
    since = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "fp8": (8, 9)}
    return [name for name, capability in since.items() if newest >= capability]


def product(name: str, rows: int, width: int, device: torch.device) -> Callable[[], object]:
    """A product (rows, width) · (width, width) in the given precision."""
    a, b = torch.ones(rows, width, device=device), torch.ones(width, width, device=device)
    if name == "fp8":
        a, b, one = a.to(DTYPES["fp8"]), b.to(DTYPES["fp8"]).t(), torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
    if name in DTYPES:
        a, b = a.to(DTYPES[name]), b.to(DTYPES[name])
    return partial(in_tf32, lambda: a @ b) if name == "tf32" else lambda: a @ b


def graphed(net: nn.Module, optimizer, batch, dtype: torch.dtype) -> Callable[[], object]:
    """A whole training step without a scaler as one CUDA graph, which a call replays."""
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        # A cached cast would be a tensor of the capture, stale at every replay.
        with torch.autocast("cuda", dtype, cache_enabled=False):
            loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        optimizer.step()

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # warm up, as a capture must not allocate for the first time
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def table(title: str, taken: dict[str, Timing], flops: float, device: torch.device) -> str:
    """Milliseconds, TFLOP/s and the share of the device's peak, where that is known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = next((peaks for part, peaks in PEAKS.items() if part in name), {})
    lines = [f"\n{title:<34}{'ms':>9}{'TFLOP/s':>10}{'of peak':>9}"]
    for row, timing in taken.items():
        rate = flops / timing.median / 1e12
        peak = peaks.get(row.split()[0])
        share = f"{rate / peak:9.0%}" if peak else ""
        lines.append(f"{row:<34}{1e3 * timing.median:9.3f}{rate:10.3g}{share}")
    return "\n".join(lines)
