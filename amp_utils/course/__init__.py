"""The toolbox that builds, runs, checks and publishes the notebooks.

Its command line is `python -m amp_utils.course COMMAND`. No lesson and no instrument imports it.
"""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


class CourseError(Exception):
    """Why a command cannot do what it was asked, in one sentence for the person at the console.

    `status` is the exit status: 1 where something went wrong, 2 where the command was used wrongly.
    """

    def __init__(self, sentence: str, status: int = 1):
        super().__init__(sentence)
        self.status = status


def shown(path: Path) -> str:
    """A path for a message: relative to the current folder, or absolute where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def write_whole(path: Path, text: str) -> None:
    """Write a text file completely or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
