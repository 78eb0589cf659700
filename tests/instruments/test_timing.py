"""Timing interleaves, warms up and waits for the device; its numbers are those of the clock."""

import itertools

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


def test_the_device_is_waited_for_before_every_reading(log):
    timing.compare({"a": lambda: log.append("a")}, repeats=1, warmup=0, device="cuda")
    assert log == ["wait", "clock", "a", "wait", "clock"]


def test_median_spread_and_ratio():
    a, b = timing.Timing((2.0, 4.0, 9.0)), timing.Timing((1.0, 2.0, 3.0))
    assert (a.median, b.spread) == (4.0, 1.0)
    assert timing.ratio(a, b) == (2.0, 0.5)
    assert timing.Timing((1.0,)).spread == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(({},), "runs"), (({"a": print}, 0), "repeats = 0"), (({"a": print}, 1, -1), "warmup = -1")],
)
def test_bad_arguments_are_named(arguments, word):
    with pytest.raises(ValueError, match=word):
        timing.compare(*arguments)


def test_what_a_run_raises_passes_through():
    with pytest.raises(ZeroDivisionError):
        timing.compare({"a": lambda: 1 / 0})


def test_peak_memory_is_measured_above_what_was_there(monkeypatch):
    held = {"now": 100, "peak": 0}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held["now"])
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: held.update(peak=held["now"])
    )
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: held["peak"])
    assert timing.peak_memory(lambda: held.update(peak=350), "cuda") == 250


def test_on_the_cpu_there_is_no_honest_peak():
    assert timing.peak_memory(lambda: None, "cpu") is None
