"""Two commands on a fresh machine: one environment, built once and repaired when interrupted."""

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.processes import LIMIT, answers, free_ports, stop_server, wait_for

from amp_utils.course import bootstrap, notebook

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]
DIRECT = [
    Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines()
    if line[0] != "#"
]
LOCKED = {canonicalize_name(pin.name): pin for pin in LOCK}
CUDA = re.compile(r"nvidia|cuda|triton")  # what pip adds to torch's CUDA build by itself


# --- one environment in three files


def test_the_lock_pins_everything_once_and_suits_every_build_of_torch():
    for pin in LOCK:
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), f"{pin}: not one version"
        assert not CUDA.search(pin.name), f"{pin} belongs to one build of torch only"
    assert len(LOCKED) == len(LOCK)


def test_the_lock_fits_the_loose_ranges_and_lacks_nothing_that_they_need():
    for requirement in DIRECT:
        (pin,) = LOCKED[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version), f"{requirement} is locked at {pin}"
        assert len(requirement.specifier) == 1, f"{requirement}: a range has one end"
    seen, queue = set(), [*DIRECT, Requirement("setuptools")]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if (name, *requirement.extras) in seen or CUDA.search(name):
            continue
        seen.add((name, *requirement.extras))
        assert name in LOCKED, f"{name} is not in requirements.lock"
        further = map(Requirement, importlib.metadata.requires(name) or [])
        extras = [{"extra": extra} for extra in requirement.extras | {""}]
        queue += [new for new in further if not new.marker or any(map(new.marker.evaluate, extras))]


def test_conda_has_the_same_direct_dependencies_and_bounds():
    def bounds(requirement: Requirement) -> tuple[str, str]:
        return canonicalize_name(requirement.name), str(requirement.specifier)

    environment = yaml.safe_load((ROOT / "environment.yml").read_text("utf-8"))
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert environment["channels"][0] == "conda-forge" and pip.pop() == "--editable ."
    conda = [entry for entry in environment["dependencies"] if isinstance(entry, str)]
    pytorch = {
        ("pytorch" if name == "torch" else name, bound) for name, bound in map(bounds, DIRECT)
    }
    (backend,) = map(Requirement, PYPROJECT["build-system"]["requires"])
    others = {("python", PROJECT["requires-python"]), bounds(backend), ("pip", "")}
    assert {bounds(Requirement(entry)) for entry in conda + pip} == pytorch | others


def imported(source: str) -> set[str]:
    """The packages that a source imports, its own relatives apart."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def test_what_is_imported_is_a_direct_dependency():
    sources = {
        path: path.read_text("utf-8")
        for folder in ("amp_utils", "tests", "imgs")
        for path in (ROOT / folder).rglob("*.py")
    }
    ours = {path.stem for path in sources} | {"amp_utils", "support"}
    for path in notebook.lessons(ROOT / "notebooks"):
        code = [cell.source for cell in notebook.cells(path) if cell.is_code]
        sources[path] = re.sub(r"^[%!].*", "", "\n".join(code), flags=re.M)
    direct = {canonicalize_name(requirement.name) for requirement in DIRECT}
    providers = importlib.metadata.packages_distributions()
    for path, source in sources.items():
        for name in imported(source) - ours:
            owners = {canonicalize_name(owner) for owner in providers.get(name, [])}
            assert owners & direct, f"{path.name} imports {name}, which pyproject.toml lacks"


# --- make


ENVIRONMENT = {
    name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
}


def make(*arguments: str) -> subprocess.CompletedProcess:
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def test_help_lists_every_target_in_a_line():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
    lines = make("help").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["make", target] for target in targets if target != "ready"
    ]
    assert all(len(line) <= 120 and len(line.split()) > 3 for line in lines)
    assert make().stdout.splitlines() == lines


def test_a_python_that_is_not_there_is_a_sentence():
    result = make("lint", "PYTHON=python3.99")
    assert result.returncode != 0
    assert result.stderr.startswith("PYTHON = 'python3.99' was not found: give a Python 3.11")


def test_a_wrong_or_taken_port_is_a_sentence_before_any_work(tmp_path):
    def refusal(port: str) -> str:
        with pytest.raises(SystemExit) as stop:
            bootstrap.main(["--port", port], tmp_path)
        assert not any(tmp_path.iterdir())
        return str(stop.value)

    for port in ("many", "80", "70000", "-1", "8888 9999", "٩٩٩٩"):
        assert refusal(port) == (
            f"PORT = {port!r} is not allowed: give a whole number from 1024 to 65535."
        )
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert refusal(port) == (
            f"PORT = {port} is taken by another program: give another one, or none."
        )


def test_lab_checks_the_port_it_is_given_and_takes_no_other():
    first, *rest = make("--dry-run", "lab", "PORT=8123").stdout.split("bootstrap.py ", 1)[1:]
    check, recipe = first.split("\n", 1)
    assert check == '--port "8123"' and not rest
    assert "-m amp_utils.course lab" in recipe and '--port "8123"' in recipe
    assert "--port" not in make("--dry-run", "lab").stdout


def test_lab_opens_copies_unless_an_author_edits():
    def options(*arguments: str) -> list[str]:
        said = make("--dry-run", "lab", *arguments).stdout.replace("\\\n", "")
        return said.split("amp_utils.course lab", 1)[1].split()

    assert options() == options("EDIT=no", "BROWSER=yes") == []
    assert options("EDIT=yes", "BROWSER=no") == ["--no-browser", "--edit"]


@pytest.mark.full
@pytest.mark.skipif(not bootstrap.is_ready(ROOT), reason="there is no .venv to start at once")
def test_lab_answers_on_loopback_and_wants_its_token(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as out:
        lab = subprocess.Popen(
            ["make", "lab", "BROWSER=no", "EDIT=yes", f"PORT={free_ports(1)[0]}"],
            cwd=ROOT,
            env=ENVIRONMENT | {"JUPYTER_RUNTIME_DIR": str(tmp_path)},
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        first = (
            r"(http://127\.0\.0\.1:\d+)/lab/tree/notebooks/00_start_here\.ipynb\?token=(\w{32,})"
        )
        wait_for(lambda: re.search(first, said.read_text()) or lab.poll() is not None)
        address, token = re.search(first, said.read_text()).groups()
        contents = f"{address}/api/contents/notebooks"
        wait_for(lambda: answers(address))  # Jupyter prints its address before it listens there
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(contents, timeout=LIMIT)
        with urllib.request.urlopen(f"{contents}?token={token}", timeout=LIMIT) as answer:
            names = [entry["name"] for entry in json.load(answer)["content"]]
        assert "00_start_here.ipynb" in names
    finally:
        stop_server(lab)


# --- what stops an installation is one sentence


def test_the_bootstrap_is_written_for_an_old_python():
    source = Path(bootstrap.__file__)
    ast.parse(source.read_text("utf-8"), feature_version=(3, 6))
    ruff = [shutil.which("ruff", path=Path(sys.executable).parent), "check", "--isolated"]
    found = subprocess.run(
        [*ruff, "--target-version=py37", "--select=E9", source], capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout
    assert not imported(source.read_text("utf-8"))


@pytest.mark.parametrize(
    ("thing", "replacement", "sentence"),
    [
        ("sys.version_info", (3, 10, 2), "Python 3.10 is too old: the course needs Python 3.11"),
        ("importlib.util.find_spec", lambda _: None, "This Python has no venv module"),
        (
            "shutil.disk_usage",
            lambda _: SimpleNamespace(free=1.2e9),
            "Too little disk space: 1.2 GB; .venv needs 3 GB, more with CUDA.",
        ),
    ],
)
def test_a_machine_that_will_not_do_is_a_sentence(monkeypatch, thing, replacement, sentence):
    usage = lambda _: SimpleNamespace(free=9e9)  # noqa: E731
    monkeypatch.setattr(bootstrap.shutil, "disk_usage", usage)
    bootstrap.check_machine("/here")
    with monkeypatch.context() as patch:
        patch.setattr(thing, replacement)
        with pytest.raises(SystemExit) as stop:
            bootstrap.check_machine("/here")
    assert str(stop.value).startswith(sentence) and "\n" not in str(stop.value)


def test_what_changes_the_environment_makes_it_stale(tmp_path):
    for name in ("pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path)
    now = bootstrap.stamp(tmp_path)
    for name in ("pyproject.toml", "requirements.lock"):
        (tmp_path / name).write_text("")
        assert bootstrap.stamp(tmp_path) != now, name
        shutil.copy(ROOT / name, tmp_path)
    assert bootstrap.stamp(tmp_path) == now
    text = (ROOT / "pyproject.toml").read_text()
    for settings in ("[tool.pytest.ini_options]\n", "[tool.ruff]\n"):
        (tmp_path / "pyproject.toml").write_text(text.replace(settings, f"{settings}# a comment\n"))
        assert bootstrap.stamp(tmp_path) == now, settings


# --- a small project that is installed for real, without a network

BACKEND = '''
"""A build backend for the tests; while there is a file `slow`, it says that it is `building` and waits."""
import os, time, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    while os.path.exists("slow"):
        open("building", "w").close()
        time.sleep(0.1)
    with zipfile.ZipFile(os.path.join(folder, "small-1.0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n")
        wheel.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    return "small-1.0-py3-none-any.whl"
'''  # noqa: E501


class Project:
    """A project whose lock names one tiny package, `tiny`, out of a folder of wheels."""

    def __init__(self, folder: Path):
        self.folder, self.venv, self.calls = folder, folder / ".venv", 0
        toolbox = folder / "amp_utils" / "course"
        shutil.copytree(bootstrap.SETTINGS, toolbox / "settings")
        shutil.copy(bootstrap.__file__, toolbox)
        (folder / "backend.py").write_text(BACKEND)
        (folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
            '[project]\nname = "small"\nversion = "1.0"\n'
        )
        for version in ("1.0", "1.1"):
            self._wheel(version)
        self.lock("1.0")

    def _wheel(self, version: str) -> None:
        about = f"tiny-{version}.dist-info"
        files = {
            "tiny.py": f"version = {version!r}\n",
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
            f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{about}/entry_points.txt": "[console_scripts]\ntiny = tiny:print\n",
            f"{about}/RECORD": "",
        }
        with zipfile.ZipFile(self.folder / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)

    def lock(self, version: str) -> None:
        lines = ["--no-index", f"--find-links {self.folder}", f"tiny=={version}", ""]
        (self.folder / "requirements.lock").write_text("\n".join(lines))

    def slow(self) -> Path:
        """Make the last step wait; the file returned appears once it does."""
        (self.folder / "slow").touch()
        (self.folder / "building").unlink(missing_ok=True)
        return self.folder / "building"

    def start(self) -> tuple[subprocess.Popen, Path, Path]:
        """A running installation, and the files that receive its standard output and error."""
        self.calls += 1
        out, err = (self.folder / f"{name}{self.calls}" for name in ("out", "err"))
        command = [sys.executable, "-I", self.folder / "amp_utils" / "course" / "bootstrap.py"]
        # In a background job interrupts are ignored, and this is inherited.
        heed_interrupts = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
        with out.open("w") as stdout, err.open("w") as stderr:
            pipes = {"stdout": stdout, "stderr": stderr, "start_new_session": True}
            return subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes), out, err

    def install(self) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of one call."""
        process, out, err = self.start()
        return process.wait(LIMIT), out.read_text(), err.read_text()

    def tiny(self) -> str:
        """What the environment's own Python finds of the tiny package."""
        command = [self.venv / "bin" / "python", "-c", "import tiny; print(tiny.version)"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.full
def test_the_second_call_does_nothing_and_a_changed_lock_is_followed_in_place(project):
    status, out, err = project.install()
    assert (status, err) == (0, "") and out.endswith("The environment is ready.\n")
    assert project.tiny() == "1.0"
    for path in bootstrap.SETTINGS.rglob("*.json"):
        copied = project.venv / path.relative_to(bootstrap.SETTINGS)
        assert json.loads(copied.read_text()) == json.loads(path.read_text())
    files = {path: path.stat() for path in project.venv.rglob("*") if path.suffix != ".pyc"}
    assert project.install() == (0, "", "")
    assert all(path.stat().st_mtime_ns == stat.st_mtime_ns for path, stat in files.items())

    (project.venv / "mine").touch()
    project.lock("1.1")
    assert project.install()[0] == 0
    assert project.tiny() == "1.1" and (project.venv / "mine").exists()

    project.lock("9.9")
    status, out, err = project.install()
    assert status == 1 and "No matching distribution found for tiny==9.9" in err  # pip's own words
    assert re.search(r"\nThe installation failed; see .*/install\.log\.\n$", err)
    assert "tiny==9.9" in (project.venv / bootstrap.LOG).read_text()


@pytest.mark.full
def test_an_interrupted_installation_is_repaired_by_the_next_call(project):
    for number in (signal.SIGINT, signal.SIGKILL):
        building = project.slow()
        process, _, err = project.start()
        wait_for(building.exists)
        os.killpg(process.pid, number)
        assert process.wait(LIMIT) == (130 if number == signal.SIGINT else -number)
        if number == signal.SIGINT:
            said = err.read_text().splitlines()[-1]  # below what pip says
            assert said == "Interrupted: the next call repairs the installation."
        assert not bootstrap.is_ready(project.folder)
        (project.venv / "half-written").touch()
    (project.folder / "slow").unlink()
    assert project.install()[0] == 0
    assert project.tiny() == "1.0" and not (project.venv / "half-written").exists()  # built anew
    assert project.install() == (0, "", "")


@pytest.mark.full
def test_two_calls_at_once_build_one_environment(project):
    building = project.slow()
    first, _, _ = project.start()
    wait_for(building.exists)
    second, out, _ = project.start()
    waiting = "Installing into .venv, after any make that does already: some minutes.\n"
    wait_for(out.read_text)
    (project.folder / "slow").unlink()
    assert first.wait(LIMIT) == second.wait(LIMIT) == 0
    assert out.read_text() == waiting and project.tiny() == "1.0", "the second installed nothing"


@pytest.mark.full
def test_what_somebody_else_made_is_never_cleared(project):
    mine = project.venv / "mine"
    mine.parent.mkdir()
    mine.touch()
    status, out, err = project.install()
    assert status == 1 and err.count("\n") == 1
    assert "is not ours and has no Python 3.11 with pip: move it away" in err
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]

    subprocess.run([sys.executable, "-m", "venv", project.venv], check=True)
    assert project.install()[0] == 0
    assert project.tiny() == "1.0" and mine.exists()
    (project.venv / bootstrap.STAMP).unlink()  # as if it had been interrupted
    next(project.venv.glob("lib/*/site-packages/tiny.py")).write_text("")
    assert project.install()[0] == 0
    assert project.tiny() == "1.0" and mine.exists()


@pytest.mark.full
def test_a_moved_folder_is_installed_again_because_its_scripts_name_the_old_one(project):
    assert project.install()[0] == 0
    assert str(project.folder) in (project.venv / "bin" / "tiny").read_text()
    moved = Project.__new__(Project)
    moved.folder = project.folder.rename(project.folder.with_name("moved"))
    moved.venv, moved.calls = moved.folder / ".venv", 2
    moved.lock("1.0")
    assert moved.install()[0] == 0
    assert str(moved.folder) in (moved.venv / "bin" / "tiny").read_text()
