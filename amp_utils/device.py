"""Choose a device, seed it, and say what it can do for mixed precision."""

import os
import platform
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

from amp_utils.lesson import ParameterError


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """The device a lesson runs on: "auto" takes CUDA where there is one, else the CPU.

    "mps" is taken where torch offers it; the course is not tested there. Raises ParameterError for
    a device that is unknown or not there.
    """
    there = ["auto", "cpu"]
    there += ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    name = device.type if isinstance(device, torch.device) else device
    if name not in there:
        reason = "is not on this machine" if name in ("cuda", "mps") else "is not allowed"
        allowed = ", ".join(map(repr, there))
        raise ParameterError(f"device = {name!r} {reason}: give one of {allowed}.")
    if name == "auto":
        name = "cuda" if "cuda" in there else "cpu"
    if name == "mps":
        print("mps: this course is untested on Apple GPUs; expect differences.")
    return torch.device(name)


def set_seed(seed: int) -> None:
    """Seed torch's generators on every device."""
    torch.manual_seed(seed)


@dataclass(frozen=True)
class Capability:
    """One line of the report: is it there, what is it, what does it mean for the course."""

    there: bool
    name: str
    meaning: str

    def __str__(self) -> str:
        return f"[{'OK' if self.there else '--'}] {self.name}: {self.meaning}"


def report(device: torch.device) -> list[Capability]:
    """What this machine offers for mixed precision: versions, devices, speed of 16-bit products."""
    gpu = device.type == "cuda"
    in_use = describe(device) if gpu else "none in use; every lesson runs on the CPU"
    cpu = f"{describe(torch.device('cpu'))}, {torch.get_num_threads()} threads"
    lines = [
        Capability(True, f"torch {torch.__version__}", f"Python {platform.python_version()}"),
        Capability(gpu, "CUDA GPU", in_use),
        Capability(True, "CPU", cpu),
    ]
    baseline = matmul_seconds(torch.float32, device)
    for dtype in (torch.bfloat16, torch.float16):
        ratio = baseline / matmul_seconds(dtype, device)
        speed = f"{ratio:.1f} × the speed of float32"
        verdict = speed if ratio >= 0.1 else "runs, but far slower than float32"
        lines.append(Capability(ratio > 1.1, f"fast {dtype} matmul".replace("torch.", ""), verdict))
    return [*lines, _float8(device)]


def _float8(device: torch.device) -> Capability:
    """Can 8-bit floats be multiplied? On CUDA from compute capability 8.9 on; elsewhere we try."""
    if device.type == "cuda":
        there = torch.cuda.get_device_capability(device) >= (8, 9)
    else:
        try:
            eight = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
            there = (eight @ eight).dtype == torch.float8_e4m3fn
        except (RuntimeError, TypeError):
            there = False
    meaning = "matrix products run" if there else "can be stored here, not multiplied"
    return Capability(there, "float8", meaning)


def describe(device: torch.device) -> str:
    """The device's name, and for a GPU its compute capability and memory in GiB."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}"
    name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {_instructions()}"


def matmul_seconds(
    dtype: torch.dtype, device: torch.device, size: int = 256, repeats: int = 5
) -> float:
    """Median seconds of a (size, size) matrix product in `dtype`; on a GPU `size` is 4096."""
    if device.type != "cpu":
        size = 4096  # a small product would measure the launch, not the GPU
    a = torch.ones(size, size, dtype=dtype, device=device)
    seconds = []
    for _ in range(repeats + 1):
        start = perf_counter()
        (a @ a).sum().item()  # item() waits for the device
        seconds.append(perf_counter() - start)
    return median(seconds[1:])


def _instructions() -> str:
    """The instruction sets that matter for 16-bit arithmetic, where torch can tell."""
    sets = ("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    flags = getattr(torch.cpu, "get_capabilities", dict)()
    names = " ".join(name for name in sets if flags.get(name))
    return names or torch.backends.cpu.get_cpu_capability().lower()
