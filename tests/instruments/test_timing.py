"""Timing interleaves, warms up and waits for the device; its numbers are those of the clock."""

import itertools
import math
import random
import subprocess
import sys

import pytest
import torch

from amp_utils import timing


@pytest.fixture
def log(monkeypatch):
    """What happened, in order; the clock advances by a second at each reading."""
    events = []
    ticks = itertools.count()
    monkeypatch.setattr(
        timing, "perf_counter", lambda: events.append("clock") or float(next(ticks))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    return events


def test_runs_are_warmed_up_then_interleaved(log):
    runs = {"a": lambda: log.append("a"), "b": lambda: log.append("b")}
    timing.compare(runs, repeats=2, warmup=1)
    assert [event for event in log if event in "ab"] == ["a", "b"] + ["a", "b"] * 2
    assert log[:2] == ["a", "b"], "the clock does not run during the warm-up"


@pytest.mark.parametrize(("patience", "repeats"), [(0, 1), (3, 1), (4, 2), (9, 3), (math.inf, 10)])
def test_patience_ends_the_repeats_but_not_before_one(log, patience, repeats):
    """Each look at this clock takes a second: two for a repeat, and one to see whether to go on."""
    taken = timing.compare({"a": lambda: None}, repeats=10, patience=patience)
    assert len(taken["a"].seconds) == len(taken["a"].cpu_seconds) == repeats


def test_the_device_is_waited_for_before_every_reading(log):
    timing.compare({"a": lambda: log.append("a")}, repeats=1, warmup=0, device="cuda")
    assert log[-5:] == ["wait", "clock", "a", "wait", "clock"] and log.count("wait") == 2


def test_cpu_time_counts_work_and_children_but_no_waiting(monkeypatch):
    monkeypatch.setattr(timing, "process_time", lambda: 5.0)
    before = timing.cpu_clock()
    assert timing.cpu_clock() == before, "no work, no time"
    code = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert timing.cpu_clock() - before >= 0.15, "a child's work counts"


def test_median_spread_and_ratio():
    a, b = timing.Timing((2.0, 4.0, 9.0)), timing.Timing((1.0, 2.0, 3.0))
    assert a.median == 4.0
    assert timing.ratio(a, b) == (2.0, 0.5)
    assert timing.ratio(timing.Timing((3.0,)), timing.Timing((2.0,))) == (1.5, 0)


def exact_bootstrap(values: list[float], share: float) -> float:
    """The `share` quantile of the bootstrap distribution of an odd sample's median, not sampled.

    A resample's median is at most the k-th smallest value where more than half of its n draws are,
    and a draw is with probability k / n.
    """
    n = len(values)
    for k, value in enumerate(sorted(values), start=1):
        more_than_half = range(n // 2 + 1, n + 1)
        if sum(math.comb(n, j) * k**j * (n - k) ** (n - j) for j in more_than_half) >= share * n**n:
            return value
    raise AssertionError


@pytest.mark.parametrize("n", [3, 5, 7, 9, 21, 51, 105])
def test_the_interval_is_that_of_the_exact_bootstrap(n):
    values = random.Random(n).choices(range(1000), k=n)
    values = [value + i / 1000 for i, value in enumerate(values)]
    low, high = timing.interval(values)
    sampling = 0.007  # three standard errors of a share of 0.025 in 4000 resamples
    for end, share in ((low, 0.025), (high, 0.975)):
        least, most = (exact_bootstrap(values, share + d) - 1e-9 for d in (-sampling, sampling))
        assert least <= end <= most + 2e-9


def test_the_interval_holds_the_median_as_often_as_it_says_and_never_changes():
    draw = random.Random(0)
    samples = [[draw.lognormvariate(0, 1) for _ in range(15)] for _ in range(200)]
    intervals = [timing.interval(sample, resamples=1000) for sample in samples]
    share = sum(low <= 1 <= high for low, high in intervals) / len(intervals)
    assert 0.9 <= share < 1
    again = {timing.interval(samples[0], resamples=20) for _ in range(9)}
    assert len(again) == 1, "so few resamples differ from draw to draw unless they are seeded"
    assert timing.interval([2.0, 1.0, 4.0]) == (1.0, 4.0), "three values: their range"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(({"a": print}, 0), "repeats = 0"), (({"a": print}, 1, -1), "warmup = -1")],
)
def test_bad_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word):
        timing.compare(*arguments)


def test_what_a_run_raises_passes_through():
    with pytest.raises(ZeroDivisionError):
        timing.compare({"a": lambda: 1 / 0})
