"""The toolbox behind `python -m amp_utils.course`. No lesson and no instrument imports it."""

import os
from pathlib import Path

import click

ROOT = Path(__file__).parents[2]
LEARN = "learn"  # the folder of a learner's own copies and progress, beside notebooks/


class CourseError(click.ClickException):
    """Why a command failed, in one sentence for its user; the status is 2 for wrong usage."""

    def __init__(self, sentence: str, status: int = 1):
        super().__init__(sentence)
        self.exit_code = status


def shown(path: Path) -> str:
    """A path for a message: relative to the current folder, or absolute where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


def write_whole(path: Path, contents: str | bytes) -> None:
    """Write a file completely or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(contents.encode() if isinstance(contents, str) else contents)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
