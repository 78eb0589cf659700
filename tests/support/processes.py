"""The one place where tests wait for other processes.

They wait for an event, never for a time. Each wait ends after LIMIT seconds, which no busy machine
needs: it only keeps a bug from hanging the whole run.
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import psutil

LIMIT = 300
T = TypeVar("T")


def wait_for(condition: Callable[[], T], seconds: float = LIMIT) -> T:
    """The first true value of `condition()`. Raises AssertionError where there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"nothing came in {seconds} seconds"
        time.sleep(0.05)
    return value


def wait_for_text(path: Path) -> str:
    """What a process has written into a file, as soon as there is something."""
    return wait_for(lambda: path.exists() and path.read_text())


def wait_for_number(path: Path) -> int:
    """`wait_for_text` as a whole number, such as a process id."""
    return int(wait_for_text(path))


def answers(address: str) -> bool:
    """Whether somebody listens there. Jupyter prints its address before it does."""
    url = urlsplit(address)
    with socket.socket() as caller:
        return caller.connect_ex((url.hostname, url.port)) == 0


def free_ports(number: int) -> list[int]:
    """Ports that are free now; another program may still take one before they are used."""
    with contextlib.ExitStack() as held:
        sockets = [
            held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [one.getsockname()[1] for one in sockets]


def stop_server(server: subprocess.Popen, patience: float = 60) -> None:
    """End a Jupyter server that leads a session: first kindly, after `patience` seconds by force.

    One that had shut down its kernels once waited for a thread of anyio's for ever.
    """
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(patience)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(LIMIT)


def runs(process_id: int) -> bool:
    """Whether a process has not ended. A zombie has: it only waits for its parent to take note."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ended(*process_ids: int) -> bool:
    """Wait until all these processes have ended; False where one still runs after LIMIT seconds."""
    with contextlib.suppress(AssertionError):
        return wait_for(lambda: not any(map(runs, process_ids)))
    return False


@contextlib.contextmanager
def patience(seconds: int = LIMIT) -> Iterator[None]:
    """Fail the test where its body blocks (on a pipe, a launch, a lock) instead of hanging."""

    def give_up(*_) -> None:
        raise AssertionError(f"nothing came to an end in {seconds} seconds")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
