"""The functions that lesson 13 defines. No process that it starts outlives its launch."""

import ast
import inspect
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.each import each
from support.processes import LIMIT, ended, patience, runs, wait_for_text
from torch import nn

from amp_utils.course import ROOT
from amp_utils.course.notebook import cells, load

CPU = torch.device("cpu")
WAIT = """
import signal, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a rank that does not listen
note = Path({folder!r}, os.environ["RANK"])
note.with_suffix(".part").write_text(f"{{os.getpid()}} {{os.getppid()}}")
note.with_suffix(".part").rename(note)
time.sleep(600)
"""
FAIL_ONCE_BOTH_ARE_THERE = """
print("hello", flush=True)
while note.name == "0":
    if note.with_name("1").exists():
        raise KeyError("lost")
time.sleep(600)
"""
LISTENERS = """
listening = set()
mine = {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for pid in (os.getpid(), os.getppid())
        for fd in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{fd}")}
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        row = line.split()
        if row[3] == "0A" and int(row[9]) in mine:
            listening.add(row[1].split(":")[0])
saved |= {"listening": sorted(listening), "host": os.uname().nodename}
torch.save(saved, f"rank{rank}.pt")
"""


@pytest.fixture
def lesson():
    module = load("13", device=CPU, seed=0, steps=12, overflow_step=5)
    module.inspect = SourceOfNotebook()
    return module


class SourceOfNotebook:
    """Stands for the module inspect, which finds a notebook's functions in a kernel only."""

    def getsource(self, function) -> str:
        for cell in cells(ROOT / "notebooks" / "13_data_parallel.ipynb"):
            if cell.is_code and f"def {function.__name__}(" in cell.source:
                for node in ast.parse(cell.source).body:
                    if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
                        return ast.get_source_segment(cell.source, node)
        return inspect.getsource(function)


# Threads


@each("dtype", [torch.float16, torch.bfloat16])
def test_only_autocast_in_forward_reaches_a_thread(lesson, dtype):
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    with torch.autocast("cpu", dtype=dtype):
        assert lesson.in_threads(lambda: layer(x).dtype, 3) == [torch.float32] * 3
        assert lesson.in_threads(lambda: lesson.Net(layer)(x).dtype) == [torch.float16] * 2
    assert lesson.Net(layer)(x).dtype == torch.float16


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the CPU stands in for an accelerator where there is none"
)
def test_dataparallel_hands_on_the_switch_and_not_the_dtype(lesson):
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    assert [y.dtype for y in lesson.data_parallel(layer, x)] == [torch.float32] * 2
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=dtype):
            outputs = lesson.data_parallel(layer, x)
            # the CPU's default, whatever was asked for
            assert [y.dtype for y in outputs] == [torch.bfloat16] * 2
            assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == dtype
        assert not torch.is_autocast_enabled("cuda")
    assert torch.equal(outputs[0], outputs[1])


def test_threads_share_the_cache_of_cast_weights(lesson):
    """Why `data_parallel` copies the network."""
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)

    def in_bf16():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x)

    with torch.autocast("cpu", dtype=torch.float16):
        layer(x)
        with pytest.raises(RuntimeError, match="same dtype"):
            lesson.in_threads(in_bf16, 1)


@each("enabled", [True, False])
def test_carry_takes_the_state_of_the_caller(lesson, enabled):
    with torch.autocast("cpu", dtype=torch.float16, enabled=enabled):
        carried = lesson.carry(
            lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")), "cpu"
        )
    assert lesson.in_threads(carried) == [(enabled, torch.float16)] * 2


# Training


def test_one_process_trains_as_an_average_over_shares_does(lesson):
    """DDP by hand, in float32: the mean of the gradients of three shares."""
    one = lesson.train(0, 1, CPU, torch.float32)
    torch.manual_seed(lesson.seed)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = lesson.points(bad=False)
    for _ in range(lesson.steps):
        optimizer.zero_grad()
        for rank in range(3):
            (nn.functional.mse_loss(net(x[rank::3]), y[rank::3]) / 3).backward()
        optimizer.step()
    by_hand = nn.utils.parameters_to_vector(net.parameters())
    assert lesson.distance(by_hand, one["weights"]) < 1e-5
    assert one["loss"][-1] < 0.7 * one["loss"][0]


def test_the_bad_sample_belongs_to_the_last_rank_and_costs_one_step(lesson):
    for ranks in (2, 3, 4):
        _, y = lesson.points(bad=True)
        assert [y[rank::ranks].isinf().any().item() for rank in range(ranks)] == [False] * (
            ranks - 1
        ) + [True]
    story = lesson.train(0, 1, CPU, torch.float16)
    assert [step for step, skipped in enumerate(story["skipped"]) if skipped] == [5]
    assert [step for step, finite in enumerate(story["finite"]) if not finite] == [5]
    assert story["weights"].isfinite().all() and set(story["output"]) == {"torch.float16"}


@each("total, ranks", [(7, 2), (240, 4), (5, 5), (3, 4)])
def test_rank_loss_averages_to_the_mean_and_its_gradient(lesson, total, ranks):
    errors = torch.rand(total, requires_grad=True)
    sum(lesson.rank_loss(errors[rank::ranks], total, ranks) for rank in range(ranks)).div(
        ranks
    ).backward()
    assert torch.allclose(errors.grad, torch.full((total,), 1 / total))


def test_last_words_are_those_of_the_first_error(lesson):
    errors = """[rank1]: Traceback (most recent call last):
[rank1]:   File "script.py", line 3, in <module>
[rank1]: torch.OutOfMemoryError: no room
RuntimeError: Connection closed by peer
"""
    assert lesson.last_words(errors) == "torch.OutOfMemoryError: no room"
    assert lesson.last_words("a warning\n") == "no reason was given."


# Processes


def processes(folder: Path, ranks: int = 2) -> set[int]:
    """Process ids of the ranks and of torchrun, as soon as each rank has written them down."""
    notes = [wait_for_text(folder / str(rank)) for rank in range(ranks)]
    return {int(number) for note in notes for number in note.split()}


@pytest.fixture(autouse=True)
def no_launch_hangs():
    with patience():
        yield


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder in which `launch` makes its own."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_a_rank_that_fails_ends_the_launch_with_its_reason(lesson, tmp_path, temporary, capsys):
    polite = WAIT.replace("signal.signal(", "(")
    fail = polite.replace("time.sleep(600)", FAIL_ONCE_BOTH_ARE_THERE)
    with pytest.raises(RuntimeError, match="KeyError: 'lost'"):
        lesson.launch(fail.format(folder=str(tmp_path)), 2, 300)
    assert ended(*processes(tmp_path)) and not list(temporary.iterdir())
    assert "hello" in capsys.readouterr().out


ONE_RANK_FAILS = """
import os, signal
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSEGV)
signal.pause()
"""


@pytest.mark.full
def test_a_rank_that_is_killed_is_named_by_its_signal(lesson):
    with pytest.raises(RuntimeError, match=r"^Signal 11 \(SIGSEGV\)$"):
        lesson.launch(ONE_RANK_FAILS, 2, 60)


def test_a_failed_rank_is_named_before_those_that_torchrun_ended(lesson):
    for report in (
        "Signal 15 (SIGTERM) … Signal 9 (SIGKILL)",
        "Signal 9 (SIGKILL) … Signal 15 (SIGTERM)",
    ):
        assert lesson.last_words(report) == "Signal 9 (SIGKILL)"
    assert lesson.last_words("Signal 15 (SIGTERM)") == "Signal 15 (SIGTERM)"


@pytest.mark.full
def test_a_launch_that_takes_too_long_is_ended(lesson, tmp_path, temporary):
    class OnceStarted(threading.Thread):
        """Stands for threading.Timer: its time is up when the ranks are at work."""

        def __init__(self, seconds, function):
            super().__init__(target=lambda: (processes(tmp_path), function()), daemon=True)

        def cancel(self) -> None:
            pass

    vars(lesson)["threading"] = SimpleNamespace(Timer=OnceStarted)
    with pytest.raises(TimeoutError, match="stopped after 0 seconds"):
        lesson.launch(WAIT.format(folder=str(tmp_path)), 2, 0)
    assert ended(*processes(tmp_path)) and not list(temporary.iterdir())


@pytest.mark.full
def test_an_interrupt_ends_every_process(lesson, tmp_path, temporary):
    started: set[int] = set()

    def interrupt() -> None:
        started.update(processes(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            lesson.launch(WAIT.format(folder=str(tmp_path)), 2, 300)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 3 and ended(*started) and not list(temporary.iterdir())


@pytest.mark.full
def test_a_killed_kernel_takes_its_ranks_along(tmp_path):
    launch = f"load('13').launch({WAIT.format(folder=str(tmp_path))!r}, 2, {LIMIT})"
    code = f"from amp_utils.course.notebook import load\n{launch}"
    kernel = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    started = processes(tmp_path)
    assert len(started) == 3 and all(map(runs, started))
    kernel.kill()
    kernel.wait()
    assert ended(*started)


@pytest.fixture
def nameless(tmp_path, monkeypatch) -> None:
    """Programs started from here see a host name that does not resolve; skips where not allowed."""
    words = (
        "unshare --user --map-root-user --uts sh -c 'hostname nowhere.invalid && exec \"$@\"' sh"
    )
    if subprocess.run(f"{words} true", shell=True, capture_output=True).returncode:
        pytest.skip("this machine lets no one change the host name for one program")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {words} {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and makes a namespace")
def test_three_ranks_without_a_network_train_as_one_process_does(lesson, nameless, capsys):
    settings = 'backend = "gloo"\nseed = 0\nsteps = 12\noverflow_step = 5'
    parts = (
        lesson.points,
        lesson.train,
        lesson.in_turn,
        lesson.refusal,
        lesson.SETUP,
        lesson.DDP,
        LISTENERS,
        lesson.LEAVE,
    )
    saved = lesson.launch(lesson.script(lesson.IMPORTS, settings, *parts), 3, 300)
    assert capsys.readouterr().out.splitlines() == [
        f"rank {rank}: all_reduce gives [3.0, inf]" for rank in range(3)
    ]
    assert saved[0]["two devices"].startswith("device_ids can only")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        weights = [by_rank[str(dtype)]["weights"] for by_rank in saved]
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
        assert lesson.distance(weights[0], lesson.train(0, 1, CPU, dtype)["weights"]) < tolerance
    for by_rank in saved:
        story = by_rank["torch.float16"]
        assert [step for step, skipped in enumerate(story["skipped"]) if skipped] == [5]
        assert by_rank["listening"] == ["0100007F"]  # 127.0.0.1, as /proc writes it
        assert by_rank["host"] == "nowhere.invalid"
    assert [math.isfinite(by_rank["torch.float16"]["loss"][5]) for by_rank in saved] == [
        True,
        True,
        False,
    ]
