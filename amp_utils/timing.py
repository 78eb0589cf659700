"""Time and peak memory, measured so that they can be compared: warmed up, synchronised, interleaved, with spread."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter

import torch


@dataclass(frozen=True)
class Timing:
    """Seconds of each repeat, in the order they were taken."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range in seconds: the middle half of the repeats lies within it. 0 for a single repeat."""
        return _spread(self.seconds)


def compare(
    runs: Mapping[str, Callable[[], object]],
    repeats: int = 7,
    warmup: int = 1,
    device: torch.device | str = "cpu",
) -> dict[str, Timing]:
    """Time several functions in turn, A B A B …, so that a change of the machine's speed meets all of them alike.

    Each is called `warmup` times first without a clock, and the device is synchronised before every reading. Raises
    ValueError for no runs, repeats < 1 or warmup < 0; what a run raises passes through.
    """
    if not runs:
        raise ValueError("runs is empty: give at least one function to time.")
    if repeats < 1:
        raise ValueError(f"repeats = {repeats} is not allowed: give a whole number of at least 1.")
    if warmup < 0:
        raise ValueError(f"warmup = {warmup} is not allowed: give a whole number of at least 0.")
    for run in runs.values():
        for _ in range(warmup):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            synchronize(device)
            start = perf_counter()
            run()
            synchronize(device)
            seconds[name].append(perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def ratio(a: Timing, b: Timing) -> tuple[float, float]:
    """How many times longer a takes than b: median of the paired ratios, and their interquartile range."""
    ratios = [x / y for x, y in zip(a.seconds, b.seconds, strict=True)]
    return median(ratios), _spread(ratios)


def peak_memory(run: Callable[[], object], device: torch.device | str) -> int | None:
    """Most bytes of tensors that `run` held on a CUDA device, above what was there before; None elsewhere.

    None is the honest answer on a CPU: torch keeps no peak of its CPU tensors, and the operating system's figure is one
    peak for the whole process that cannot be set back for a block.
    """
    if torch.device(device).type != "cuda":
        return None
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished: GPUs return before they are done. Does nothing on a CPU."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def _spread(values: tuple[float, ...] | list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4, method="inclusive")
    return high - low
