"""`make lab` opens copies: they follow the originals, and nothing that a learner wrote is lost."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat import NO_CONVERT, read
from nbformat.sign import NotebookNotary
from nbformat.v4 import new_code_cell, new_notebook, new_output, writes

from amp_utils.course import ROOT, lab, notebook
from amp_utils.course.__main__ import main

LESSONS = ("05_gradient_underflow", "06_grad_scaler", "A2_modules")
FIRST, SECOND, THIRD = (f"{name}.ipynb" for name in LESSONS)
SCRIPT = "train_ddp.py"


def lesson(version: int, **touched) -> bytes:
    """A lesson of a version; a learner may have written its source, or run it."""
    output = new_output("stream", text=touched.pop("text", f"version {version}\n"))
    given = {"source": f"print('version {version}')", "outputs": [output], "execution_count": 1}
    cell = new_code_cell(**given | {"id": "cell", "metadata": {}} | touched)
    return (writes(new_notebook(cells=[cell])) + "\n").encode()


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """A course at version 1, whose notary signs in a folder of its own."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "course/notebooks", "course/learn"):
        (tmp_path / folder).mkdir(parents=True)
    release(tmp_path / "course", 1)
    return tmp_path / "course"


def release(course: Path, version: int) -> None:
    """What `git pull` does: every original has a new version."""
    for name in LESSONS:
        (course / "notebooks" / f"{name}.ipynb").write_bytes(lesson(version))
    (course / "notebooks" / SCRIPT).write_text(f"version = {version}\n")
    (course / "notebooks" / "claims.toml").touch()


def files(course: Path) -> dict[str, bytes]:
    """The learner's files; the hidden ones are not the learner's."""
    return {path.name: path.read_bytes() for path in (course / "learn").glob("[!.]*")}


def shipped(version: int) -> dict[str, bytes]:
    names = {f"{name}.ipynb": lesson(version) for name in LESSONS}
    return names | {SCRIPT: f"version = {version}\n".encode()}


# --- copies


def test_untouched_copies_follow_the_originals_byte_for_byte(course, capsys):
    for version in (1, 2, 3):
        release(course, version)
        lab.follow(course)
        assert files(course) == shipped(version)
    lab.follow(course)
    assert files(course) == shipped(3) and capsys.readouterr().out == ""


def test_what_jupyterlab_rewrites_unasked_is_no_touch(course):
    figure = new_output("display_data", {"text/plain": "a figure"}, metadata={"height": 1.0})
    folded = {"tags": ["answer"], "jupyter": {"outputs_hidden": True}}
    original = lesson(1, outputs=[figure], metadata=folded)
    (course / "notebooks" / FIRST).write_bytes(original)
    lab.follow(course)
    opened = json.loads(original)
    (cell,) = opened["cells"]
    opened["cells"] = [dict(reversed(cell.items())) | {"metadata": folded | {"collapsed": True}}]
    cell["outputs"][0]["metadata"] = {"height": 1}  # JavaScript has one kind of number
    opened["metadata"]["language_info"] = {"name": "python", "version": "3.11.7"}
    (course / "learn" / FIRST).write_text(json.dumps(opened, indent=2))
    release(course, 2)
    lab.follow(course)
    assert files(course) == shipped(2)


@pytest.mark.parametrize(
    "mine",
    [
        lesson(1, source="my guess"),
        lesson(1, text="my output\n"),
        lesson(1, execution_count=2),
        lesson(1, metadata={"tags": ["mine"]}),
        b"{",
        b"",
    ],
    ids=["source", "output", "count", "metadata", "damaged", "empty"],
)
def test_a_touched_copy_is_kept_and_its_newer_version_lies_beside_it(course, capsys, mine):
    lab.follow(course)
    (course / "learn" / FIRST).write_bytes(mine)
    (course / "learn" / SCRIPT).write_bytes(mine)
    lab.follow(course)
    assert files(course) == shipped(1) | {FIRST: mine, SCRIPT: mine} and not capsys.readouterr().out
    release(course, 2)
    lab.follow(course)
    beside = {
        "05_gradient_underflow (new).ipynb": lesson(2),
        "train_ddp (new).py": b"version = 2\n",
    }
    kept = shipped(2) | {FIRST: mine, SCRIPT: mine}
    assert files(course) == kept | beside
    assert capsys.readouterr().out == "".join(
        f"{name} is yours and stays; its newer version is {new}.\n"
        for name, new in zip((FIRST, SCRIPT), beside, strict=True)
    )
    lab.follow(course)
    assert files(course) == kept | beside and not capsys.readouterr().out


def test_a_newer_version_beside_a_copy_follows_too_until_it_is_touched(course, capsys):
    lab.follow(course)
    mine = {FIRST: lesson(1, source="mine")}
    (course / "learn" / FIRST).write_bytes(mine[FIRST])
    for version in (2, 3):
        release(course, version)
        lab.follow(course)
        beside = {"05_gradient_underflow (new).ipynb": lesson(version)}
        assert files(course) == shipped(version) | mine | beside
    mine |= {"05_gradient_underflow (new).ipynb": lesson(3, source="mine as well")}
    (course / "learn" / [*mine][1]).write_bytes([*mine.values()][1])
    for version in (4, 5):
        release(course, version)
        lab.follow(course)
        beside = {"05_gradient_underflow (new 2).ipynb": lesson(version)}
        assert files(course) == shipped(version) | mine | beside
    assert len(capsys.readouterr().out.splitlines()) == 4
    (course / "learn" / [*beside][0]).unlink()
    lab.follow(course)
    assert files(course) == shipped(5) | mine, "what was deleted does not come back"


def test_a_deleted_copy_is_made_again_and_a_lost_record_overwrites_nothing(course):
    lab.follow(course)
    (course / "learn" / FIRST).unlink()
    lab.follow(course)
    assert files(course) == shipped(1)
    (course / "learn" / ".copied.json").write_text("{")
    release(course, 2)
    lab.follow(course)
    beside = {
        f"{Path(name).stem} (new){Path(name).suffix}": shipped(2)[name] for name in shipped(2)
    }
    assert files(course) == shipped(1) | beside


def test_what_somebody_wrote_into_an_original_is_copied_and_never_overwritten(course):
    git = ["git", "-C", course, "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    for arguments in (["init", "-q"], ["add", "notebooks"], ["commit", "-qm", "version 1"]):
        subprocess.run([*git, *arguments], check=True)
    mine = lesson(1, source="written before there were copies")
    (course / "notebooks" / FIRST).write_bytes(mine)
    (course / "progress.json").write_text("mine")
    for _ in range(2):
        lab.follow(course)
        assert files(course) == shipped(1) | {FIRST: mine, "progress.json": b"mine"}
    subprocess.run([*git, "checkout", "-q", "."], check=True)
    lab.follow(course)
    beside = {"05_gradient_underflow (new).ipynb": lesson(1)}
    assert files(course) == shipped(1) | {FIRST: mine, "progress.json": b"mine"} | beside


def test_a_damaged_original_is_a_sentence(course, monkeypatch, capsys):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("JupyterLab was started"))
    (course / "notebooks" / SECOND).write_text("<<<<<<< HEAD")
    assert main(["--root", str(course), "lab"]) == 1
    assert capsys.readouterr().err.endswith(f"{SECOND} is damaged or not a notebook.\n")


def test_whatever_a_lesson_links_to_or_runs_is_there_beside_its_copy(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path))
    for name in ("notebooks", "imgs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "learn").mkdir()
    lab.follow(tmp_path)
    copies = notebook.lessons(tmp_path / "learn")
    assert len(copies) == len(notebook.lessons(tmp_path / "notebooks"))
    for copy in copies:
        text = "\n".join(cell.source for cell in notebook.cells(copy))
        named = re.findall(r"\]\(([\w./]+\.(?:ipynb|md|html|svg))[#)]|\"(\w+\.py)\"", text)
        assert named
        for target in filter(None, itertools.chain(*named)):
            assert (copy.parent / target).is_file(), f"{copy.name}: {target}"


# --- killed at any moment


class Stop(Exception):
    """What ends the copying at an operation of the test's choice."""


def interrupt(monkeypatch, number: int, stop) -> None:
    """Call `stop()` within the write or rename with this number; a write gets half-way."""
    operations = iter(range(10**6))
    write, replace = Path.write_bytes, os.replace

    def half(path, contents):
        if next(operations) == number:
            write(path, contents[: len(contents) // 2])
            stop()
        return write(path, contents)

    def rename(old, new):
        if next(operations) == number:
            stop()
        replace(old, new)
        if next(operations) == number:
            stop()

    monkeypatch.setattr(Path, "write_bytes", half)
    monkeypatch.setattr(os, "replace", rename)


def fail() -> None:
    raise Stop


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def ended_early(course: Path, monkeypatch, number: int, stop) -> bool:
    """Follow the originals; whether `stop` was called at operation `number`."""
    if stop is fail:
        with monkeypatch.context() as patch:
            interrupt(patch, number, stop)
            try:
                lab.follow(course)
            except Stop:
                return True
        return False
    child = os.fork()
    if not child:
        interrupt(monkeypatch, number, stop)
        lab.follow(course)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("stop", [fail, pytest.param(kill, marks=pytest.mark.full)])
def test_at_whatever_moment_it_ends_each_file_is_whole(course, monkeypatch, stop):
    monkeypatch.setattr(lab, "edited", lambda root: set())
    lab.follow(course)
    mine = lesson(1, source="mine")
    (course / "learn" / FIRST).write_bytes(mine)  # SECOND is untouched, the third is missing
    (course / "learn" / THIRD).unlink()
    release(course, 2)
    start = course.with_name("start")
    shutil.copytree(course, start)
    wanted = shipped(2) | {FIRST: mine, "05_gradient_underflow (new).ipynb": lesson(2)}
    for number in itertools.count():
        stopped = ended_early(course, monkeypatch, number, stop)
        seen = files(course)
        assert seen.pop(FIRST) == mine and {SECOND, SCRIPT} <= set(seen), f"operation {number}"
        for name, contents in seen.items():
            whole = [shipped(version)[name.replace(" (new)", "")] for version in (1, 2)]
            assert contents in whole, f"operation {number}: {name}"
        lab.follow(course)
        assert files(course) == wanted, f"operation {number}"
        if not stopped:
            break
        shutil.rmtree(course)
        shutil.copytree(start, course)
    assert number == 24  # each of 4 files and 4 records: half written, before and after its rename


# --- trust


def trusted(path: Path) -> bool:
    with NotebookNotary() as notary:
        return notary.check_signature(read(path, as_version=NO_CONVERT))


def test_a_copy_is_trusted_while_it_is_the_shipped_one(course, tmp_path):
    lab.follow(course)
    paths = sorted((course / "learn").glob("*.ipynb"))
    assert len(paths) == 3 and all(map(trusted, paths))
    assert (tmp_path / "data" / "nbsignatures.db").exists()
    foreign = course / "learn" / FIRST
    foreign.write_bytes(lesson(1, text="<script>somebody else's</script>"))
    lab.follow(course)
    assert not trusted(foreign)
    release(course, 2)
    lab.follow(course)
    assert not trusted(foreign) and trusted(course / "learn" / SECOND)
    assert trusted(course / "learn" / "05_gradient_underflow (new).ipynb")


def test_what_somebody_wrote_into_an_original_is_not_signed(course, monkeypatch):
    monkeypatch.setattr(lab, "edited", lambda root: {FIRST})
    (course / "notebooks" / FIRST).write_bytes(lesson(1, source="mine"))
    lab.follow(course)
    assert not trusted(course / "learn" / FIRST) and trusted(course / "learn" / SECOND)


# --- JupyterLab


class Open:
    """The course, opened in a stand-in for JupyterLab that prints its flags and waits."""

    def __init__(self, course: Path, *options: str):
        stand_in = course.parent / "stand-in"
        stand_in.mkdir(exist_ok=True)
        (stand_in / "jupyterlab.py").write_text("import sys; print(sys.argv[1:]); input()")
        command = [sys.executable, "-m", "amp_utils.course", "--root", course, "lab", *options]
        paths = {"PYTHONPATH": f"{stand_in}:{os.environ.get('PYTHONPATH', '')}"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | paths, bufsize=1, **pipes)

    def said(self) -> list[str]:
        """What it printed until it was closed."""
        return self.process.communicate("\n", 60)[0].splitlines()


def test_lab_opens_the_copies_and_for_authors_the_originals(course):
    notice, flags = Open(course, "--port", "8123", "--no-browser").said()
    assert notice == "Your own copies of the lessons are in course/learn."
    assert "--LabApp.default_url=/lab/tree/learn/00_start_here.ipynb" in flags
    for flag in (f"--ServerApp.root_dir={course}", "--ip=127.0.0.1", "--no-browser"):
        assert f"'{flag}'" in flags
    assert "'--port=8123', '--ServerApp.port_retries=0'" in flags
    assert files(course) == shipped(1)

    release(course, 2)
    (flags,) = Open(course, "--edit").said()
    assert "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb" in flags
    assert "--port" not in flags and "--no-browser" not in flags
    assert files(course) == shipped(1)


def test_while_the_course_is_open_its_files_stay_as_they_are(course):
    first = Open(course)
    assert first.process.stdout.readline().startswith("Your own copies")
    assert "root_dir" in first.process.stdout.readline()  # JupyterLab has taken over
    release(course, 2)
    assert Open(course).said()[0] == "The course is open already, so its files stay as they are."
    assert files(course) == shipped(1)
    first.said()
    assert Open(course).said()[0].startswith("Your own copies")
    assert files(course) == shipped(2)
