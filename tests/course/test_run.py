"""`run`: a finished run looks finished, nothing else does, and what went wrong is one sentence."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import nbformat
import nbval.kernel
import pytest
import support.kernels  # noqa: F401  as `make validate` does
from nbformat import v4
from support.processes import LIMIT, ended, wait_for_number

from amp_utils import lesson
from amp_utils.course import run
from amp_utils.course.__main__ import main

PARAMETERS = 'steps: int = 3  # steps to take\nprecision: str = "fp32"  # format to compute in'
REFUSE = """
from amp_utils.lesson import choice, validate
validate(globals(), precision=choice("fp32", "bf16"))
"""
GOOD = """
from amp_utils import lesson
import os
print(precision, steps, os.path.basename(os.getcwd()), os.environ.get("CUDA_VISIBLE_DEVICES"))
lesson.record(loss=0.5)
"""
WAIT = """
import os, pathlib, time
pathlib.Path("../kernel.pid").write_text(str(os.getpid()))
time.sleep(600)
"""
LESSONS = {
    "01_float_formats": GOOD,
    "02_numerical_stability": REFUSE,
    "03_autocast_dtypes": "print('before')\n1 / 0",
    "04_custom_autograd_functions": "import os\nos._exit(1)",
    "05_gradient_underflow": WAIT,
}
DIED = "04_custom_autograd_functions: the kernel died, most often for lack of memory. (see "


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A course of small lessons."""
    (tmp_path / "notebooks").mkdir()
    for name, source in LESSONS.items():
        first = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        cells = [v4.new_markdown_cell(f"# {name}"), first, v4.new_code_cell(source)]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
        path = tmp_path / "notebooks" / f"{name}.ipynb"
        nbformat.write(v4.new_notebook(cells=cells, metadata=metadata), path)
    return tmp_path


@pytest.fixture
def call(course, capsys, monkeypatch):
    """Run the command in this process; its exit status, standard output and standard error."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # restored in the end
        return main(["--root", str(course), "run", *arguments]), *capsys.readouterr()

    return call


def left(course: Path) -> list[str]:
    """All files in runs/, hidden ones too."""
    return sorted(os.listdir(course / "runs")) if (course / "runs").exists() else []


def printed(path: Path) -> list[str]:
    outputs = [out for cell in nbformat.read(path, 4).cells for out in cell.get("outputs", [])]
    return [out.text for out in outputs if out.output_type == "stream"]


def test_parameters_reach_the_lesson_and_a_line_says_how_it_went(course, call):
    status, out, err = call("1", "-p", "steps", "7", "-p", "precision", "bf16")
    assert (status, err, left(course)) == (0, "", ["01_float_formats.ipynb"])
    executed = course / "runs" / "01_float_formats.ipynb"
    assert printed(executed) == ["bf16 7 notebooks 0\n"]
    assert lesson.recorded(json.loads(executed.read_text())) == {"loss": 0.5}
    assert re.fullmatch(r"01_float_formats: done after \d+\.\d s\n", out)


@pytest.fixture
def no_ports(monkeypatch):
    def bind(*_):
        raise OSError("every port is taken")

    monkeypatch.setattr(socket.socket, "bind", bind)


def test_a_run_needs_no_port(course, call, no_ports):
    status, _, err = call("1")
    assert (status, err) == (0, "")


def test_a_validated_lesson_needs_no_port_and_its_kernel_leaves_no_file(no_ports):
    manager, client = nbval.kernel.start_new_kernel(LIMIT)
    files = Path(manager.connection_file)
    assert len([*files.parent.glob(f"{files.stem}*")]) == 6
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    assert not [*files.parent.glob(f"{files.stem}*")]


@pytest.mark.full
def test_a_failure_does_not_stop_the_rest_and_never_looks_finished(course, call, monkeypatch):
    monkeypatch.chdir(course / "notebooks")  # any folder will do
    (course / "runs").mkdir()
    (course / "runs" / "03_autocast_dtypes.ipynb").write_text("an older result")
    status, out, err = call("02", "03", "04", "01", "-p", "precision", "fp12")
    failed = [f"{name}.failed.ipynb" for name in list(LESSONS)[1:4]]
    assert (status, left(course)) == (1, ["01_float_formats.ipynb", *failed])
    assert "precision = 'fp12' is not allowed: give one of 'fp32', 'bf16'. (see " in err
    place = "(see ../runs/03_autocast_dtypes.failed.ipynb)"
    assert f"03_autocast_dtypes, cell 3: ZeroDivisionError: division by zero {place}\n" in err
    assert DIED in err and "Traceback" not in err
    assert out.startswith("01_float_formats: done after ") and out.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "1 -p precison bf16",
            "precison = 'bf16' is not allowed: 01_float_formats has no such parameter,"
            " give one of steps, precision.",
        ),
        ("1 --save -p steps 2", "--save takes no parameters: it keeps what the defaults give."),
    ],
)
def test_wrong_parameters_are_refused_before_any_work(course, call, arguments, sentence):
    assert call(*arguments.split()) == (2, "", f"{sentence}\n")
    assert left(course) == []


def test_an_unknown_kernel_is_a_sentence(course, call):
    path = course / "notebooks" / "01_float_formats.ipynb"
    path.write_text(path.read_text().replace('"python3"', '"cobol"'))
    status, _, err = call("1")
    assert (status, left(course), err.count("\n")) == (1, ["01_float_formats.failed.ipynb"], 1)
    assert err.startswith("01_float_formats: NoSuchKernel: ")


def test_values_are_read_as_numbers_where_they_are_numbers():
    texts = ["-1", "1e-3", "-2.5e4", "-inf", "true", "False", "many", "fp16", ""]
    values = [run.parse_value(text) for text in texts]
    assert values == [-1, 1e-3, -2.5e4, float("-inf"), True, False, "many", "fp16", ""]
    assert [type(value) for value in values[:6]] == [int, float, float, float, bool, bool]
    assert str(run.parse_value("nan")) == "nan"


def heed_interrupts() -> None:
    """A child of a background job would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(course: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "amp_utils.course", "--root", str(course), "run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, preexec_fn=heed_interrupts, **pipes)


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "number"),
    [
        ("05", signal.SIGINT),
        ("05", signal.SIGTERM),
        ("05 --save", signal.SIGINT),
        ("05 --save", signal.SIGTERM),
    ],
)
def test_an_interrupted_run_leaves_nothing_behind(course, arguments, number):
    before = {path.name: path.read_bytes() for path in (course / "notebooks").iterdir()}
    process = start(course, *arguments.split())
    kernel = wait_for_number(course / "kernel.pid")
    process.send_signal(number)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (130, "")
    assert "Interrupted: nothing half-done is left behind.\n" in err and "Traceback" not in err
    assert left(course) == []
    assert {path.name: path.read_bytes() for path in (course / "notebooks").iterdir()} == before
    assert ended(kernel)


@pytest.mark.full
def test_a_killed_run_leaves_nothing_that_looks_finished(course):
    process = start(course, "05")
    kernel = wait_for_number(course / "kernel.pid")
    process.kill()
    process.communicate(timeout=LIMIT)
    assert left(course) == [".05_gradient_underflow.partial.ipynb"]
    os.kill(kernel, signal.SIGKILL)  # it would notice by itself when its cell ends


def test_save_replaces_the_outputs_and_changes_nothing_else(course, call):
    path = course / "notebooks" / "01_float_formats.ipynb"
    before = nbformat.read(path, as_version=4)
    status, _, err = call("--save", "1")
    assert (status, err, left(course)) == (0, "", ["01_float_formats.ipynb"])
    assert printed(path) == ["fp32 3 notebooks \n"], "in its own folder, with every GPU hidden"
    after = nbformat.read(path, as_version=4)
    assert lesson.recorded(after) == {"loss": 0.5}
    assert [cell.execution_count for cell in after.cells[1:]] == [1, 2]
    for cell in after.cells[1:]:
        cell.update(outputs=[], execution_count=None)
    assert after == before
    first = path.read_bytes()
    assert call("--save", "1")[0] == 0 and path.read_bytes() == first


def test_save_leaves_a_failing_lesson_as_it_was(course, call):
    path = course / "notebooks" / "03_autocast_dtypes.ipynb"
    before = path.read_bytes()
    status, out, err = call("--save", "3")
    what = "03_autocast_dtypes, cell 2: ZeroDivisionError: division by zero"
    assert (status, out) == (1, "")
    assert f"{what} (see " in err
    assert path.read_bytes() == before and left(course) == ["03_autocast_dtypes.failed.ipynb"]
