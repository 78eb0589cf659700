"""The command line: whatever goes wrong is one sentence and an exit status, from any folder."""

from pathlib import Path

import pytest
from nbformat import v4

from amp_utils.course.__main__ import COMMANDS, main

LESSON = "01_float_formats"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    (tmp_path / "notebooks").mkdir()
    return tmp_path


@pytest.fixture
def call(course, capsys):
    """Run a command in this process; its exit status, standard output and standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        return main(["--root", str(course), *arguments]), *capsys.readouterr()

    return run


def damage(course: Path, text: str) -> None:
    (course / "notebooks" / f"{LESSON}.ipynb").write_bytes(text.encode("latin-1"))


@pytest.mark.parametrize("text", ["", "\xff", '{"cells": [], "metadata": {}}'])
@pytest.mark.parametrize("command", ["run 1", "run --save", "run -p steps 1", "sweep 1 --set a=1"])
def test_a_damaged_notebook_is_named_before_any_work(course, call, command, text):
    damage(course, text)
    status, out, err = call(*command.split())
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"{LESSON}.ipynb is damaged or not a notebook.\n" in err
    assert [path.name for path in course.iterdir()] == ["notebooks"]


def test_a_foreign_notebook_does_not_disturb(course, call):
    notebooks = course / "notebooks"
    (notebooks / f"{LESSON}.ipynb").write_text(str(v4.writes(v4.new_notebook())))
    (notebooks / "99_mine.ipynb").write_text("{")
    (notebooks / f"{LESSON}-Copy1.ipynb").write_text("{")
    status, _, err = call("run", "02")
    assert status == 2
    assert err == f"'02' is not a lesson: give one of {LESSON}, or its number.\n"


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        (
            "--root nowhere run",
            2,
            "root = 'nowhere' is not allowed: give a folder with notebooks/.",
        ),
        ("rum", 2, "No such command 'rum'."),
        ("sweep", 2, "Missing argument 'LESSON'."),
        ("run --safe", 2, "No such option '--safe'."),
        ("run", 2, "There are no lessons in notebooks."),
    ],
)
def test_wrong_usage_is_one_sentence(course, call, monkeypatch, arguments, status, sentence):
    monkeypatch.chdir(course)  # messages give paths relative to the current folder
    found, out, err = call(*arguments.split())
    assert (found, out, err.count("\n")) == (status, "", 1)
    assert err.startswith(sentence.removesuffix("."))


def test_an_error_of_the_system_is_one_sentence(course, call):
    (course / "notebooks" / f"{LESSON}.ipynb").mkdir()
    status, out, err = call("run")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert f"Is a directory: '{course}/notebooks/{LESSON}.ipynb'." in err


def test_every_command_has_help(call):
    for name in COMMANDS:
        status, out, err = call(name, "--help")
        assert (status, err) == (0, "") and "Usage: " in out, name
