"""Build or repair the project's `.venv`: a plain script for the Python that `make` finds, standard library only.

    python3 -I amp_utils/course/bootstrap.py [--port PORT]

A marker stands in `.venv` while it is being installed and becomes the stamp at the very end, so that an interrupted
installation is recognised and rebuilt by the next call. Where the stamp fits, a call takes a few milliseconds.
The syntax is that of Python 3.6 on purpose: an old Python must get as far as the sentence that says that it is too old.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import select
import shutil
import socket
import subprocess
import sys
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
OLDEST = (3, 11)
DISK_GB = 3
MARKER, STAMP, LOG = ".amp-installing", ".amp-ready", "install.log"
# Files of the environment that keep Jupyter quiet: no news prompt, no update check, no warning at every kernel start
# (ipykernel's, that the loopback connection between notebook and kernel is not encrypted).
SETTINGS = {
    "share/jupyter/lab/settings/overrides.json": {
        "@jupyterlab/apputils-extension:notification": {
            "fetchNews": "false",
            "checkForUpdates": False,
        }
    },
    "etc/ipython/ipython_kernel_config.json": {"IPKernelApp": {"log_level": 50}},
}


class SetupError(Exception):
    """Why there is no environment: one sentence for the person at the console."""


def main(arguments, root=ROOT):
    """Make `.venv` in `root` ready; returns the exit status. `--port PORT` is checked first, before any work."""
    try:
        if arguments[:1] == ["--port"]:
            check_port(*arguments[1:2])
        if not is_ready(root):
            with only_one(root) as lock:
                if not is_ready(root):  # another make may have built it while this one waited
                    build(root, lock)
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        space = "; free some disk space" if error.errno == 28 else ""
        print(f".venv cannot be built: {error}{space}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: the next call repairs the installation.", file=sys.stderr)
        return 130
    return 0


def is_ready(root):
    """Whether the stamp in `.venv` was made for this lock, this project file, this place and the Python still there."""
    venv = os.path.join(root, ".venv")
    return read_note(venv, STAMP).get("key") == key(root) and not os.path.exists(
        os.path.join(venv, MARKER)
    )


def key(root):
    """A hash of all that decides what `.venv` holds. Moving the folder changes it: scripts in there hold its path."""
    digest = hashlib.sha256()
    for name in ("requirements.lock", "pyproject.toml", "amp_utils/course/bootstrap.py"):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(file.read())
    python = os.path.realpath(os.path.join(root, ".venv", "bin", "python"))
    digest.update("\n".join([root, python, str(os.path.exists(python))]).encode())
    return digest.hexdigest()


def build(root, lock):
    """Install what the lock says; `lock` is the descriptor that keeps a second installation waiting."""
    venv = os.path.join(root, ".venv")
    python = os.path.join(venv, "bin", "python")
    interrupted, finished = read_note(venv, MARKER), read_note(venv, STAMP)
    there = (
        [name for name in os.listdir(venv) if not name.startswith(MARKER)]
        if os.path.exists(venv)
        else []
    )
    # An environment that this script did not make is installed into, never cleared.
    ours = (interrupted or finished).get("ours", not there)
    start_over = ours and (
        interrupted or not runs(python, f"import sys; sys.exit(sys.version_info < {OLDEST})")
    )
    if start_over:
        check_python()
    elif not runs(python, f"import sys; sys.exit(sys.version_info < {OLDEST})"):
        raise SetupError(
            f"{venv} is not this project's and has no working Python 3.11: move it away, then try again."
        )

    os.makedirs(venv, exist_ok=True)
    write_note(venv, MARKER, {"ours": ours})
    if start_over:
        for name in there:
            remove(os.path.join(venv, name))
        check_disk(root)
        say("Building .venv with Python {}.{}.{}.".format(*sys.version_info[:3]))
        step([sys.executable, "-I", "-m", "venv", venv], venv, lock)
    if not runs(python, "import pip"):
        step([python, "-I", "-m", "ensurepip"], venv, lock)

    pip = [
        python,
        "-I",
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--no-input",
        "install",
        "--progress-bar",
        "off",
    ]
    requirements = os.path.join(root, "requirements.lock")
    with open(requirements) as file:
        total = sum(1 for line in file if "==" in line and line[0] != "#" and ";" not in line)
    say(f"Installing {total} packages; the first time this takes a few minutes.")
    # What an interrupted pip left behind in an environment that may not be cleared is not to be trusted.
    again = ["--force-reinstall"] if interrupted and not ours else []
    step([*pip, *again, "-r", requirements], venv, lock, total)
    step([*pip, "--no-deps", "--no-build-isolation", "--editable", root], venv, lock)
    for name, settings in SETTINGS.items():
        os.makedirs(os.path.join(venv, os.path.dirname(name)), exist_ok=True)
        write_note(venv, name, settings)
    write_note(venv, MARKER, {"ours": ours, "key": key(root)})
    os.replace(os.path.join(venv, MARKER), os.path.join(venv, STAMP))
    say("The environment is ready.")


def check_python(version=sys.version_info, find_spec=importlib.util.find_spec):
    """Raise SetupError where this Python is too old or cannot make environments."""
    if tuple(version[:2]) < OLDEST:
        raise SetupError(
            f"Python {version[0]}.{version[1]} is too old: the course needs Python {OLDEST[0]}.{OLDEST[1]} or newer"
            " (to use another Python: make lab PYTHON=python3.12)."
        )
    for module in ("venv", "ensurepip"):
        if find_spec(module) is None:
            raise SetupError(
                f"This Python has no {module} module: install it (on Debian and Ubuntu: apt install python3-venv),"
                " then run the same command again."
            )


def check_disk(root, disk_usage=shutil.disk_usage):
    """Raise SetupError where there is too little space to begin with."""
    free = disk_usage(root).free / 1e9
    if free < DISK_GB:
        raise SetupError(
            f"Too little disk space: .venv needs about {DISK_GB} GB (more with CUDA) and {root} has {free:.1f} GB free."
        )


def check_port(port=""):
    """Raise SetupError where `port` is not a number, or is taken."""
    if not re.match(r"[0-9]{1,5}$", port) or not 1024 <= int(port) <= 65535:
        raise SetupError(f"PORT = {port!r} is not allowed: give a whole number from 1024 to 65535.")
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as Jupyter does: a port just left is free
        try:
            probe.bind(("127.0.0.1", int(port)))
        except OSError:
            raise SetupError(
                f"PORT = {port} is taken by another program: give another one, or none."
            ) from None


def runs(python, code):
    """Whether `python` starts and `code` succeeds in it."""
    try:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.call([python, "-I", "-c", code], **quiet) == 0
    except OSError:
        return False


def step(command, venv, lock, total=0):
    """Run one step of the installation and keep its output in the log; SetupError with its reason where it fails."""
    # The step inherits the lock: should this script be killed, the next call waits for what it left running.
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[lock]
    )
    try:
        output = watch(process.stdout, total)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    log = os.path.join(venv, LOG)
    with (
        contextlib.suppress(OSError),
        open(log, "a") as file,
    ):  # a full disk must not hide its own message
        file.write(output)
    if process.wait() != 0:
        raise SetupError(reason(output, log))


def watch(pipe, total):
    """Read a running step to its end and return what it printed; for a step of `total` packages show where it is.

    On a terminal that is one line, rewritten every second; elsewhere a line for every 25 packages.
    """
    begin, output, seen, shown, doing = time.time(), "", 0, 0, ""
    terminal = sys.stdout.isatty()
    while True:
        if select.select([pipe], [], [], 1)[0]:
            data = os.read(pipe.fileno(), 65536)
            if not data:
                break
            output += data.decode("utf-8", "replace")
            seen = min(
                total,
                len(re.findall(r"^(?:Collecting|Processing|Requirement already) ", output, re.M)),
            )
            files = re.findall(
                r"^ *(?:Downloading|Using cached|Processing) (\S+(?: \([0-9.]+ .B\))?)",
                output,
                re.M,
            )
            doing = files[-1].split("/")[-1] if files else ""
            if "\nInstalling collected packages" in output:
                doing = "unpacking and installing"
        seconds = f"{time.time() - begin:.0f} s"
        if total and terminal:
            line = f"[{seen}/{total}] {seconds}  {doing}"
            print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)
        elif total and (seen >= shown + 25 or (seen == total and shown < total)):
            shown = seen
            say(f"  {seen} of {total} packages found after {seconds}")
    if total and terminal:
        print("\r\033[K", end="", flush=True)
    return output


def reason(output, log):
    """One sentence on why a step failed, from what it printed."""
    again = "then run the same command again"
    if "No space left on device" in output:
        places = "{} or {}".format(os.path.dirname(log), os.environ.get("TMPDIR", "/tmp"))
        return f"No disk space was left during the installation: free some in {places}, {again}."
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no message"]
    errors = [line for line in lines if re.match(r"(?i)(\w*error)\b", line)] or lines
    last = re.sub(r"^ERROR: *", "", errors[-1]).rstrip(".")
    if re.search(r"Retrying \(|Max retries exceeded|name resolution", output):
        return f"The package index does not answer ({last}): check the network connection, {again}."
    return f"The installation failed: {last} (see {log})."


@contextlib.contextmanager
def only_one(root):
    """Hold a lock on the project folder, so that two makes at once do not install over each other."""
    descriptor = os.open(root, os.O_RDONLY)
    try:
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("Another make is installing; waiting for it.")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # a file system without locks: go on as before
            pass
        yield descriptor
    finally:
        os.close(descriptor)


def read_note(venv, name):
    """The JSON object in a file of the environment; an empty one where there is none."""
    try:
        with open(os.path.join(venv, name)) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def write_note(venv, name, note):
    """Write a JSON object so that the file is there in full or not at all."""
    path = os.path.join(venv, name)
    with open(path + ".new", "w") as file:
        json.dump(note, file)
    os.replace(path + ".new", path)


def remove(path):
    """Remove a file, a link or a folder."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.remove(path)


def say(sentence):
    """Print a line at once."""
    print(sentence, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
