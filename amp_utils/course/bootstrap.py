"""Build or repair the project's `.venv`: run by `make` with any Python, standard library only.

    python3 -I amp_utils/course/bootstrap.py [--port PORT]

A stamp is written at the very end, so that the next call recognises an interrupted installation.
The syntax is Python 3.6's: an old Python must get as far as the sentence that says it is too old.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Jupyter without news, update checks and a warning at every kernel start (loopback is unencrypted).
SETTINGS = Path(__file__).with_name("settings")
STAMP, OURS, LOG = ".amp-ready", ".amp-ours", "install.log"
DISK_GB = 3


def main(arguments, root=ROOT):
    """Make `.venv` in `root` ready, or exit with a sentence; a port is checked before any work."""
    try:
        if arguments[:1] == ["--port"]:
            check_port(*arguments[1:2])
        if not is_ready(root):
            lock = lock_folder(root)
            if not is_ready(root):  # another make may have built it while this one waited
                build(root, lock)
    except OSError as error:
        sys.exit(f".venv cannot be built: {error}.")
    except KeyboardInterrupt:
        print("\nInterrupted: the next call repairs the installation.", file=sys.stderr)
        sys.exit(130)


def is_ready(root):
    """Whether `.venv` was installed to the end, here, from the files as they are now."""
    return read_stamp(root) == stamp(root)


def read_stamp(root):
    """The stamp in `.venv`, line by line; an empty list if there is none."""
    try:
        return (root / ".venv" / STAMP).read_text().splitlines()
    except OSError:
        return []


def stamp(root):
    """What `.venv` depends on: its folder and its Python (scripts name both), and these files."""
    tables = (root / "pyproject.toml").read_text("utf-8").split("\n[")
    relevant = re.compile(r"\[?(build-system|project|tool\.setuptools)\b").match
    digest = hashlib.sha256("\n[".join(filter(relevant, tables)).encode())
    digest.update((root / "requirements.lock").read_bytes() + Path(__file__).read_bytes())
    return [str(root), str((root / ".venv/bin/python").resolve()), digest.hexdigest()]


def lock_folder(root):
    """Wait until no other make installs; the lock lasts as long as this script and its steps."""
    lock = os.open(str(root), os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another make is installing; waiting for it.", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError:  # a file system without locks: go on without one
        pass
    return lock


def build(root, lock):
    """Install what the lock file lists. What somebody else put into `.venv` is never removed."""
    venv = root / ".venv"
    python, ours = venv / "bin" / "python", venv / OURS
    in_place = read_stamp(root)[:2] == stamp(root)[:2]
    venv.mkdir(exist_ok=True)
    if not any(venv.iterdir()):
        ours.touch()
    foreign = not ours.exists()
    usable = runs(python, "import pip, sys; sys.exit(sys.version_info < (3, 11))")
    if foreign and not usable:
        sys.exit(f"{venv} is not ours and has no Python 3.11 with pip: move it away first.")
    (venv / STAMP).write_text("")
    if not foreign and not (usable and in_place):
        check_machine(root)
        for path in set(venv.iterdir()) - {ours}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        print("Building .venv with Python {}.{}.{}.".format(*sys.version_info), flush=True)
        step([sys.executable, "-I", "-m", "venv", venv], venv, lock)
        # Else pip would spend its longest minute on the line that the old setuptools is removed.
        step([python, "-I", "-m", "pip", "uninstall", "--yes", "setuptools"], venv, lock)

    print("Installing the packages: a few minutes the first time.", flush=True)
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    # Half a package, left by an interrupted pip, is mended by a new environment or by force.
    pip += ["--progress-bar", "off"] + ["--force-reinstall"] * foreign
    step([*pip, "-r", root / "requirements.lock"], venv, lock)
    step([*pip, "--no-deps", "--no-build-isolation", "--editable", root], venv, lock)
    shutil.copytree(SETTINGS, venv, dirs_exist_ok=True)
    (venv / STAMP).write_text("\n".join(stamp(root)))
    print("The environment is ready.", flush=True)


def runs(python, code):
    """Whether `python` starts and `code` succeeds in it."""
    try:
        return subprocess.call([python, "-I", "-c", code], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def step(command, venv, lock):
    """Run one step into the log, its latest line on a terminal, its last lines if it fails."""
    begin, lines, width = time.time(), [], shutil.get_terminal_size().columns
    with open(venv / LOG, "ab") as out, open(venv / LOG, errors="replace") as log:
        log.seek(0, os.SEEK_END)
        # It inherits the lock: should this script be killed, the next call waits for the step.
        process = subprocess.Popen(command, stdout=out, stderr=out, pass_fds=[lock])
        while process.poll() is None:
            time.sleep(0.2)
            lines += filter(None, map(str.strip, log))
            said = next((line for line in reversed(lines) if not line.startswith("WARNING")), "")
            latest = f"{time.time() - begin:4.0f} s  {said}"[: width - 1]
            print(end=f"\r\033[K{latest}" if sys.stdout.isatty() else "", flush=True)
        lines += filter(None, map(str.strip, log))
    print(end="\r\033[K" if sys.stdout.isatty() else "", flush=True)
    if process.returncode != 0:
        free = shutil.disk_usage(venv).free / 1e9
        print(*lines[-8:], sep="\n", file=sys.stderr)
        sys.exit(f"The installation failed with {free:.1f} GB of disk space left; see {log.name}.")


def check_machine(root):
    """Exit where this Python is too old, cannot make environments, or has too little disk space."""
    free = shutil.disk_usage(str(root)).free / 1e9
    if sys.version_info < (3, 11):
        why = "Python {}.{} is too old: the course needs Python 3.11 or newer; "
        sys.exit(why.format(*sys.version_info) + "for example make lab PYTHON=python3.12.")
    if importlib.util.find_spec("ensurepip") is None:
        why = "This Python has no venv module (Debian, Ubuntu: apt install python3-venv): "
        sys.exit(why + "install it, then run the same command again.")
    if free < DISK_GB:
        why = f"Too little disk space: .venv needs about {DISK_GB} GB (more with CUDA)"
        sys.exit(f"{why} and {root} has {free:.1f} GB free.")


def check_port(port=""):
    """Exit where `port` is not a number that lab may take, or is taken."""
    if not re.match(r"[0-9]{4,5}$", port) or not 1024 <= int(port) <= 65535:
        sys.exit(f"PORT = {port!r} is not allowed: give a whole number from 1024 to 65535.")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Jupyter does
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError:
            sys.exit(f"PORT = {port} is taken by another program: give another one, or none.")


if __name__ == "__main__":
    main(sys.argv[1:])
