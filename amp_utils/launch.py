"""Start a script on several ranks with torchrun, on this machine, and leave no process behind."""

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch


def launch(script: str | Path, ranks: int, *arguments: object, limit: float = 300.0) -> list:
    """Run `script` on `ranks` processes, show what they print, return each rank's rank0.pt …

    Every rank works in a fresh folder, where it may save its results as f"rank{rank}.pt"; the
    script joins the others by `init_method=os.environ["INIT_METHOD"]`. Raises TimeoutError after
    `limit` seconds, and RuntimeError with the first error when a rank fails. No process and no file
    outlives the call, however it ends, and nothing listens on any network but the loopback.
    """
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        process = _start(Path(script).resolve(), folder, ranks, [str(a) for a in arguments])
        alarm = threading.Timer(limit, lambda: _stop(process))
        try:
            alarm.start()
            for line in process.stdout:
                print(line, end="", flush=True)
            status = process.wait()
        finally:
            alarm.cancel()
            _stop(process)
            process.stdout.read()  # comes back when the last process that could write has ended
        if status and time.monotonic() - begin >= limit:
            raise TimeoutError(f"stopped after {limit:g} seconds.")
        if status:
            raise RuntimeError(last_words(Path(folder, "errors").read_text()))
        saved = sorted(Path(folder).glob("rank*.pt"))
        return [torch.load(path, weights_only=True) for path in saved]


def _start(script: Path, folder: str, ranks: int, arguments: list[str]) -> subprocess.Popen:
    """torchrun in `folder`; the ranks meet through a file, so that launches never collide."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"]
    command += ["--rdzv-endpoint", "meeting", "--local-addr", "127.0.0.1"]
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TMPDIR": folder,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # torchrun's own store listens everywhere
        "INIT_METHOD": f"file://{folder}/store",
        "OMP_NUM_THREADS": "1",  # threads of several ranks on few cores slow each other down
    }
    with open(Path(folder, "errors"), "w") as errors:
        return subprocess.Popen(
            [*command, str(Path(__file__).resolve()), str(script), *arguments],
            cwd=folder,
            env=environment,
            text=True,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )


def _stop(process: subprocess.Popen) -> None:
    """End the ranks, then torchrun: with SIGTERM, and after five seconds with SIGKILL."""
    process.stdin.close()  # the lifeline
    process.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def last_words(errors: str) -> str:
    """The first error, or the signal, out of all that ranks and torchrun have written."""
    error = r"^(?:\[rank\d+\]: )?((?!torch\.distributed\.elastic)[\w.]+(?:Error|Exception)\b.*)"
    signals = re.findall(r"Signal \d+ \(\w+\)", errors)
    # A rank that failed comes first: SIGTERM is how torchrun ends the others.
    lines = re.findall(error, errors, re.M) or sorted(signals, key=lambda s: "SIGTERM" in s)
    return lines[0] if lines else "no reason was given."


def _be_a_rank() -> None:
    """Run the script named in the arguments; end as soon as whoever launched it is gone.

    torchrun gives each rank a session of its own, so that killing torchrun's group does not reach
    it. The pipe from the launching process does: it closes when that process ends.
    """
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
    os.environ["INIT_METHOD"] += "?rank={RANK}&world_size={WORLD_SIZE}".format_map(os.environ)
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))  # as Python does for a script
    runpy.run_path(sys.argv[0], run_name="__main__")
    done, ranks = Path(f"done{os.environ['RANK']}"), int(os.environ["WORLD_SIZE"])
    done.touch()  # nobody hangs up while another still reads
    while not all(Path(f"done{rank}").exists() for rank in range(ranks)):
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    # Leave without tearing Python down: a thread of gloo's that still holds a tensor would abort.
    os._exit(0)  # https://github.com/pytorch/pytorch/pull/179291


if __name__ == "__main__":
    _be_a_rank()
