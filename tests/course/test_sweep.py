"""`python -m amp_utils.course sweep`: checked before it starts, resumed after any end, and read back into one report."""

import contextlib
import csv
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import unquote

import joblib
import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat import v4
from support.processes import ended, wait_for, wait_for_number

from amp_utils.course import grid, report, sweep

PARAMETERS = """\
steps: int = 3  # steps to take
precision: str = "fp32"  # format to compute in
rate: float = 0.1  # learning rate
loud: bool = False  # whether to print"""
VALIDATE = """\
from amp_utils import lesson
lesson.validate(globals(), steps=lesson.whole(1, 99), precision=lesson.choice("fp32", "bf16", "a/b", "<b>"))"""
VALIDATE_AGAIN = "lesson.validate(globals(), rate=lesson.real(above=0))\nprint('accepted')"
WORK = """\
import os
with open("../journal", "a") as journal:
    print(steps, precision, os.environ["OMP_NUM_THREADS"], os.getppid(), os.path.basename(os.getcwd()), file=journal)
assert steps != 4, "four is too many"
if steps == 9:
    os.kill(os.getpid(), 9)"""
RECORD = """\
lesson.record(loss={precision: 1 / steps}, curve=[1.0, 1 / steps], verdict="good", steps=-1)
lesson.settle(twice=2 * steps)"""
WAIT = """\
import os, pathlib, time
pathlib.Path(f"../kernel.{steps}").write_text(str(os.getpid()))
time.sleep(120)"""


def write_lesson(path: Path, *sources: str) -> None:
    first = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
    cells = [v4.new_markdown_cell("# A lesson, $x^2$"), first, *map(v4.new_code_cell, sources)]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@pytest.fixture
def course(tmp_path: Path, monkeypatch) -> Path:
    """A project folder, which is the current one, with two lessons."""
    (tmp_path / "notebooks").mkdir()
    write_lesson(tmp_path / "notebooks" / "01_quick.ipynb", VALIDATE, VALIDATE_AGAIN, WORK, RECORD)
    write_lesson(tmp_path / "notebooks" / "02_waiting.ipynb", WAIT)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def call(course, capsys):
    """Run the command in this process; its exit status, standard output and standard error."""

    def run(arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            sweep.main.main(shlex.split(arguments), standalone_mode=False)
        return ended.value.code, *capsys.readouterr()

    return run


def pretend(path: Path, folder: Path, parameters: dict, step, save_each_cell: bool) -> None:
    """What run_lesson leaves, without a kernel; notes when it starts and when a finished run is repeated."""
    finished, under_way = folder / path.name, folder / f".{path.stem}.partial.ipynb"
    with open("journal", "a") as journal:
        print("repeated" if finished.exists() else "started", folder.name, file=journal)
    notebook = nbformat.read(path, as_version=4)
    results = {"loss": 1 / parameters["steps"], "steps": -1}
    notebook.cells[-1].outputs = [
        v4.new_output("display_data", {"text/plain": "recorded"}, metadata={"amp_utils": results})
    ]
    notebook.metadata.papermill = {"duration": 0.25}
    text = nbformat.writes(notebook)
    for part in range(4):
        under_way.write_text(text[: (part + 1) * math.ceil(len(text) / 4)])
        time.sleep(0.005)
        step()
    os.replace(under_way, finished)


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "results.csv").open() as file:
        return list(csv.DictReader(file))


def journal(course: Path) -> list[list[str]]:
    return [line.split() for line in (course / "journal").read_text().splitlines()]


# --- checked before the first run starts


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "9 --set steps=1",
            "'9' is not a lesson: give one of 01_quick, 02_waiting, or its number.",
        ),
        ("1", "There is nothing to sweep: give at least one --set NAME=VALUE,VALUE."),
        ("1 --set steps", "--set 'steps' has an empty name or value: give NAME=VALUE,VALUE."),
        (
            "1 --set steps=1,,2",
            "--set 'steps=1,,2' has an empty name or value: give NAME=VALUE,VALUE.",
        ),
        ("1 --set =1", "--set '=1' has an empty name or value: give NAME=VALUE,VALUE."),
        (
            "1 --set step=1",
            "step = 1 is not allowed: 01_quick has no such parameter, give one of steps, precision, ",
        ),
        ("1 --set steps=1,many", "steps = 'many' is not allowed: give whole numbers."),
        ("1 --set steps=1.5", "steps = 1.5 is not allowed: give whole numbers."),
        ("1 --set steps=true", "steps = True is not allowed: give whole numbers."),
        ("1 --set rate=fast", "rate = 'fast' is not allowed: give numbers."),
        ("1 --set loud=1", "loud = 1 is not allowed: give true or false."),
        ("1 --set steps=1,2,1", "steps = 1 is given twice: give each value once."),
        ("1 --set rate=1,1.0", "rate = 1.0 is given twice: give each value once."),
        (
            "1 --set steps=1 --set steps=2",
            "steps is given twice: give all its values in one --set.",
        ),
        ("1 --set steps=0 --jobs 1", "steps = 0 is not allowed: give a whole number from 1 to 99."),
        (
            "1 --set precision=16 --jobs 1",
            "precision = '16' is not allowed: give one of 'fp32', 'bf16', ",
        ),
        ("1 --set rate=0.1,-1 --jobs 1", "rate = -1 is not allowed: give a finite number above 0."),
        ("1 --set steps=1 --jobs 0", "jobs = 0 is not allowed: give a whole number of at least 1."),
        (
            f"1 --set steps={','.join(map(str, range(101)))}",
            "This grid has 101 runs: add --yes if you mean it.",
        ),
        ("1 --set steps=1 --jobs 2 --scheduler 127.0.0.1:1", "--jobs is not for a cluster: "),
        (
            "1 --set steps=1 --scheduler nonsense",
            "No Dask scheduler answers at 'nonsense': give HOST:PORT.",
        ),
        (
            "1 --set steps=1 --out notebooks --jobs 1",
            "{}/notebooks holds something that is not a sweep: ",
        ),
    ],
)
def test_what_cannot_be_swept_is_refused_in_a_sentence_before_any_work(
    course, call, arguments, sentence
):
    before = sorted(course.rglob("*"))
    status, out, err = call(arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(sentence.format(course)) and err.endswith(".\n")
    assert sorted(course.rglob("*")) == before


def test_every_value_that_the_lesson_refuses_is_named(call):
    status, _, err = call("1 --set steps=0,1,100 --set precision=fp32,fp12 --jobs 1")
    assert status == 2 and [line.split(" is ")[0] for line in err.splitlines()] == [
        "steps = 0",
        "precision = 'fp12'",
        "steps = 100",
    ]


def test_a_large_grid_runs_when_it_is_meant(course, call, monkeypatch):
    monkeypatch.setattr(sweep, "LARGE", 1)
    monkeypatch.setattr(sweep, "run_lesson", pretend)
    assert call("1 --set steps=1,2 --jobs 1")[0] == 2
    assert call("1 --set steps=1,2 --jobs 1 --yes")[0] == 0
    assert [row["loss"] for row in rows(course / "runs" / "sweep-01_quick")] == ["1.0", "0.5"]


@given(
    st.lists(
        st.text() | st.floats() | st.booleans() | st.integers(),
        min_size=2,
        unique_by=lambda v: json.dumps(v),
    )
)
def test_names_of_runs_are_safe_and_tell_all_runs_apart(values):
    names = [grid.folder_name({"name": value}) for value in values]
    assert len({name.lower() for name in names}) == len(names)
    for name in names:
        assert re.fullmatch(r"name=[\w=,.+-]*", name, re.ASCII) and len(name) < 120


# --- run for real


def test_a_sweep_is_read_back_and_the_same_command_repeats_nothing(course, call, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    command = "1 --set precision=fp32,a/b,<b> --set steps=2,4 --out out --jobs 2"
    status, out, err = call(command)
    assert status == 1
    assert sorted(re.sub("-[0-9a-f]{8}", "", line) for line in out.splitlines()[:-1]) == sorted(
        f"steps={steps},precision={name}: {outcome}"
        for steps, outcome in [(2, "done"), (4, "failed")]
        for name in ("fp32", "a_b", "_b_")
    )
    failed = "steps=4,precision=fp32"
    assert out.splitlines()[-1] == "3 of 6 runs are finished: see out/report.html"
    assert err.count("\n") == 3 and (
        f"{failed}: 01_quick: AssertionError: four is too many (cell 5; see {failed}/01_quick.failed.ipynb)\n"
        in err
    )

    done, broken = rows(course / "out")[0], rows(course / "out")[3]
    assert list(
        done
    ) == "run,steps,precision,outcome,took (s),curve,loss,recorded steps,verdict,claim:twice".split(
        ","
    )
    assert (
        list(done.values())[:4] == ["steps=2,precision=fp32", "2", "fp32", "done"]
        and float(done["took (s)"]) > 0
    )
    assert list(done.values())[5:] == ["[1.0, 0.5]", "0.5", "-1", "good", "4"]
    assert list(broken.values()) == [failed, "4", "fp32", "failed", "", "", "", "", "", ""]

    threads, folders = (
        {entry[2] for entry in journal(course)},
        {entry[4] for entry in journal(course)},
    )
    assert (threads, folders) == ({str(max(1, joblib.cpu_count() // 2))}, {"notebooks"})
    assert len({entry[3] for entry in journal(course)}) == 2, "two runs at a time"

    first = {path: path.read_bytes() for path in course.glob("out/*/01_quick.ipynb")}
    assert call(command)[0] == 1
    assert Counter(tuple(entry[:2]) for entry in journal(course)) == {
        (steps, name): times
        for steps, times in [("2", 1), ("4", 2)]
        for name in ("fp32", "a/b", "<b>")
    }
    assert {path: path.read_bytes() for path in course.glob("out/*/01_quick.ipynb")} == first


def test_a_dead_kernel_is_reported_and_does_not_stop_the_others(course, call):
    status, out, err = call("1 --set steps=9,2 --out out --jobs 1")
    assert (status, err) == (
        1,
        "steps=9: 01_quick: the kernel died, which is most often a lack of memory.\n",
    )
    assert [row["outcome"] for row in rows(course / "out")] == ["failed", "done"]
    assert [path.name for path in course.glob("out/*/*.ipynb")] == ["01_quick.ipynb"]


def test_an_interrupted_sweep_leaves_no_kernel(course):
    command = [
        sys.executable,
        "-m",
        "amp_utils.course",
        "sweep",
        "2",
        "--set",
        "steps=1,2,3",
        "--jobs",
        "2",
        "--out",
        "out",
    ]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = {
        "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    }  # also in a background job
    process = subprocess.Popen(command, **pipes, **heed)
    kernels = [wait_for_number(course / f"kernel.{steps}") for steps in (1, 2)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")
    assert err == "Interrupted: the same command finishes what is missing.\n"
    assert all(ended(kernel) for kernel in kernels)
    assert not list(course.glob("out/*/02*")) and not (course / "kernel.3").exists()


def test_a_dask_cluster_takes_the_runs(course, call):
    def dask(program: str, *arguments: str) -> subprocess.Popen:
        command = [
            sys.executable,
            "-m",
            f"distributed.cli.dask_{program}",
            *arguments,
            "--no-dashboard",
        ]
        return subprocess.Popen(
            command, cwd=course, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    about = course / "scheduler.json"
    processes = [
        dask("scheduler", "--host", "127.0.0.1", "--port", "0", "--scheduler-file", str(about))
    ]
    try:
        processes += [
            dask("worker", "--scheduler-file", str(about), "--nthreads", "1") for _ in range(2)
        ]
        address = wait_for_scheduler(about, workers=2)
        status, out, err = call(f"1 --set steps=1,2,3,4 --out out --scheduler {address}")
        assert (status, err.count("\n"), out.splitlines()[-1][:22]) == (
            1,
            1,
            "3 of 4 runs are finish",
        )
        assert [row["loss.fp32"] for row in rows(course / "out")] == [
            "1.0",
            "0.5",
            "0.3333333333333333",
            "",
        ]
        assert len({entry[3] for entry in journal(course)}) == 2, "two workers"
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


def test_a_cluster_of_workers_with_several_threads_is_refused(call, monkeypatch):
    class Cluster(contextlib.nullcontext):
        def nthreads(self) -> dict[str, int]:
            return {"one": 1, "other": 3}

    monkeypatch.setattr("distributed.Client", lambda *_, **__: Cluster())
    status, out, err = call("1 --set steps=1 --scheduler 127.0.0.1:1")
    assert (status, out) == (2, "")
    assert err.startswith(
        "The cluster has 2 workers with 4 threads: give each worker one, as dask worker "
    )


def wait_for_scheduler(about: Path, workers: int) -> str:
    """Address of the Dask scheduler, once it has its workers."""
    from distributed import Client

    wait_for(about.exists)
    with Client(scheduler_file=str(about), set_as_default=False, timeout=30) as client:
        wait_for(lambda: len(client.nthreads()) == workers)
        return client.scheduler.address


# --- the report


def test_the_report_links_every_notebook_and_needs_no_network(course, call):
    assert call("1 --set precision=<b> --set steps=2,4 --out out --jobs 1")[0] == 1
    text = (course / "out" / "report.html").read_text()
    pages = {unquote(address) for address in re.findall('href="([^"]*)"', text)}
    assert len(pages) == 5 and "results.csv" in pages
    assert all((course / "out" / address).is_file() for address in pages)
    assert sum(address.endswith("failed.html") for address in pages) == 1
    assert "<b>" not in text and "&lt;b&gt;" in text
    titles = re.findall('alt="([^"]*)"', text)
    assert titles == ["curve by entry", "loss by steps", "recorded steps by steps"]  # not of words
    for path in [course / "out" / "report.html", *course.glob("out/*/*.html")]:
        tags = re.findall(r"<(?!a\b)[a-z]+\b[^>]*>", path.read_text())
        loaded = [
            found for tag in tags for found in re.findall(r"""(?:src|href)=["']?([^"'> ]+)""", tag)
        ]
        assert all(address.startswith("data:") for address in loaded), f"{path} loads {loaded}"
        assert not re.search(r"@import|url\(['\"]?(?!data:|#)|import\(", path.read_text()), (
            f"{path} loads something"
        )


def test_what_is_drawn_of_a_metric():
    table = [
        {
            "precision": precision,
            "width": width,
            "loss": 1 / width,
            "by.a": width,
            "by.b": math.inf,
            "flag": True,
        }
        for precision in ("fp32", "bf16")
        for width in (64, 128)
    ]
    names = ["precision", "width"]
    assert report.lines(table, ["loss"], names) == (
        "width",
        {f"precision={name}": {64: 1 / 64, 128: 1 / 128} for name in ("fp32", "bf16")},
    )
    assert report.lines(table, ["by.a", "by.b"], names)[1]["a, precision=bf16"] == {
        64: 64,
        128: 128,
    }
    assert report.lines(table, ["by.b"], names)[1] == report.lines(table, ["flag"], names)[1] == {}
    assert report.lines(table[:1], ["loss"], names) == ("precision", {"": {"fp32": 1 / 64}})
    assert report.lines(table[::2], ["loss"], names) == (
        "precision",
        {"": {"fp32": 1 / 64, "bf16": 1 / 64}},
    )
    curves = [{"steps": steps, "scale": [8, 4]} for steps in (1, 2)]
    assert report.lines(curves, ["scale"], ["steps"]) == (
        "entry",
        {f"steps={n}": {1: 8, 2: 4} for n in (1, 2)},
    )
    for axis, found in [
        ("precision", {"": {"fp32": 1.0}}),
        ("width", {"bf16": {1: 1e-9, 9: 1.0}, "x": {1: 1.0}}),
    ]:
        assert report.plot("loss", axis, found).startswith('<img src="data:image/svg+xml;base64,')


# --- one folder, one sweep


def test_a_second_sweep_of_the_same_folder_is_refused(course, call, monkeypatch):
    monkeypatch.setattr(sweep, "run_lesson", pretend)
    (course / "out").mkdir()
    with sweep.locked(course / "out", 0):
        status, out, err = call("1 --set steps=1 --out out --jobs 1")
    assert (status, out) == (2, "")
    assert err == f"{course}/out is in use by another sweep: give another --out, or wait.\n"
    assert call("1 --set steps=1 --out out --jobs 1")[0] == 0


def test_another_lesson_version_or_grid_is_noticed(course, call, monkeypatch):
    monkeypatch.setattr(sweep, "run_lesson", pretend)

    def refused(arguments: str) -> str:
        status, out, err = call(f"{arguments} --out out --jobs 1")
        assert (status, out, err.count("\n")) == (2, "", 1)
        return re.search(r"holds the sweep of another (\w+): give another --out", err)[1]

    assert call("1 --set steps=1,2 --set precision=fp32 --out out --jobs 1")[0] == 0
    assert refused("1 --set steps=1,3 --set precision=fp32") == "grid"
    assert refused("2 --set steps=1,2 --set precision=fp32") == "lesson"
    assert (
        call("1 --set precision=fp32 --set steps=1,2 --out out --jobs 1")[0] == 0
    )  # the order does not matter
    path = course / "notebooks" / "01_quick.ipynb"
    saved = nbformat.read(path, as_version=4)
    saved.cells[-1].outputs = [v4.new_output("stream", text="executed and saved")]
    nbformat.write(saved, path)
    assert (
        call("1 --set steps=1,2 --set precision=fp32 --out out --jobs 1")[0] == 0
    )  # nor do outputs
    saved.cells[-1].source += "\n1 / 0"
    nbformat.write(saved, path)
    assert refused("1 --set steps=1,2 --set precision=fp32") == "version"
    assert len(journal(course)) == 2


def test_a_run_whose_sweep_is_gone_is_given_up(course, monkeypatch):
    lesson, out = course / "notebooks" / "01_quick.ipynb", course / "out"
    out.mkdir()
    monkeypatch.setattr(sweep, "run_lesson", pretend)
    with sweep.locked(out, 0):
        for _ in range(
            2
        ):  # the second finds it finished, as after a killed sweep's worker that was still at it
            assert sweep.execute(lesson, out / "a", {"steps": 1}, 1) == ("a", None)
    assert journal(course) == [["started", "a"]]
    with pytest.raises(sweep.Abandoned):
        sweep.execute(lesson, out / "b", {"steps": 1}, 1)
    assert (out / "a" / lesson.name).exists() and not (out / "b" / lesson.name).exists()


# --- killed at any point

DRIVER = """
import os, pathlib, random, shutil, signal, sys, time
import nbconvert, nbformat
from amp_utils import plots
from amp_utils.course import sweep
sys.path.insert(0, sys.argv[1])
import test_sweep
real, kills, longest = sys.argv[2] == "real", int(sys.argv[4]), 0.2
if not real:
    sweep.run_lesson = test_sweep.pretend
command = f"1 --set steps={sys.argv[3]} --out out --jobs {2 if real else 1}".split()

def start():
    child = os.fork()
    if child == 0:
        os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        try:
            sweep.main.main(command, standalone_mode=False)
        except SystemExit as ended:
            os._exit(ended.code)
        os._exit(99)
    return child

def entries():
    return len(pathlib.Path("journal").read_text()) if os.path.exists("journal") else 0

def finished():
    found = {}
    for path in sorted(pathlib.Path("out").glob("*/01_quick.ipynb")):
        found[path] = path.read_text()
        assert nbformat.reads(found[path], as_version=4).metadata.papermill.duration > 0, "half a notebook"
    return found

killed, before, stages = 0, {}, set()
while killed < kills:
    child = start()
    if real:  # any time after a kernel has come to the lesson's work
        test_sweep.wait_for(lambda count=entries(): entries() > count)
    time.sleep(random.uniform(0, longest))
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == signal.SIGKILL:
        killed += 1
    now = finished()
    assert all(now.get(path) == text for path, text in before.items()), "a finished run was lost or repeated"
    longest *= 1 if len(now) > len(before) else 1.2  # so that there is progress, however busy the machine is
    stages.add(len(now))
    before = now
    if os.path.exists("out/report.html"):
        shutil.rmtree("out")
        longest, before = 0.2, {}
status = os.waitstatus_to_exitcode(os.waitpid(start(), 0)[1])
now = finished()
assert all(now[path] == text for path, text in before.items()), "a finished run was lost or repeated"
print(killed, len(stages), status)
"""


@pytest.mark.parametrize(
    ("kind", "steps", "kills"), [("pretended", [*range(1, 21)], 40), ("real", [1, 2, 3], 3)]
)
def test_a_killed_sweep_loses_and_repeats_nothing(course, kind, steps, kills):
    listed = ",".join(map(str, steps))
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), kind, listed, str(kills)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr + (course / "log").read_text()
    killed, stages, status = map(int, result.stdout.split())
    assert (killed, status) == (kills, 0), (course / "log").read_text()
    assert stages > 1, "no kill came between two runs"
    table = rows(course / "out")
    assert [row["steps"] for row in table] == list(map(str, steps))
    losses = [row.get("loss.fp32") or row["loss"] for row in table]
    assert losses == [str(1 / step) for step in steps] and {row["outcome"] for row in table} == {
        "done"
    }
    assert not any(entry[0] == "repeated" for entry in journal(course))  # the pretended ones say so
    assert not list(course.rglob(".*.ipynb"))
