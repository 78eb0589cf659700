"""A whole class on one server, for real: start the course's hub; students log in and run a lesson.

python tests/support/classroom.py --students 10 --lesson 06 --proxy path/to/configurable-http-proxy

Everything stays on the loopback interface, in a temporary folder, and ends with the command.
It prints what one student takes of the machine's time and memory.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path

import psutil
import websocket

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))  # also where this file is run as a script

from support.processes import LIMIT, free_ports, wait_for  # noqa: E402

PASSWORD = "only for this test"
CONFIGURATION = ROOT / ".jupyterhub" / "jupyterhub_config.py"
# What a trial adds: ports of its own, the proxy's place, and leave to run as root.
EXTRA = """
load_subconfig({configuration!r})
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{ports[1]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.Authenticator.allowed_users = {{f"student{{n:02}}" for n in range(1, {students} + 1)}}
c.Spawner.args = [*c.Spawner.args, *{arguments!r}]
"""


@contextmanager
def hub(students: int, proxy: str, folder: Path) -> Iterator[str]:
    """The address of a hub that runs in `folder` for as long as the block does.

    JupyterHub cannot choose its ports itself, so one that ends at once is started again on others.
    """
    for _ in range(3):
        ports = free_ports(3)
        process = start_hub(students, proxy, folder, ports)
        try:
            address = f"http://127.0.0.1:{ports[0]}"
            wait_for(lambda: process.poll() is not None or answers(f"{address}/hub/health"))  # noqa: B023
            if process.poll() is None:
                yield address
                return
        finally:
            process.send_signal(signal.SIGINT)  # the hub stops the students' servers and the proxy
            try:
                process.wait(LIMIT)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    raise RuntimeError(f"The hub did not start; {folder / 'hub.log'} says why.")


def start_hub(students: int, proxy: str, folder: Path, ports: list[int]) -> subprocess.Popen:
    extra = EXTRA.format(
        configuration=str(CONFIGURATION),
        ports=ports,
        proxy=proxy,
        students=students,
        arguments=["--allow-root"] if os.getuid() == 0 else [],
    )
    (folder / "trial_config.py").write_text(extra, "utf-8")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JUPYTER", "MAKE"))
    }
    own = {"CLASS_PASSWORD": PASSWORD, "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    command = [sys.executable, "-m", "jupyterhub", "-f", "trial_config.py"]
    with (folder / "hub.log").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, env=clean | own, stdout=log, stderr=log, start_new_session=True
        )


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


class Student:
    """A student without a browser: logs in with the password, starts a server, runs a notebook."""

    def __init__(self, address: str, name: str):
        self.address, self.name, self.token = address, name, ""
        self.cookies = CookieJar()
        self.browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def login(self, password: str = PASSWORD) -> None:
        """Fill in the form and get a token for the rest. HTTPError 403 for a wrong password."""
        with self.browser.open(f"{self.address}/hub/login", timeout=LIMIT):
            pass
        form = {"username": self.name, "password": password, "_xsrf": self._xsrf()}
        data = urllib.parse.urlencode(form).encode()
        no_spawn = f"{self.address}/hub/login?next=%2Fhub%2Ftoken"
        with self.browser.open(no_spawn, data, timeout=LIMIT):
            pass
        self.token = self.ask("POST", "/hub/api/users/{name}/tokens", {"note": "class"})["token"]

    def _xsrf(self) -> str:
        return [cookie.value for cookie in self.cookies if cookie.name == "_xsrf"][-1]

    def ask(self, method: str, path: str, body: dict | None = None):
        """One call of an API of the hub or of the student's server."""
        headers = (
            {"Authorization": f"token {self.token}"}
            if self.token
            else {"X-XSRFToken": self._xsrf()}
        )
        headers |= {"Content-Type": "application/json", "Referer": f"{self.address}/hub/token"}
        url = self.address + path.format(name=self.name)
        data = None if body is None else json.dumps(body).encode()
        with self.browser.open(
            urllib.request.Request(url, data, headers, method=method), timeout=LIMIT
        ) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def start(self) -> None:
        """Start the student's server and wait until it is there."""
        self.ask("POST", "/hub/api/users/{name}/server", {})
        wait_for(lambda: self.ask("GET", "/hub/api/users/{name}")["server"])

    def run(self, lesson: str) -> list[str]:
        """Run a notebook of the student's own folder; returns what each of its checks said.

        Raises RuntimeError if a cell fails.
        """
        path = f"notebooks/{lesson}.ipynb"
        cells = self.ask("GET", f"/user/{{name}}/api/contents/{path}")["content"]["cells"]
        wanted = {"path": path, "name": lesson, "type": "notebook", "kernel": {"name": "python3"}}
        kernel = self.ask("POST", "/user/{name}/api/sessions", wanted)["kernel"]["id"]
        server = f"{self.address.replace('http', 'ws', 1)}/user/{self.name}"
        said = []
        channel = websocket.create_connection(
            f"{server}/api/kernels/{kernel}/channels",
            timeout=LIMIT,
            header=[f"Authorization: token {self.token}"],
        )
        try:
            for number, cell in enumerate(cells):
                if cell["cell_type"] == "code":
                    printed = execute(
                        channel, cell["source"], f"{self.name}: {lesson}, cell {number}"
                    )
                    said += [printed] if "check" in cell["metadata"].get("tags", []) else []
        finally:
            channel.close()
        return said


def execute(channel: websocket.WebSocket, source: str, where: str) -> str:
    """Run source in a kernel; returns what it printed. Raises RuntimeError where it fails."""
    header = {
        "msg_id": uuid.uuid4().hex,
        "session": uuid.uuid4().hex,
        "username": "",
        "version": "5.3",
    }
    content = {
        "code": source,
        "silent": False,
        "store_history": True,
        "allow_stdin": False,
        "stop_on_error": True,
    }
    message = {
        "header": header | {"msg_type": "execute_request"},
        "parent_header": {},
        "metadata": {},
    }
    channel.send(json.dumps(message | {"content": content, "channel": "shell", "buffers": []}))
    printed, replied, idle = "", False, False
    while not (replied and idle):
        answer = json.loads(channel.recv())
        if answer["parent_header"].get("msg_id") != header["msg_id"]:
            continue
        kind, content = answer["header"]["msg_type"], answer["content"]
        printed += content["text"] if kind == "stream" else ""
        idle |= kind == "status" and content["execution_state"] == "idle"
        replied |= kind == "execute_reply"
        if kind == "error":
            raise RuntimeError(f"{where}: {content['ename']}: {content['evalue']}")
    return printed


@dataclass
class Outcome:
    """Seconds until the last server was there and until the last lesson was done, what the checks
    said to each student, and the largest memory in MB: of one student, of all, of the machine.

    A student's memory is the proportional set size of server and kernel: what is shared is divided.
    """

    started: float
    finished: float
    said: dict[str, list[str]]
    of_one: float
    of_all: float
    of_the_machine: float


def memory_by_student() -> dict[str, float]:
    """Proportional set size in MB of all processes of each student (Linux only)."""
    found = Counter()
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is somebody else's
            if name := process.environ().get("JUPYTERHUB_USER"):
                found[name] += process.memory_full_info().pss / 2**20
    return found


def available() -> float:
    """Memory that the machine could still give, in MB."""
    return psutil.virtual_memory().available / 2**20


def teach(students: int, lesson: str, proxy: str, folder: Path) -> Outcome:
    """Let `students` start together and each run `lesson`. Raises what the first failure raised."""
    peak, of_all, over = {}, [0.0], threading.Event()
    before, lowest = available(), [available()]

    def watch() -> None:
        while not over.wait(0.5):
            now = memory_by_student()
            peak.update({name: max(size, peak.get(name, 0)) for name, size in now.items()})
            of_all[0], lowest[0] = max(of_all[0], sum(now.values())), min(lowest[0], available())

    with hub(students, proxy, folder) as address, ThreadPoolExecutor(students) as pool:
        watching = threading.Thread(target=watch)
        watching.start()
        try:
            group = [Student(address, f"student{n:02}") for n in range(1, students + 1)]
            list(pool.map(Student.login, group))
            begin = time.monotonic()
            list(pool.map(Student.start, group))
            started = time.monotonic() - begin
            said = list(pool.map(lambda student: student.run(lesson), group))
            finished = time.monotonic() - begin
        finally:
            over.set()
            watching.join()
    names = {student.name: words for student, words in zip(group, said, strict=True)}
    return Outcome(started, finished, names, max(peak.values()), of_all[0], before - lowest[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--students", type=int, default=10)
    parser.add_argument("--lesson", default="06")
    parser.add_argument("--proxy", default="configurable-http-proxy")
    options = parser.parse_args()
    proxy = shutil.which(options.proxy)
    if not proxy:
        parser.error(
            f"{options.proxy} was not found: give the place of configurable-http-proxy with --proxy"
        )
    path = next((ROOT / "build/handout/students").glob(f"{options.lesson}*.ipynb"), None)
    if not path:
        parser.error(f"there is no lesson {options.lesson} in build/handout: run make handout")
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = teach(options.students, path.stem, os.path.abspath(proxy), Path(folder))
        except Exception:
            print(Path(folder, "hub.log").read_text()[-3000:], file=sys.stderr)
            raise
    verdicts = sorted({words[:1] for said in outcome.said.values() for words in said})
    less = outcome.of_the_machine
    print(f"{len(outcome.said)} students ran {path.stem} to the end; their checks said {verdicts}")
    print(
        f"all servers there after {outcome.started:.0f} s, all done after {outcome.finished:.0f} s"
    )
    print(f"memory at most: {outcome.of_one:.0f} MB for one, {outcome.of_all:.0f} MB for all")
    print(f"the machine had {less:.0f} MB less, {less / options.students:.0f} MB for each student")


if __name__ == "__main__":
    main()
