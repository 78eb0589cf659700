"""Build or repair the project's `.venv`: called by `make`, standard library only. [--port PORT]

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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Jupyter without news, update checks and a warning at every kernel start (loopback is unencrypted).
SETTINGS = Path(__file__).with_name("settings")
STAMP, OURS, LOG = ".amp-ready", ".amp-ours", "install.log"


def main(arguments, root=ROOT):
    """Make `.venv` in `root` ready, or exit with a sentence; a port is checked before any work."""
    try:
        if arguments[:1] == ["--port"]:
            check_port(*arguments[1:2])
        if not is_ready(root):
            build(root)
    except OSError as error:
        sys.exit(f".venv cannot be built: {error}.")
    except KeyboardInterrupt:
        print("\nInterrupted: the next call repairs the installation.", file=sys.stderr)
        sys.exit(130)


def is_ready(root):
    """Whether `.venv` was installed to the end, here, from the files as they are now."""
    return old_stamp(root) == stamp(root)


def old_stamp(root):
    """The stamp of the last installation; empty if there is none or it was interrupted."""
    path = root / ".venv" / STAMP
    return path.read_text().splitlines() if path.exists() else []


def stamp(root):
    """What `.venv` depends on: its folder and its Python (scripts name both), and these files."""
    project = (root / "pyproject.toml").read_bytes().partition(b"[tool.pytest")[0]  # no tools' part
    files = project + (root / "requirements.lock").read_bytes() + Path(__file__).read_bytes()
    digest = hashlib.sha256(files).hexdigest()
    return [str(root), str((root / ".venv/bin/python").resolve()), digest]


def build(root):
    """Install what the lock file lists. What somebody else put into `.venv` is never removed."""
    lock = os.open(str(root), os.O_RDONLY)
    print("Installing into .venv, after any make that does already: some minutes.", flush=True)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if is_ready(root):
        return
    venv = root / ".venv"
    python, ours = venv / "bin" / "python", venv / OURS
    in_place = old_stamp(root)[:2] == stamp(root)[:2]
    venv.mkdir(exist_ok=True)
    if not any(venv.iterdir()):
        ours.touch()
    foreign = not ours.exists()
    test = [python, "-I", "-c", "import pip, sys; sys.exit(sys.version_info < (3, 11))"]
    usable = python.exists() and subprocess.call(test, stderr=subprocess.DEVNULL) == 0
    if foreign and not usable:
        sys.exit(f"{venv} is not ours and has no Python 3.11 with pip: move it away first.")
    (venv / STAMP).write_text("")
    pip = [python, "-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
    # Half a package, left by an interrupted pip, is mended by a new environment or by force.
    pip += ["--log", venv / LOG] + ["--force-reinstall"] * (foreign and not in_place)
    steps = [[*pip, "-r", root / "requirements.lock"]]
    steps += [[*pip, "--no-deps", "--no-build-isolation", "--editable", root]]
    if not foreign and not (usable and in_place):
        check_machine(root)
        for path in set(venv.iterdir()) - {ours}:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        steps.insert(0, [sys.executable, "-I", "-m", "venv", venv])
    for step in steps:
        # A step inherits the lock: should this script be killed, the next call waits for it.
        if subprocess.call(step, pass_fds=[lock]) != 0:
            sys.exit(f"The installation failed; see {venv / LOG}.")
    shutil.copytree(SETTINGS, venv, dirs_exist_ok=True)
    (venv / STAMP).write_text("\n".join(stamp(root)))
    print("The environment is ready.", flush=True)


def check_machine(root):
    """Exit where this Python is too old, cannot make environments, or has too little disk space."""
    free = shutil.disk_usage(str(root)).free / 1e9
    if sys.version_info < (3, 11):
        old = "Python {}.{} is too old: the course needs".format(*sys.version_info)
        sys.exit(f"{old} Python 3.11 or newer; for example make lab PYTHON=python3.12.")
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("This Python has no venv module (on Debian and Ubuntu: apt install python3-venv).")
    if free < 3:
        sys.exit(f"Too little disk space: {free:.1f} GB; .venv needs 3 GB, more with CUDA.")


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
