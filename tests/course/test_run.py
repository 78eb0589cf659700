"""`python -m amp_utils.course run`: a finished run looks finished, nothing else does, and what went wrong is one sentence."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from support.processes import ended, wait_for_number

from amp_utils import lesson
from amp_utils.course import run

PARAMETERS = 'steps: int = 3  # steps to take\nprecision: str = "fp32"  # format to compute in'
REFUSE = """
from amp_utils.lesson import choice, validate
validate(globals(), precision=choice("fp32", "bf16"))
"""
WAIT = """
import os, pathlib, time
pathlib.Path("../kernel.pid").write_text(str(os.getpid()))
time.sleep(120)
"""
LESSONS = {
    "01_good": ["print(precision, steps)\nsteps"],
    "02_refusing": [REFUSE, "1 / 0"],
    "03_failing": ["print('before')", "1 / 0", "print('after')"],
    "04_dying": ["import os\nos._exit(1)"],
    "05_waiting": [WAIT],
    "A1_last": [
        "import os\nprint(os.path.basename(os.getcwd()), os.environ.get('CUDA_VISIBLE_DEVICES'))"
    ],
}


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A project folder with small lessons."""
    (tmp_path / "notebooks").mkdir()
    for name, sources in LESSONS.items():
        first = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        notebook = v4.new_notebook(
            cells=[v4.new_markdown_cell(f"# {name}"), first, *map(v4.new_code_cell, sources)]
        )
        notebook.metadata.kernelspec = {
            "name": "python3",
            "display_name": "Python 3",
            "language": "python",
        }
        notebook.metadata.language_info = {"name": "python"}
        nbformat.write(notebook, tmp_path / "notebooks" / f"{name}.ipynb")
    return tmp_path


def heed_interrupts() -> None:
    """A child of a background job would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(course: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "amp_utils.course", "run", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=course, preexec_fn=heed_interrupts, **pipes)


def call(course: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of a run."""
    process = start(course, *arguments)
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def left(course: Path) -> list[str]:
    """All files in runs/, hidden ones too."""
    runs = course / "runs"
    return sorted(os.listdir(runs)) if runs.exists() else []


def printed(path: Path) -> list[str]:
    cells = nbformat.read(path, as_version=4).cells
    return [
        out.text for cell in cells for out in cell.get("outputs", []) if out.output_type == "stream"
    ]


def test_parameters_reach_the_lesson_and_the_table_says_how_it_went(course):
    status, out, err = call(course, "1", "-p", "steps", "7", "-p", "precision", "bf16")
    assert (status, err, left(course)) == (0, "", ["01_good.ipynb"])
    assert printed(course / "runs" / "01_good.ipynb") == ["bf16 7\n"]
    heads, row = [line.split() for line in out.splitlines() if line.split() and "─" not in line]
    assert heads == ["lesson", "seconds", "outcome"]
    assert (row[0], row[2]) == ("01_good", "done") and 0 < float(row[1]) < 60


def test_what_fails_does_not_keep_the_rest_and_never_looks_finished(course):
    (course / "runs").mkdir()
    (course / "runs" / "03_failing.ipynb").write_text("an older result")
    status, out, err = call(course, "03", "04_dying", "A1")
    assert status == 1
    assert left(course) == ["03_failing.failed.ipynb", "04_dying.failed.ipynb", "A1_last.ipynb"]
    assert err.splitlines() == [
        "03_failing: ZeroDivisionError: division by zero (cell 3; see runs/03_failing.failed.ipynb)",
        "04_dying: the kernel died, which is most often a lack of memory.",
    ]
    for ending in ("03_failing: ZeroDivisionError", "04_dying: kernel died", "A1_last: done"):
        assert any(
            line.startswith(ending) for line in out.splitlines()
        )  # progress without a terminal
    assert [row.split()[2:] for row in out.splitlines()[-4:] if row.split()] == [
        ["ZeroDivisionError"],
        ["kernel", "died"],
        ["done"],
    ]
    assert printed(course / "runs" / "A1_last.ipynb")[0].startswith("notebooks ")


def test_a_refused_value_is_one_sentence(course):
    status, out, err = call(course, "02", "-p", "precision", "fp12")
    assert (status, out) == (1, "")
    assert err == "precision = 'fp12' is not allowed: give one of 'fp32', 'bf16'.\n"
    assert left(course) == ["02_refusing.failed.ipynb"]


def test_an_unknown_parameter_is_refused_before_any_work(course):
    status, out, err = call(course, "-p", "precison", "bf16")
    assert (status, out, left(course)) == (2, "", [])
    assert err == (
        "precison = 'bf16' is not allowed: 01_good has no such parameter,"
        " give one of steps, precision (did you mean precision?).\n"
    )


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ("9", "'9' is not a lesson: give one of 01_good, 02_refusing, "),
        ("0", "'0' is the beginning of several lessons: give one of 01_good, 02_refusing, "),
    ],
)
def test_an_unknown_lesson_is_refused_with_a_list(course, wanted, sentence):
    status, out, err = call(course, wanted)
    assert (status, out, left(course)) == (2, "", [])
    assert err.startswith(sentence) and err.count("\n") == 1


def test_lessons_are_chosen_by_number_or_beginning(course):
    def chosen(*wanted: str) -> list[str]:
        return [path.stem for path in run.choose(wanted, course / "notebooks")]

    assert chosen() == list(LESSONS)
    assert (
        chosen("1")
        == chosen("01")
        == chosen("01_g")
        == chosen("notebooks/01_good.ipynb")
        == ["01_good"]
    )
    assert chosen("a1", "03") == ["A1_last", "03_failing"]


def test_values_are_read_as_numbers_where_they_are_numbers():
    values = [
        run.parse_value(text)
        for text in ("-1", "1e-3", "-2.5e4", "true", "False", "many", "fp16", "")
    ]
    assert values == [-1, 1e-3, -2.5e4, True, False, "many", "fp16", ""]
    assert [type(value) for value in values[:5]] == [int, float, float, bool, bool]
    assert str(run.parse_value("nan")) == "nan" and run.parse_value("-inf") == float("-inf")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("save", [(), ("--save",)], ids=["run", "save"])
def test_an_interrupted_run_leaves_nothing_behind(course, save, number):
    before = {path.name: path.read_bytes() for path in (course / "notebooks").iterdir()}
    process = start(course, "05", *save)
    kernel = wait_for_number(course / "kernel.pid")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == "Interrupted: the lesson under way has left nothing behind.\n"
    assert left(course) == []
    assert {path.name: path.read_bytes() for path in (course / "notebooks").iterdir()} == before
    assert ended(kernel)


def test_a_killed_run_leaves_nothing_that_looks_finished(course):
    process = start(course, "05")
    kernel = wait_for_number(course / "kernel.pid")
    process.kill()
    process.communicate(timeout=30)
    assert left(course) == [".05_waiting.partial.ipynb"]
    os.kill(kernel, signal.SIGKILL)  # it would notice by itself when its cell ends


def test_save_puts_outputs_into_the_notebook_and_changes_nothing_else(course):
    path = course / "notebooks" / "A1_last.ipynb"
    before = nbformat.read(path, as_version=4)
    status, out, err = call(course, "--save", "A1")
    assert (status, err, left(course)) == (0, "", [])
    assert printed(path) == ["notebooks \n"]  # in its own folder, with every GPU hidden
    after = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in after.cells if cell.cell_type == "code"] == [1, 2]
    for cell in after.cells:
        if cell.cell_type == "code":
            cell.update(outputs=[], execution_count=None)
    assert after == before
    first = path.read_bytes()
    assert call(course, "--save", "A1")[0] == 0 and path.read_bytes() == first


def test_save_leaves_a_failing_lesson_as_it_was(course):
    path = course / "notebooks" / "03_failing.ipynb"
    before = path.read_bytes()
    status, out, err = call(course, "--save", "3")
    assert (status, out) == (1, "")
    assert (
        err
        == "03_failing: ZeroDivisionError: division by zero (cell 3; 03_failing.ipynb is as before)\n"
    )
    assert path.read_bytes() == before


def test_save_takes_no_parameters(course):
    status, out, err = call(course, "--save", "1", "-p", "steps", "2")
    assert (
        (status, out) == (2, "")
        and err.startswith("--save takes no parameters")
        and err.count("\n") == 1
    )


def test_recorded_results_survive_both_ways(course):
    path = course / "notebooks" / "01_good.ipynb"
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(v4.new_code_cell("from amp_utils import lesson\nlesson.record(loss=0.5)"))
    nbformat.write(notebook, path)
    assert call(course, "1")[0] == call(course, "1", "--save")[0] == 0
    for copy in (course / "runs" / "01_good.ipynb", path):
        assert lesson.recorded(json.loads(copy.read_text())) == {"loss": 0.5}
