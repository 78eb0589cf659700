"""Choose a device, seed it, and say what it can do for mixed precision."""

import os
import platform
from dataclasses import dataclass

import torch

from amp_utils.lesson import ParameterError
from amp_utils.timing import compare


def choose_device(device: str | torch.device = "auto") -> torch.device:
    """The device a lesson runs on: "auto" takes CUDA where there is one, else the CPU.

    "mps" is taken where torch offers it; the course is not tested there. Raises ParameterError for
    a device that is unknown or not there.
    """
    gpus = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()
    name = device.type if isinstance(device, torch.device) else device
    if name not in ("auto", "cpu", *gpus):
        reason = "is not on this machine" if name in ("cuda", "mps") else "is not allowed"
        allowed = ", ".join(map(repr, ("auto", "cpu", *gpus)))
        raise ParameterError(f"device = {name!r} {reason}: give one of {allowed}.")
    if name == "auto":
        name = "cuda" if "cuda" in gpus else "cpu"
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
    python = f"Python {platform.python_version()}"
    lines = [Capability(True, f"torch {torch.__version__}", python)]
    lines += [Capability(gpu, "CUDA GPU", in_use), Capability(True, "CPU", cpu)]
    seconds = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two would wait for each other where a core is busy
    try:
        for name in ("float32", "bfloat16", "float16"):
            seconds[name] = matmul_seconds(getattr(torch, name), device)
    finally:
        torch.set_num_threads(threads)
    for name in ("bfloat16", "float16"):
        ratio = seconds["float32"] / seconds[name]
        speed = f"{ratio:.1f} × the speed of float32"
        verdict = speed if ratio >= 0.1 else "runs, but far slower than float32"
        lines.append(Capability(ratio > 1.1, f"fast {name} matmul", verdict))
    float8 = _multiplies_float8(device)
    verdict = "matrix products run" if float8 else "can be stored here, not multiplied"
    return [*lines, Capability(float8, "float8", verdict)]


def _multiplies_float8(device: torch.device) -> bool:
    """On CUDA from compute capability 8.9 on; elsewhere we try."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 9)
    try:
        eight = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
        return (eight @ eight).dtype == eight.dtype
    except (RuntimeError, TypeError):
        return False


def describe(device: torch.device) -> str:
    """The device's name; a GPU's compute capability and memory, or what a CPU has for 16 bits."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        memory = f"{gpu.total_memory / 2**30:.0f} GiB"
        return f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {memory}"
    sets = ("avx2", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16")
    flags = getattr(torch.cpu, "get_capabilities", dict)()  # only newer versions of torch tell
    found = " ".join(name for name in sets if flags.get(name))
    name, features = platform.processor() or platform.machine(), torch.backends.cpu
    return f"{name}, {os.cpu_count()} cores, {found or features.get_cpu_capability().lower()}"


def matmul_seconds(dtype: torch.dtype, device: torch.device, size: int = 256) -> float:
    """Seconds of a (size, size) matrix product in `dtype`, on a GPU always of size 4096.

    The fastest of up to 200 in half a second: a mean would count what else the machine does.
    """
    if device.type != "cpu":
        size = 4096  # a small product would measure the launch, not the GPU
    a = torch.ones(size, size, dtype=dtype, device=device)
    taken = compare({"product": lambda: a @ a}, repeats=200, device=device, patience=0.5)
    return min(taken["product"].seconds)
