"""`sweep`: checked before it starts, resumed after any end, and read back into one report."""

import contextlib
import csv
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import joblib
import nbformat
import pytest
from filelock import FileLock
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nbformat import v4
from support.processes import LIMIT, ended, wait_for, wait_for_number

from amp_utils.course import report, run, sweep
from amp_utils.course.__main__ import main

QUICK, SLOW = "01_float_formats", "02_numerical_stability"
PARAMETERS = """\
steps: int = 3  # steps to take
precision: str = "fp32"  # format to compute in
rate: float = 0.1  # learning rate
loud: bool = False  # whether to print"""
VALIDATE = """\
from amp_utils.lesson import choice, real, record, validate, whole
validate(globals(), steps=whole(1, 99), precision=choice("fp32", "bf16", "a/b", "<b>"))"""
VALIDATE_AGAIN = (
    "validate(globals(), rate=real(above=0), loud=choice(True, False))\nprint('accepted')"
)
WORK = """\
import os
with open("../journal", "a") as journal:
    print(steps, os.environ["OMP_NUM_THREADS"], os.getppid(), os.getcwd(), file=journal)
assert steps != 4, "four is too many"
if steps == 9:
    os.kill(os.getpid(), 9)"""
RECORD = "record(loss={precision: 1 / steps}, curve=[1.0, 1 / steps], verdict='good', steps=-1)"
WAIT = """\
import os, pathlib, time
pathlib.Path(f"../kernel.{steps}").write_text(str(os.getpid()))
while not pathlib.Path("../go").exists():
    time.sleep(0.05)"""
WAITED = 'pathlib.Path(f"../second.{steps}").touch()'


def write_lesson(path: Path, *sources: str) -> None:
    first = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    cells = [v4.new_markdown_cell("# A lesson, $x^2$"), first, *map(v4.new_code_cell, sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def write_course(folder: Path) -> None:
    (folder / "notebooks").mkdir()
    sources = VALIDATE, VALIDATE_AGAIN, WORK, RECORD
    write_lesson(folder / "notebooks" / f"{QUICK}.ipynb", *sources)
    write_lesson(folder / "notebooks" / f"{SLOW}.ipynb", WAIT, WAITED)


@pytest.fixture
def course(tmp_path: Path, monkeypatch) -> Path:
    """A course of two lessons; its folder is the current one."""
    write_course(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return tmp_path


@pytest.fixture
def call(course, capsys):
    """Run the command in this process; its exit status, standard output and standard error."""

    def run(arguments: str) -> tuple[int, str, str]:
        return main(["--root", str(course), "sweep", *arguments.split()]), *capsys.readouterr()

    return run


def pretend(path: Path, folder: Path, parameters: dict, step) -> None:
    """What run_lesson leaves, without a kernel; keeps a journal of the runs that it starts."""
    with Path("journal").open("a") as journal:
        print(folder.name, file=journal)
    notebook = nbformat.read(path, as_version=4)
    results = {"loss": 1 / parameters["steps"], "steps": -1}
    shown = {"text/plain": "recorded"}
    outputs = [v4.new_output("display_data", shown, metadata={"amp_utils": results})]
    notebook.cells[-1].outputs = outputs
    notebook.metadata.papermill = {"duration": 0.25}
    under_way = folder / f".{path.stem}.partial.ipynb"
    under_way.write_text(nbformat.writes(notebook))
    step()
    os.replace(under_way, folder / path.name)


@pytest.fixture
def pretended(monkeypatch) -> None:
    monkeypatch.setattr(sweep, "run_lesson", pretend)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def journal(course: Path) -> list[list[str]]:
    return [line.split() for line in (course / "journal").read_text().splitlines()]


# --- checked before the first run starts

REFUSED = {
    "9 --set steps=1": f"'9' is not a lesson: give one of {QUICK}, {SLOW}, or its number.",
    "1": "Missing option '--set'.",
    "1 --set steps": "--set 'steps': give NAME=VALUE,VALUE, and each NAME once.",
    "1 --set steps=1,,2": "--set 'steps=1,,2': give NAME=VALUE,VALUE, and each NAME once.",
    "1 --set =1": "--set '=1': give NAME=VALUE,VALUE, and each NAME once.",
    "1 --set steps=1 --set steps=2": "--set 'steps=2': give NAME=VALUE,VALUE, and each NAME once.",
    "1 --set step=1": f"step = 1 is not allowed: {QUICK} has no such parameter, give one of steps,",
    "1 --set steps=1,many --jobs 1": "steps = 'many' is not allowed: give a whole number from 1 ",
    "1 --set steps=1.5 --jobs 1": "steps = 1.5 is not allowed: give a whole number from 1 to 99.",
    "1 --set loud=1 --jobs 1": "loud = 1 is not allowed: give one of True, False.",
    "1 --set steps=1,2,1": "--set steps has the same value twice: give each value once.",
    "1 --set rate=1,1.0": "--set rate has the same value twice: give each value once.",
    "1 --set steps=0 --jobs 1": "steps = 0 is not allowed: give a whole number from 1 to 99.",
    "1 --set precision=16 --jobs 1": "precision = '16' is not allowed: give one of 'fp32', ",
    "1 --set rate=-1 --jobs 1": "rate = -1 is not allowed: give a finite number above 0.",
    "1 --set steps=1 --jobs 0": "Invalid value for '--jobs': 0 is not in the range x>=1.",
    f"1 --set steps={','.join(map(str, range(101)))}": "This grid has 101 runs: add --yes ",
    "1 --set steps=1 --jobs 2 --scheduler x:1": "--jobs is not for a cluster: ",
    "1 --set steps=1 --out notebooks --jobs 1": "notebooks holds something else, or the sweep ",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_swept_is_refused_before_any_work(course, call, arguments):
    before = sorted(course.rglob("*"))
    status, out, err = call(arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(REFUSED[arguments]) and err.endswith(".\n")
    assert sorted(course.rglob("*")) == before


def test_every_value_that_the_lesson_refuses_is_named(call):
    status, _, err = call("1 --set steps=0,1,100 --set precision=fp32,fp12 --jobs 1")
    refused = ["steps = 0", "precision = 'fp12'", "steps = 100"]
    assert (status, [line.split(" is ")[0] for line in err.splitlines()]) == (2, refused)


TEXTS = st.text() | (st.floats() | st.booleans() | st.integers()).map(str)
POINTS = st.lists(st.tuples(TEXTS, TEXTS), min_size=2)
READERS = st.sampled_from([str, run.parse_value])  # a grid's values are all texts, or all are read


@settings(derandomize=True, deadline=None, max_examples=30)
@given(POINTS, READERS)
@example([("False", "0"), ("false", "0"), ("0", "0"), ("0.0", "0")], str)
@example([("true", "1"), ("1", "1"), ("1.0", "1"), ("inf", "1"), ("nan", "1")], run.parse_value)
@example([("x,b=y", "z"), ("x", "y,b=z"), ("X", "y"), ("x", "y")], str)  # also where A is a
@example([("1", "../a"), ("1", sweep.folder_name({"b": "../a"}).partition("=")[2])], str)
@example([("a" * 200, "1"), ("a" * 201, "1"), ('"', "1"), ("\\", "1"), ("", "1")], str)
def test_names_of_runs_are_safe_and_tell_all_runs_apart(texts, read):
    points = [{"a": read(a), "b": read(b)} for a, b in texts]
    names = {json.dumps(point): sweep.folder_name(point) for point in points}
    assert len({name.lower() for name in names.values()}) == len(names)
    for name in names.values():
        assert re.fullmatch(r"a=[\w=,.+~-]*", name, re.ASCII) and len(name) < 120


def test_values_of_different_types_have_different_names():
    values = [False, "false", "False", True, "true", 0, "0", 1, "1", 1.0, "1.0", "inf", math.inf]
    assert len({sweep.folder_name({"a": value}).lower() for value in values}) == len(values)


def test_plain_values_make_plain_names():
    parameters = {"steps": 2, "rate": 1e-3, "loud": True, "precision": "bf16"}
    assert sweep.folder_name(parameters) == "steps=2,rate=0.001,loud=true,precision=bf16"


# --- run and resumed


def test_a_sweep_is_read_back_and_the_same_command_repeats_nothing(course, call, pretended):
    command = "1 --set precision=fp32,bf16 --set steps=2,4 --out new/out --jobs 1"
    status, out, err = call(command)
    names = [f"steps={n},precision={p}" for n in (2, 4) for p in ("fp32", "bf16")]
    last = "4 of 4 runs are finished: see new/out/report.html"
    assert (status, err) == (0, "")
    assert out.splitlines() == [*(f"{name}: done" for name in names), last]
    head = ["run", "steps", "precision", "outcome", "took (s)", "loss", "recorded steps"]
    assert [*rows(course / "new" / "out")[1].items()] == [
        *zip(head, [names[1], "2", "bf16", "done", "0.2", "0.5", "-1"], strict=True)
    ]
    (course / "new" / "out" / names[2] / f"{QUICK}.ipynb").unlink()
    status, out, err = call("1 --set steps=2,4 --set precision=fp32,bf16 --out new/out --jobs 1")
    assert (status, out.splitlines(), err) == (0, [f"{names[2]}: done", last], "")
    assert journal(course) == [[name] for name in [*names, names[2]]]


def test_a_large_grid_runs_when_it_is_meant(course, call, monkeypatch, pretended):
    monkeypatch.setattr(sweep, "LARGE", 1)
    assert call("1 --set steps=1,2 --jobs 1")[0] == 2
    assert call("1 --set steps=1,2 --jobs 1 --yes")[0] == 0
    assert [row["loss"] for row in rows(course / "runs" / f"sweep-{QUICK}")] == ["1.0", "0.5"]


@pytest.mark.full
def test_real_runs_side_by_side_with_failures_among_them(course, call):
    command = "1 --set precision=fp32,a/b,<b> --set steps=2,4 --out out --jobs 2"
    status, out, err = call(command)
    failed = "steps=4,precision=fp32"
    assert (status, err.count("\n")) == (1, 3)
    assert f"{failed}: {QUICK}, cell 5: AssertionError: four is too many (see " in err
    assert out.splitlines()[-1] == "3 of 6 runs are finished: see out/report.html"
    done, broken = rows(course / "out")[0], rows(course / "out")[3]
    head = "run,steps,precision,outcome,took (s),curve,loss,recorded steps,verdict"
    assert list(done) == head.split(",") and float(done["took (s)"]) > 0
    assert list(done.values())[5:] == ["[1.0, 0.5]", "0.5", "-1", "good"]
    assert list(broken.values()) == [failed, "4", "fp32", "failed", "", "", "", "", ""]
    _, threads, workers, folders = map(set, zip(*journal(course), strict=True))
    assert threads == {str(max(1, joblib.cpu_count() // 2))}
    assert (len(workers), folders) == (2, {str(course / "notebooks")})
    first = {path: path.read_bytes() for path in course.glob(f"out/*/{QUICK}.ipynb")}
    assert call(command)[0] == 1
    assert [entry[0] for entry in journal(course)].count("4") == 6, "failed runs are repeated"
    assert {path: path.read_bytes() for path in course.glob(f"out/*/{QUICK}.ipynb")} == first


@pytest.mark.full
def test_a_dead_kernel_is_reported_and_does_not_stop_the_others(course, call):
    status, out, err = call("1 --set steps=9,2 --out out --jobs 1")
    assert status == 1
    assert f"steps=9: {QUICK}: the kernel died, most often for lack of memory. (see " in err
    assert [row["outcome"] for row in rows(course / "out")] == ["failed", "done"]
    left = [path.name for path in course.glob("out/*/*.ipynb")]
    assert sorted(left) == [f"{QUICK}.failed.ipynb", f"{QUICK}.ipynb"]


# --- the report


@pytest.mark.full
def test_the_report_links_every_notebook_and_needs_no_network(course, call):
    assert call("1 --set precision=<b> --set steps=2,4 --out out --jobs 1")[0] == 1
    text = (course / "out" / "report.html").read_text()
    links = {unquote(address) for address in re.findall('<a href="([^"]*)"', text)}
    assert len(links) == 5 and "results.csv" in links
    assert all((course / "out" / address).is_file() for address in links)
    assert sum(address.endswith("failed.html") for address in links) == 1
    assert "<b>" not in text and "&lt;b&gt;" in text
    titles = re.findall('alt="([^"]*)"', text)
    assert titles == ["curve by entry", "loss by steps", "recorded steps by steps"]  # not of words
    for path in [course / "out" / "report.html", *course.glob("out/*/*.html")]:
        text = path.read_text()
        for tag in re.findall(r"<(?!a\b)[a-z]+\b[^>]*>", text):
            loaded = re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", tag)
            assert all(address.startswith("data:") for address in loaded), f"{path} loads {loaded}"
        assert not re.search(r"@import|url\(['\"]?(?!data:|#)|import\(", text), path


def test_what_is_drawn_of_a_metric():
    names = ["precision", "width"]
    points = list(itertools.product(["fp32", "bf16"], [64, 128]))
    table = [dict(zip(names, point, strict=True)) for point in points]
    for row in table:
        width = row["width"]
        row |= {"loss": 1 / width, "by.a": width, "by.b": math.inf, "flag": True, "word": "yes"}
    by_width = {f"precision={name}": {64: 1 / 64, 128: 1 / 128} for name in ("fp32", "bf16")}
    assert report.lines(table, ["loss"], names) == {("loss", "width"): by_width}
    drawn = report.lines(table, ["by.a", "by.b"], names)
    by_width = {f"a, precision={name}": {64: 64, 128: 128} for name in ("fp32", "bf16")}
    assert drawn == {("by", "width"): by_width}
    for column in ("by.b", "flag", "word", "none"):
        assert report.lines(table, [column], names) == {}, column
    drawn = {("loss", "precision"): {"": {"fp32": 1 / 64}}}
    assert report.lines(table[:1], ["loss"], names) == drawn
    drawn["loss", "precision"][""]["bf16"] = 1 / 64
    assert report.lines(table[::2], ["loss"], names) == drawn
    curves = [{"steps": steps, "scale": [8, 4]} for steps in (1, 2)]
    entries = {f"steps={steps}": {1: 8, 2: 4} for steps in (1, 2)}
    assert report.lines(curves, ["scale"], ["steps"]) == {("scale", "entry"): entries}
    for found in [{"": {"fp32": 1.0}}, {"bf16": {1: 1e-9, 9: 1.0}, "x": {1: 1.0}}]:
        assert report.plot("loss", "width", found)


def test_lists_and_numbers_of_one_metric_are_drawn_apart(course, call, monkeypatch):
    """As in lesson 13, whose dtypes hold a list of sizes beside single numbers."""

    def recorded(_) -> dict:
        return {"dtypes": {"a": {"piece": [16, 2], "scale": 512.0}, "b": {"scale": 1}}}

    monkeypatch.setattr(sweep, "run_lesson", pretend)
    monkeypatch.setattr(report.lessons, "recorded", recorded)
    assert call("1 --set steps=1,2 --out out --jobs 1")[0] == 0
    titles = re.findall('alt="([^"]*)"', (course / "out" / "report.html").read_text())
    assert titles == ["dtypes by entry", "dtypes by steps"]
    row = {"steps": 1, "dtypes.a": [1.0, 2.0], "dtypes.b": 3}
    assert report.lines([row], ["dtypes.a", "dtypes.b"], ["steps"]) == {
        ("dtypes", "entry"): {"a, steps=1": {1: 1.0, 2: 2.0}},
        ("dtypes", "steps"): {"b": {1: 3}},
    }


# --- one folder, one sweep


def test_a_second_sweep_of_the_same_folder_is_refused(course, call, pretended):
    (course / "out").mkdir()
    holder = f"""
import sys
from filelock import FileLock
with FileLock({str(course / "out" / sweep.LOCK)!r}):
    print("held", flush=True)
    sys.stdin.read()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", holder], **pipes) as process:
        assert process.stdout.readline() == "held\n"
        sentence = "out is in use by another sweep: give another --out, or wait.\n"
        assert call("1 --set steps=1 --out out --jobs 1") == (2, "", sentence)
        process.kill()  # which gives up the lock
    assert call("1 --set steps=1 --out out --jobs 1")[0] == 0


def test_another_lesson_version_or_grid_is_noticed(course, call, pretended):
    command = "1 --set steps=1,2 --set precision=fp32 --out out --jobs 1"

    def is_refused(arguments: str) -> None:
        status, out, err = call(f"{arguments} --out out --jobs 1")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("out holds something else, or the sweep of another lesson, version ")

    assert call(command)[0] == 0
    is_refused("1 --set steps=1,3 --set precision=fp32")
    is_refused("2 --set steps=1,2 --set precision=fp32")
    path = course / "notebooks" / f"{QUICK}.ipynb"
    saved = nbformat.read(path, as_version=4)
    saved.cells[-1].outputs = [v4.new_output("stream", text="executed and saved")]
    nbformat.write(saved, path)
    assert call(command)[0] == 0, "outputs do not matter"
    saved.cells[-1].source += "\n1 / 0"
    nbformat.write(saved, path)
    is_refused("1 --set steps=1,2 --set precision=fp32")
    assert len(journal(course)) == 2
    (course / "out" / sweep.NOTE).write_text("{")
    is_refused("1 --set steps=1,2 --set precision=fp32")


def test_a_run_whose_sweep_is_gone_is_abandoned(course, pretended):
    lesson, out = course / "notebooks" / f"{QUICK}.ipynb", course / "out"
    out.mkdir()
    with FileLock(out / sweep.LOCK):
        for _ in range(2):  # the second finds it finished, as after a killed sweep's worker
            assert sweep.execute(lesson, out / "a", {"steps": 1}, 1) == ("a", None)
    assert journal(course) == [["a"]]
    with pytest.raises(sweep.Abandoned):
        sweep.execute(lesson, out / "b", {"steps": 1}, 1)
    assert journal(course) == [["a"]] and not (out / "b" / lesson.name).exists()


# --- interrupted and killed


def start(course: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "amp_utils.course", "--root", str(course), "sweep", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def heed_interrupts() -> None:  # also as a child of a background job
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    return subprocess.Popen([*command, *arguments], preexec_fn=heed_interrupts, **pipes)


@pytest.mark.full
def test_an_interrupted_sweep_leaves_no_kernel(course):
    process = start(course, "--set", "steps=1,2,3", "--jobs", "2", "--out", "out")
    kernels = [wait_for_number(course / f"kernel.{steps}") for steps in (1, 2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, out) == (130, "")
    assert "Interrupted: the same command finishes what is missing.\n" in err
    assert "Traceback" not in err and all(map(ended, kernels))
    assert not list(course.glob("out/*/02*")) and not (course / "kernel.3").exists()


@pytest.mark.full
def test_workers_of_a_killed_sweep_stop_and_the_same_command_finishes(course):
    arguments = "--set", "steps=1,2,3", "--jobs", "2", "--out", "out"
    process = start(course, *arguments)
    kernels = [wait_for_number(course / f"kernel.{steps}") for steps in (1, 2)]
    process.kill()
    process.wait(LIMIT)
    (course / "go").touch()  # which ends the cells under way; no worker starts another
    assert all(map(ended, kernels))
    process.stdout.close()
    assert not list(course.glob("second.*")) and not (course / "kernel.3").exists()
    assert not list(course.glob(f"out/*/{SLOW}.ipynb"))
    out, err = start(course, *arguments).communicate(timeout=LIMIT)
    assert out.splitlines()[-1] == "3 of 3 runs are finished: see out/report.html", err
    assert len(list(course.glob("second.*"))) == 3
    assert not list(course.rglob(".*.ipynb"))


KILLED_AT_A_WRITE = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import test_sweep
from amp_utils.course import report, sweep
from amp_utils.course.__main__ import main

sweep.run_lesson = test_sweep.pretend
write_bytes, replace = Path.write_bytes, os.replace
writes = left = 0
log = os.open(os.devnull, os.O_WRONLY)

def killed_before(change):
    def changed(*arguments, **options):
        global writes
        writes += 1
        if writes == left:
            if change is write_bytes:  # half of a file is there
                write_bytes(arguments[0], arguments[1][:len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return change(*arguments, **options)
    return changed

def swept(kill_at):
    global left
    child = os.fork()
    if child == 0:
        os.dup2(log, 1)
        left = kill_at
        Path.write_bytes, os.replace = killed_before(write_bytes), killed_before(replace)
        os._exit(main(f"--root . sweep 1 --set steps=1,2 --out out-{number} --jobs 1".split()))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def finished():
    return {path: path.read_text() for path in Path(f"out-{number}").glob("*/01*.ipynb")}

for number in range(1, 99):
    if swept(kill_at=number) == 0:
        break
    before = finished()
    assert swept(kill_at=-1) == 0
    after = finished()
    assert len(after) == 2 and before.items() <= after.items(), f"{number}: lost or repeated"
    rows = test_sweep.rows(Path(f"out-{number}"))
    assert [row["loss"] for row in rows] == ["1.0", "0.5"], f"{number}: {rows}"
    assert not list(Path(f"out-{number}").rglob(".*.ipynb")), f"{number}: a partial notebook"
print(number)
"""


@pytest.mark.full
def test_a_sweep_killed_at_any_write_loses_and_repeats_nothing(course):
    """With pretended runs; half of the file is written when the process dies."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", KILLED_AT_A_WRITE, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 10 < int(done.stdout) < 98, "every write has been a kill"


# --- on a cluster


@pytest.mark.full
def test_a_dask_cluster_takes_the_runs(course, call):
    from distributed import Client

    def dask(program: str, *arguments: str) -> subprocess.Popen:
        module = f"distributed.cli.dask_{program}"
        command = [sys.executable, "-m", module, *arguments, "--no-dashboard"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, cwd=course, **quiet)

    about = course / "scheduler.json"
    file = "--scheduler-file", str(about)
    processes = [dask("scheduler", "--host", "127.0.0.1", "--port", "0", *file)]
    try:
        processes += [dask("worker", *file, "--nthreads", "1") for _ in range(2)]
        wait_for(about.exists)
        with Client(scheduler_file=str(about), set_as_default=False, timeout=LIMIT) as client:
            wait_for(lambda: len(client.nthreads()) == 2)
            address = client.scheduler.address
        status, out, err = call(f"1 --set steps=1,2,3,4 --out out --scheduler {address}")
        last = "3 of 4 runs are finished: see out/report.html"
        assert (status, out.splitlines()[-1]) == (1, last), err
        losses = ["1.0", "0.5", "0.3333333333333333", ""]
        assert [row["loss.fp32"] for row in rows(course / "out")] == losses
        assert len({entry[2] for entry in journal(course)}) == 2, "two workers"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(LIMIT)


@pytest.mark.full
def test_a_cluster_that_cannot_be_used_is_a_sentence(call, monkeypatch):
    class Cluster(contextlib.nullcontext):
        def nthreads(self) -> dict[str, int]:
            return {"one": 1, "other": 3}

    sentence = "No Dask scheduler answers at 'nonsense'.\n"
    assert call("1 --set steps=1 --scheduler nonsense") == (2, "", sentence)
    monkeypatch.setattr("distributed.Client", lambda *_, **__: Cluster())
    status, out, err = call("1 --set steps=1 --scheduler 127.0.0.1:1")
    assert (status, out) == (2, "") and err.startswith("Give each worker one thread: dask worker ")
