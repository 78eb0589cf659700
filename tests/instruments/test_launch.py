"""Ranks are started, heard and ended; no process or file that a launch started outlives it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.each import each
from support.processes import LIMIT, ended, patience, runs, wait_for_text

from amp_utils import launch as module
from amp_utils.course import ROOT
from amp_utils.launch import last_words, launch

WAIT = """
import os, signal, time
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


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def processes(folder: Path, ranks: int = 2) -> set[int]:
    """Process ids of the ranks and of torchrun, as soon as each rank has written them down."""
    notes = [wait_for_text(folder / str(rank)) for rank in range(ranks)]
    return {int(number) for note in notes for number in note.split()}


@pytest.mark.full
def test_a_rank_that_fails_ends_the_launch_with_its_reason(tmp_path, temporary, capsys):
    polite = WAIT.replace("signal.signal(", "(")
    fail = polite.replace("time.sleep(600)", FAIL_ONCE_BOTH_ARE_THERE)
    with pytest.raises(RuntimeError, match="KeyError: 'lost'"):
        launch(script(tmp_path, fail.format(folder=str(tmp_path))), 2)
    assert ended(*processes(tmp_path)) and not list(temporary.iterdir())
    assert "hello" in capsys.readouterr().out


@pytest.mark.full
def test_a_rank_that_is_done_cannot_abort_while_python_ends(tmp_path, temporary, capsys):
    aborts = "import atexit, os\natexit.register(os.abort)\nprint('done')"
    launch(script(tmp_path, aborts), 2, limit=LIMIT)
    assert capsys.readouterr().out == "done\ndone\n"


@each(
    "errors, words",
    [
        (
            "[rank1]: Traceback (most recent call last):\n[rank1]: torch.OutOfMemoryError: none\n"
            "RuntimeError: Connection closed by peer\n",
            "torch.OutOfMemoryError: none",
        ),
        ("Signal 15 (SIGTERM) … Signal 9 (SIGKILL)", "Signal 9 (SIGKILL)"),
        ("Signal 9 (SIGKILL) … Signal 15 (SIGTERM)", "Signal 9 (SIGKILL)"),
        ("Signal 15 (SIGTERM)", "Signal 15 (SIGTERM)"),
        ("a warning\n", "no reason was given."),
    ],
)
def test_last_words_are_those_of_the_first_error(errors, words):
    assert last_words(errors) == words


@pytest.mark.full
def test_a_launch_that_takes_too_long_is_ended(tmp_path, temporary, monkeypatch):
    class OnceStarted(threading.Thread):
        """Stands for threading.Timer: its time is up when the ranks are at work."""

        def __init__(self, seconds, function):
            super().__init__(target=lambda: (processes(tmp_path), function()), daemon=True)

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(module, "threading", SimpleNamespace(Timer=OnceStarted))
    with pytest.raises(TimeoutError, match="stopped after 0 seconds"):
        launch(script(tmp_path, WAIT.format(folder=str(tmp_path))), 2, limit=0)
    assert ended(*processes(tmp_path)) and not list(temporary.iterdir())


@pytest.mark.full
def test_an_interrupt_ends_every_process(tmp_path, temporary):
    started: set[int] = set()

    def interrupt() -> None:
        started.update(processes(tmp_path))
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            launch(script(tmp_path, WAIT.format(folder=str(tmp_path))), 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(started) == 3 and ended(*started) and not list(temporary.iterdir())


@pytest.mark.full
def test_a_killed_kernel_takes_its_ranks_along(tmp_path):
    path = script(tmp_path, WAIT.format(folder=str(tmp_path)))
    code = f"from amp_utils.launch import launch\nlaunch({str(path)!r}, 2, limit={LIMIT})"
    kernel = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    started = processes(tmp_path)
    assert len(started) == 3 and all(map(runs, started))
    kernel.kill()
    kernel.wait()
    assert ended(*started)
