"""Open the course in JupyterLab: a learner's own copies in `learn/`, or the originals for authors.

A copy is untouched while its cells, outputs included, are those of a version that was copied here;
then it follows the original. What JupyterLab rewrites unasked does not count (layout, metadata of
the notebook and of outputs), and neither does folding. A touched copy is never written again; a
newer version lies beside it. Killed at any moment, this leaves whole files; the next call goes on.
"""

import fcntl
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import nbformat
from nbformat.sign import NotebookNotary

from amp_utils.course import LEARN, notebook, shown, write_whole


def fingerprint(contents: bytes) -> str:
    """What tells versions apart: the cells of a notebook, the bytes of any other file."""
    with suppress(Exception):  # a learner's file can be damaged in any way
        cells = nbformat.v4.reads(contents.decode()).cells
        for cell in cells:
            for folded in ("collapsed", "jupyter"):
                cell.metadata.pop(folded, None)
            for output in cell.get("outputs", []):
                output.pop("metadata", None)  # where JavaScript makes 1.0 a 1
        contents = json.dumps(cells, sort_keys=True).encode()
    return hashlib.sha256(contents).hexdigest()


def edited(root: Path) -> set[str]:
    """The originals that differ from git's, by name; none where git is not there to tell."""
    command = ["git", "-C", root, "diff", "--name-only", "HEAD", "--", "notebooks"]
    told = subprocess.run(command, capture_output=True, text=True) if shutil.which("git") else None
    return {Path(line).name for line in told.stdout.splitlines()} if told else set()


def deliver(contents: bytes, first: Path, known: list[str]) -> None:
    """Bring a version to its copy, or beside it where that differs from all `known` versions."""
    for number in itertools.count():
        copy = first.with_stem(first.stem + ("", " (new)", f" (new {number})")[min(number, 2)])
        now = copy.read_bytes() if copy.exists() else None
        if now is None or (now != contents and fingerprint(now) in known):
            write_whole(copy, contents)
            if number:
                print(f"{first.name} is yours and stays; its newer version is {copy.name}.")
            return
        if now == contents or fingerprint(contents) in known:  # here, or was here before
            return


def follow(root: Path) -> None:
    """Bring the copies up to date. Raises CourseError for a damaged original."""
    learn, notebooks, own = root / LEARN, root / "notebooks", edited(root)
    record, known = learn / ".copied.json", {}  # by name: fingerprints of the versions copied here
    if (old := root / "progress.json").exists() and not (learn / old.name).exists():
        old.rename(learn / old.name)  # from before there were copies
    with suppress(OSError, ValueError):
        known = json.loads(record.read_text("utf-8"))
    linked = [path for path in notebooks.iterdir() if path.suffix in (".py", ".md", ".html")]
    with NotebookNotary() as notary:
        for original in notebook.lessons(notebooks) + linked:
            name, copy, contents = original.name, learn / original.name, original.read_bytes()
            lesson = None if original in linked else notebook.read(original)
            if name not in own or not copy.exists():
                deliver(contents, copy, known.setdefault(name, []))
            if name in own:  # somebody's work and not a version: it never counts as untouched
                continue
            if fingerprint(contents) not in known[name]:
                known[name].append(fingerprint(contents))
                write_whole(record, json.dumps(known, indent=1))
            if lesson and not notary.check_signature(lesson):  # only these very contents
                notary.sign(lesson)


@click.command(help="Open the course in JupyterLab, on your own copies of the lessons.")
@click.option("--edit", is_flag=True, help="open the originals in notebooks/, as an author")
@click.option("--port", type=int, help="this port and no other")
@click.option("--no-browser", is_flag=True, help="only print the address")
@click.pass_obj
def command(root: Path, edit: bool, port: int | None, no_browser: bool) -> None:
    folder = root / ("notebooks" if edit else LEARN)
    if not edit:
        folder.mkdir(exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
        os.set_inheritable(lock, True)  # JupyterLab keeps it: no file changes while it is open
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            follow(root)
            print(f"Your own copies of the lessons are in {shown(folder)}.")
        except BlockingIOError:
            print("The course is open already, so its files stay as they are.")
    flags = [f"--ServerApp.root_dir={root}", "--LabApp.extension_manager=readonly"]
    flags += [f"--LabApp.default_url=/lab/tree/{folder.name}/00_start_here.ipynb"]
    flags += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--ip=127.0.0.1"]
    flags += [f"--port={port}", "--ServerApp.port_retries=0"] if port else []
    flags += ["--no-browser"] * no_browser + ["--allow-root"] * (os.geteuid() == 0)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", *flags])
