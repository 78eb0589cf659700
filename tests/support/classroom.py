"""A whole class on one server, for real: start the README's JupyterHub, let students log in and run a lesson at once.

python tests/classroom.py --students 10 --lesson 06 --proxy node_modules/.bin/configurable-http-proxy

Everything stays on the loopback interface, in a temporary folder, and ends with the command. It needs jupyterhub and
configurable-http-proxy, and prints what one student takes of the machine's time and memory.
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookiejar import CookieJar
from pathlib import Path

import websocket

ROOT = Path(__file__).parents[2]
PASSWORD = "only for this test"
# What a test adds to the README's configuration: free ports, the proxy's place, and leave to run as root.
EXTRA = """
load_subconfig("jupyterhub_config.py")
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{ports[1]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.Authenticator.allowed_users = {{f"student{{n:02}}" for n in range(1, {students} + 1)}}
c.Spawner.args = [*c.Spawner.args, *{arguments!r}]
"""


def configuration() -> str:
    """The jupyterhub_config.py that the README shows."""
    readme = (ROOT / "README.md").read_text("utf-8")
    (found,) = re.findall(r"```python\n(# jupyterhub_config\.py.+?)```", readme, re.S)
    return found


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def hub(students: int, proxy: str, folder: Path):
    """A hub that runs in `folder` for as long as the block does; gives its address and its process."""
    ports = free_ports(3)
    (folder / "jupyterhub_config.py").write_text(configuration(), "utf-8")
    arguments = ["--allow-root"] if os.getuid() == 0 else []
    extra = EXTRA.format(ports=ports, proxy=proxy, students=students, arguments=arguments)
    (folder / "test_config.py").write_text(extra, "utf-8")
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JUPYTER", "MAKE"))
    }
    environment = clean | {
        "CLASS_PASSWORD": PASSWORD,
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
    }
    with (folder / "hub.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterhub", "-f", "test_config.py"],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            address = f"http://127.0.0.1:{ports[0]}"
            wait_until(lambda: answers(f"{address}/hub/health"), "the hub did not answer", process)
            yield address, process
        finally:
            process.send_signal(signal.SIGINT)  # the hub stops the students' servers and the proxy
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def wait_until(
    condition, complaint: str, process: subprocess.Popen | None = None, seconds: float = 300
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or (process and process.poll() is not None):
            raise TimeoutError(complaint)
        time.sleep(0.2)


class Student:
    """One student's browser, without the browser: logs in with the password, starts a server, runs a notebook."""

    def __init__(self, address: str, name: str):
        self.address, self.name, self.token = address, name, ""
        self.cookies = CookieJar()
        self.browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(self.cookies))

    def login(self, password: str = PASSWORD) -> None:
        """Fill in the form and get a token for the rest. Raises HTTPError 403 for a wrong password."""
        with self.browser.open(f"{self.address}/hub/login", timeout=120):
            pass
        form = {"username": self.name, "password": password, "_xsrf": self._xsrf()}
        data = urllib.parse.urlencode(form).encode()
        no_spawn = f"{self.address}/hub/login?next=%2Fhub%2Ftoken"
        with self.browser.open(no_spawn, data, timeout=120):
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
            urllib.request.Request(url, data, headers, method=method), timeout=300
        ) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def start(self) -> None:
        """Start the student's server and wait until it is there."""
        self.ask("POST", "/hub/api/users/{name}/server", {})
        wait_until(
            lambda: self.ask("GET", "/hub/api/users/{name}")["server"],
            f"{self.name}'s server did not start",
        )

    def run(self, lesson: str) -> list[str]:
        """Run a notebook of the student's own folder from top to bottom; returns what each of its checks said.

        Raises RuntimeError where a cell fails.
        """
        path = f"notebooks/{lesson}.ipynb"
        cells = self.ask("GET", f"/user/{{name}}/api/contents/{path}")["content"]["cells"]
        wanted = {"path": path, "name": lesson, "type": "notebook", "kernel": {"name": "python3"}}
        kernel = self.ask("POST", "/user/{name}/api/sessions", wanted)["kernel"]["id"]
        url = f"{self.address.replace('http', 'ws', 1)}/user/{self.name}/api/kernels/{kernel}/channels"
        said = []
        channel = websocket.create_connection(
            url, timeout=300, header=[f"Authorization: token {self.token}"]
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
    """What became of a class: seconds until the last server was there and until the last lesson was done, the checks'
    words by student, and the largest memory, in MB: of one student, of all, and what the whole machine had less.

    A student's memory is the proportional set size of the server and the kernel: what is shared counts in shares.
    """

    started: float
    finished: float
    said: dict[str, list[str]]
    of_one: float
    of_all: float
    of_the_machine: float


def memory_by_student() -> dict[str, float]:
    """Proportional set size in MB of all processes of each student (Linux only)."""
    found: dict[str, float] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if name := re.search(rb"JUPYTERHUB_USER=(\w+)", (process / "environ").read_bytes()):
                size = re.search(r"^Pss: +(\d+) kB", (process / "smaps_rollup").read_text(), re.M)
                found[name[1].decode()] = found.get(name[1].decode(), 0) + (
                    int(size[1]) / 1024 if size else 0
                )
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def available() -> float:
    """Memory that the machine could still give, in MB."""
    return int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) / 1024


def teach(students: int, lesson: str, proxy: str, folder: Path) -> Outcome:
    """Let `students` start together and each run `lesson`. Raises what the first of them that failed raised."""
    peak, of_all, over = {}, [0.0], threading.Event()
    before, lowest = available(), [available()]

    def watch() -> None:
        while not over.wait(0.5):
            now = memory_by_student()
            peak.update({name: max(size, peak.get(name, 0)) for name, size in now.items()})
            of_all[0], lowest[0] = max(of_all[0], sum(now.values())), min(lowest[0], available())

    with hub(students, proxy, folder) as (address, _), ThreadPoolExecutor(students) as pool:
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
    print(f"{len(outcome.said)} students ran {path.stem} to the end; their checks said {verdicts}")
    print(
        f"all servers there after {outcome.started:.0f} s, all lessons done after {outcome.finished:.0f} s"
    )
    print(
        f"memory at most: {outcome.of_one:.0f} MB for one student, {outcome.of_all:.0f} MB for all of them"
    )
    less = outcome.of_the_machine
    print(f"the machine had {less:.0f} MB less, {less / options.students:.0f} MB for each student")


if __name__ == "__main__":
    main()
