"""Two commands on a fresh machine: one environment in three files, built once, repaired when interrupted."""

import ast
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections import namedtuple
from functools import partial
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from amp_utils.course import bootstrap

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [
    Requirement(line) for line in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
]
LOCK = [
    Requirement(line)
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if line[0] != "#"
]
LOCKED = {canonicalize_name(pin.name): pin for pin in LOCK}
# What pip adds to torch's CUDA build by itself.
CUDA = re.compile(r"nvidia|cuda|triton")


def bounds(requirement: Requirement) -> tuple[str, str]:
    return canonicalize_name(requirement.name), str(requirement.specifier)


# --- the three files


def test_the_lock_pins_everything_once_and_suits_every_build_of_torch():
    for pin in LOCK:
        assert re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)), (
            f"{pin} is not one exact version"
        )
        assert not CUDA.search(pin.name), f"{pin} belongs to one build of torch only"
    assert len(LOCKED) == len(LOCK)
    assert str(LOCKED["torch"]) == "torch==2.13.0"


@pytest.mark.parametrize("requirement", DIRECT, ids=str)
def test_the_lock_fits_the_loose_ranges(requirement):
    (pin,) = LOCKED[canonicalize_name(requirement.name)].specifier
    assert requirement.specifier.contains(pin.version)
    assert len(requirement.specifier) == 1, "a range has one end"


def test_the_lock_lacks_nothing_that_the_direct_dependencies_need():
    needed, queue = set(), [*DIRECT, Requirement("setuptools")]
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        key = (name, frozenset(requirement.extras))
        if key in needed or CUDA.search(name):
            continue
        needed.add(key)
        assert name in LOCKED, f"{name} is not in requirements.lock"
        for line in importlib.metadata.requires(name) or []:
            further = Requirement(line)
            if any(
                further.marker is None or further.marker.evaluate({"extra": e})
                for e in requirement.extras | {""}
            ):
                queue.append(further)


def test_conda_has_the_same_direct_dependencies_and_bounds():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    assert environment["channels"][0] == "conda-forge"
    assert pip.pop() == "--editable ."
    conda = [Requirement(entry) for entry in environment["dependencies"] if isinstance(entry, str)]
    conda = {bounds(entry) for entry in conda} | {bounds(Requirement(entry)) for entry in pip}
    (backend,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    names_in_conda = {"torch": "pytorch"}
    expected = {(names_in_conda.get(name, name), bound) for name, bound in map(bounds, DIRECT)}
    expected |= {("python", PROJECT["requires-python"]), bounds(Requirement(backend)), ("pip", "")}
    assert conda == expected


def test_what_is_imported_is_a_direct_dependency():
    sources = {
        path: path.read_text()
        for folder in ("amp_utils", "tests", "imgs")
        for path in ROOT.glob(f"{folder}/*.py")
    }
    for path in ROOT.glob("notebooks/[!.]*.ipynb"):
        cells = nbformat.read(path, as_version=4).cells
        sources[path] = "\n".join(
            re.sub(r"^[%!].*", "", cell.source, flags=re.M)
            for cell in cells
            if cell.cell_type == "code"
        )
    direct = {canonicalize_name(requirement.name) for requirement in DIRECT}
    providers = importlib.metadata.packages_distributions()
    ours = {path.stem for path in sources} | {"amp_utils"}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for top in {name.split(".")[0] for name in names} - sys.stdlib_module_names - ours:
                owners = {canonicalize_name(owner) for owner in providers.get(top, [])}
                assert owners & direct, (
                    f"{path.name} imports {top}, which pyproject.toml does not name"
                )


# --- make


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(["make", *arguments], cwd=cwd, env=clean, capture_output=True, text=True)


def test_help_lists_every_target_in_a_line():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M)
    lines = make("help").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["make", target] for target in targets if target != "ready"
    ]
    assert all(len(line) <= 120 and len(line.split()) > 3 for line in lines)
    assert make().stdout.splitlines() == lines


def test_a_python_that_is_not_there_is_a_sentence():
    result = make("lint", "PYTHON=python3.99")
    assert result.returncode != 0
    assert result.stderr.splitlines()[0].startswith(
        "PYTHON = 'python3.99' was not found: give a Python 3.11 or newer"
    )


@pytest.mark.parametrize("port", ["many", "80", "70000", "-1", "8888 9999"])
def test_a_wrong_port_is_a_sentence(port):
    result = make("lab", "BROWSER=no", f"PORT={port}")
    assert result.returncode != 0 and result.stdout == ""
    assert (
        result.stderr.splitlines()[0]
        == f"PORT = {port!r} is not allowed: give a whole number from 1024 to 65535."
    )


def test_a_port_in_use_is_a_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = make("lab", "BROWSER=no", f"PORT={port}")
    assert result.returncode != 0 and result.stdout == ""
    assert (
        result.stderr.splitlines()[0]
        == f"PORT = {port} is taken by another program: give another one, or none."
    )


@pytest.mark.skipif(
    not bootstrap.is_ready(str(ROOT)), reason="there is no .venv that make lab would start at once"
)
def test_lab_answers_on_loopback_and_wants_its_token(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    environment["JUPYTER_RUNTIME_DIR"] = str(tmp_path)
    command = ["make", "lab", "BROWSER=no", f"PORT={address.rpartition(':')[2]}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    lab = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
    try:
        first = re.escape(f"{address}/lab/tree/notebooks/00_start_here.ipynb?token=")
        token = next(
            found[1] for line in lab.stdout if (found := re.search(first + "([0-9a-f]{32,})", line))
        )
        wait_for_answer(address)  # Jupyter prints its address a moment before it listens
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(f"{address}/api/contents/notebooks", timeout=30)
        with urllib.request.urlopen(
            f"{address}/api/contents/notebooks?token={token}", timeout=30
        ) as answer:
            assert "00_start_here.ipynb" in [
                entry["name"] for entry in json.load(answer)["content"]
            ]
    finally:
        os.killpg(lab.pid, signal.SIGTERM)
        lab.communicate(timeout=30)


def test_the_gate_runs_lint_and_test_and_two_threads():
    gate = ROOT / ".ci" / "run"
    assert os.access(gate, os.X_OK)
    assert re.findall(r"^make .*", gate.read_text(), re.M) == [
        "make lint",
        "make test",
        "make validate THREADS=2",
    ]


# --- what stops an installation is one sentence


def test_an_old_python_gets_as_far_as_the_sentence():
    ast.parse(Path(bootstrap.__file__).read_text(), feature_version=(3, 6))
    with pytest.raises(
        bootstrap.SetupError,
        match=r"^Python 3\.10 is too old: the course needs Python 3\.11 or newer",
    ):
        bootstrap.check_python((3, 10, 2))


@pytest.mark.parametrize("missing", ["venv", "ensurepip"])
def test_a_python_without_venv_is_a_sentence(missing):
    with pytest.raises(
        bootstrap.SetupError,
        match=f"^This Python has no {missing} module: install it .*python3-venv",
    ):
        bootstrap.check_python(find_spec=lambda name: None if name == missing else object())


def test_too_little_disk_space_is_a_sentence():
    usage = namedtuple("usage", "total used free")
    with pytest.raises(
        bootstrap.SetupError, match=r"^Too little disk space: .* about 3 GB .* has 1\.2 GB free\.$"
    ):
        bootstrap.check_disk("/course", lambda _: usage(9e9, 7.8e9, 1.2e9))
    bootstrap.check_disk("/course", lambda _: usage(9e9, 0, 9e9))


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        (
            "Collecting torch\nERROR: Could not install packages: [Errno 28] No space left on device: '/x'\n",
            "No disk space was left during the installation: free some in /c/.venv or /tmp",
        ),
        (
            "WARNING: Retrying (Retry(total=0)) after ...\nERROR: No matching distribution found for rich==1\n",
            "The package index does not answer (No matching distribution found for rich==1): check the network",
        ),
        (
            "Collecting a\nERROR: No matching distribution found for rich==1\nnotice: a new release\n",
            "The installation failed: No matching distribution found for rich==1 (see /c/.venv/install.log).",
        ),
        ("", "The installation failed: no message (see /c/.venv/install.log)."),
    ],
)
def test_why_pip_failed_is_a_sentence(output, sentence, monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    said = bootstrap.reason(output, "/c/.venv/install.log")
    assert said.startswith(sentence) and "\n" not in said


# --- a small project that is installed for real, without a network

BACKEND = '''
"""A build backend for the tests; it waits for as long as there is a file named `slow`."""
import os, time, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    while os.path.exists("slow"):
        time.sleep(0.1)
    with zipfile.ZipFile(os.path.join(folder, "small-1.0-py3-none-any.whl"), "w") as wheel:
        wheel.writestr("small-1.0.dist-info/METADATA", "Metadata-Version: 2.1\\nName: small\\nVersion: 1.0\\n")
        wheel.writestr("small-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("small-1.0.dist-info/RECORD", "")
    return "small-1.0-py3-none-any.whl"
'''


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose lock names one tiny package, `tiny`, out of a folder of wheels."""
    (tmp_path / "amp_utils").mkdir()
    (tmp_path / "amp_utils" / "bootstrap.py").write_text(Path(bootstrap.__file__).read_text())
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "small"\nversion = "1.0"\n'
    )
    for version in ("1.0", "1.1"):
        with zipfile.ZipFile(tmp_path / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
            about = f"tiny-{version}.dist-info"
            wheel.writestr("tiny.py", f"version = {version!r}\n")
            wheel.writestr(
                f"{about}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n"
            )
            wheel.writestr(
                f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{about}/RECORD", "")
    lock(tmp_path, "1.0")
    return tmp_path


def lock(project: Path, version: str) -> None:
    (project / "requirements.lock").write_text(
        f"--no-index\n--find-links {project}\ntiny=={version}\n"
    )


def start(project: Path) -> subprocess.Popen:
    command = [sys.executable, "-I", str(project / "amp_utils" / "bootstrap.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed_interrupts = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # also in a background job
    return subprocess.Popen(command, start_new_session=True, preexec_fn=heed_interrupts, **pipes)


def install(project: Path) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of one call."""
    process = start(project)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def tiny(project: Path) -> str:
    """What the environment's own Python finds of the tiny package."""
    command = [project / ".venv" / "bin" / "python", "-c", "import tiny; print(tiny.version)"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def test_the_second_call_does_nothing_and_a_changed_lock_is_followed(project):
    status, out, err = install(project)
    assert (status, err) == (0, "") and out.endswith("The environment is ready.\n")
    assert tiny(project) == "1.0"
    settings = json.loads((project / ".venv/share/jupyter/lab/settings/overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"] == {
        "fetchNews": "false",
        "checkForUpdates": False,
    }
    begin = time.perf_counter()
    assert install(project) == (0, "", "")
    assert time.perf_counter() - begin < 1

    (project / ".venv" / "mine").touch()
    lock(project, "1.1")
    assert install(project)[0] == 0
    assert tiny(project) == "1.1"
    assert (project / ".venv" / "mine").exists()  # brought up to date in place

    lock(project, "9.9")
    status, out, err = install(project)
    assert status == 1 and err.count("\n") == 1
    assert err.startswith("The installation failed: No matching distribution found for tiny==9.9")


def test_an_interrupted_installation_is_repaired_by_the_next_call(project):
    (project / "slow").touch()
    for number, status in [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)]:
        process = start(project)
        wait_for(project / ".venv" / "lib")
        time.sleep(1)
        os.killpg(process.pid, number)
        out, err = process.communicate(timeout=30)
        assert process.returncode == status
        assert not (project / ".venv" / bootstrap.STAMP).exists()
    assert err.strip() == "Interrupted: the next call repairs the installation."
    broken = project / ".venv" / "half-written"
    broken.touch()
    (project / "slow").unlink()
    assert install(project)[0] == 0
    assert tiny(project) == "1.0" and not broken.exists()  # built anew
    assert install(project) == (0, "", "")


def test_two_calls_at_once_build_one_environment(project):
    (project / "slow").touch()
    first = start(project)
    wait_for(project / ".venv" / "lib")
    second = start(project)
    assert second.stdout.readline() == "Another make is installing; waiting for it.\n"
    (project / "slow").unlink()
    assert first.wait(60) == second.wait(60) == 0
    assert second.stdout.read() == "" and tiny(project) == "1.0"
    first.communicate(), second.communicate()


def test_an_environment_made_by_somebody_else_is_never_cleared(project):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    mine = project / ".venv" / "mine"
    mine.touch()
    assert install(project)[0] == 0
    assert tiny(project) == "1.0" and mine.exists()
    (project / ".venv" / bootstrap.STAMP).rename(
        project / ".venv" / bootstrap.MARKER
    )  # as if it had been interrupted
    assert install(project)[0] == 0
    assert tiny(project) == "1.0" and mine.exists()


def test_a_folder_that_is_no_environment_is_left_alone(project):
    mine = project / ".venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    status, out, err = install(project)
    assert (status, out) == (1, "") and err.count("\n") == 1
    assert "is not this project's and has no working Python 3.11" in err
    assert [path.name for path in mine.parent.iterdir()] == ["mine"]


def test_a_moved_folder_is_installed_again(project):
    assert install(project)[0] == 0
    assert bootstrap.is_ready(str(project))
    moved = project.with_name("moved")
    project.rename(moved)
    assert not bootstrap.is_ready(str(moved))


def wait_for_answer(address: str) -> None:
    host, port = address.removeprefix("http://").split(":")
    deadline = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=30).close()
        except ConnectionRefusedError:
            assert time.monotonic() < deadline, f"{address} did not answer within half a minute"
            time.sleep(0.1)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear within a minute"
        time.sleep(0.05)
