"""Time and peak memory that can be compared: warmed up, synchronised, interleaved, with spread."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, process_time

import torch

from amp_utils.lesson import validate, whole


@dataclass(frozen=True)
class Timing:
    """Wall-clock and CPU seconds of each repeat, in the order they were taken."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        return median(self.seconds)


def compare(
    runs: Mapping[str, Callable[[], object]],
    repeats: int = 7,
    warmup: int = 1,
    device: torch.device | str = "cpu",
    patience: float = math.inf,
) -> dict[str, Timing]:
    """Time functions in turn, A B A B …, so that a change of the machine's speed meets all alike.

    Each function is called `warmup` times without a clock; the device is synchronised before every
    reading. After the first repeat, none starts once `patience` seconds have passed.
    """
    validate({"repeats": repeats, "warmup": warmup}, repeats=whole(1), warmup=whole(0))
    for run in [*runs.values()] * warmup:
        run()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    deadline = perf_counter() + patience
    for repeat in range(repeats):
        if repeat == 0 or perf_counter() < deadline:
            for name, run in runs.items():
                synchronize(device)
                start, cpu_start = perf_counter(), cpu_clock()
                run()
                synchronize(device)
                taken[name].append((perf_counter() - start, cpu_clock() - cpu_start))
    return {name: Timing(*zip(*readings, strict=True)) for name, readings in taken.items()}


def cpu_clock() -> float:
    """CPU seconds used so far by all threads of this process and by its children that ended."""
    return process_time() + sum(os.times()[2:4])


def ratio(a: Timing, b: Timing) -> tuple[float, float]:
    """How many times longer a takes than b: median and interquartile range of the paired ratios."""
    ratios = [x / y for x, y in zip(a.seconds, b.seconds, strict=True)]
    low, middle, high = quantiles(ratios if len(ratios) > 1 else ratios * 2, method="inclusive")
    return middle, high - low


def interval(values: Sequence[float], resamples: int = 4000) -> tuple[float, float]:
    """95% interval of the median: the seeded percentile bootstrap of Efron and Tibshirani (1993).

    Of fewer than six values it is the range, which holds the median in 1 - 2^(1 - n) of cases.
    """
    sample = torch.tensor(values, dtype=torch.float64)
    shape, generator = (resamples, len(sample)), torch.Generator().manual_seed(0)
    medians = sample[torch.randint(len(sample), shape, generator=generator)].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished: GPUs return before they are done, CPUs do not."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.device(device).type == "mps":
        torch.mps.synchronize()
