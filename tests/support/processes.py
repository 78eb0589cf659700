"""Waiting for what other processes do: until they have written something down, and until they have ended."""

import os
import time
from pathlib import Path


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come true within a minute"
        time.sleep(0.1)


def wait_for_number(path: Path) -> int:
    wait_for(lambda: path.exists() and path.read_text())
    return int(path.read_text())


def ended(process_id: int) -> bool:
    """Whether a process has ended within a few seconds."""
    for _ in range(50):
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False
