"""`gpu` runs lessons without Jupyter, keeps what was done whatever happens, and can be adopted."""

import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from nbformat import v4
from support.processes import ended, wait_for_number

from amp_utils.course import cells, gpu
from amp_utils.course.__main__ import main

ROOT = Path(__file__).parents[2]
PARAMETERS = 'device: str = "auto"  # where to run\nbatch: int = 0  # samples'
FIGURE = """
from amp_utils import plots
plots.curves({'a': [1, 2]}, title='t', xlabel='x', ylabel='y', alt='two points')
"""
MEMORY = """
import torch
if not 0 < batch <= 128:
    raise torch.OutOfMemoryError("CUDA out of memory.")
print(device, batch)
"""
WORKER = """
import multiprocessing, os, time
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
worker.start()
open("../worker.pid", "w").write(str(worker.pid))
time.sleep(600)
"""
LESSONS = {
    "01_float_formats": ["x = 2\nprint(device)\nx + 1", FIGURE],
    "02_numerical_stability": ["print('before')", "1 / 0", "print('never')"],
    "03_autocast_dtypes": ["print('done')", WORKER],
    "10_amp_recipe": [MEMORY],
}
CLAIMS = """
[claims.twice]
lesson = "01_float_formats"
cell = "claim:twice"
measure = "2 * x"
[claims.never]
lesson = "02_numerical_stability"
cell = "claim:never"
measure = "1"
"""


@pytest.fixture
def course(tmp_path):
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    (notebooks / "claims.toml").write_text(CLAIMS)
    for name, sources in LESSONS.items():
        first = v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        rest = [v4.new_code_cell(source) for source in sources]
        rest[0].metadata.tags = ["claim:twice"]
        rest[-1].metadata.tags = ["claim:never"] if len(rest) > 2 else []
        (notebooks / f"{name}.ipynb").write_text(v4.writes(v4.new_notebook(cells=[first, *rest])))
    return tmp_path


def call(course, *arguments):
    return main(["--root", str(course), "gpu", *arguments])


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print('a')\nprint('b')", [("stream", "a\nb\n")]),
        (
            "import sys\nprint('a')\nprint('b', file=sys.stderr)",
            [("stream", "a\n"), ("stream", "b\n")],
        ),
        ("1 + 1", [("display_data", "2")]),
        ("1 + 1;\nNone", []),
        ("def f():\n    return 1\nf", None),
        (
            "from amp_utils import lesson\nlesson.record(mse=0.5)",
            [("display_data", "recorded: mse")],
        ),
        ("1 / 0", [("error", "division by zero")]),
        ("1 +", [("error", "invalid syntax")]),
        ("raise SystemExit(3)", [("error", "3")]),
    ],
)
def test_a_cell_shows_what_it_would_show_in_jupyter(source, expected):
    shown = [
        (
            output["output_type"],
            output.get("text") or output.get("data", {}).get("text/plain") or output.get("evalue"),
        )
        for output in cells.execute(source, "<cell 1>", {})
    ]
    if expected is None:
        assert shown[0][1].startswith("<function f at")
    else:
        assert [(kind, text.split(" (")[0]) for kind, text in shown] == expected


def test_functions_of_cells_keep_their_source():
    namespace = {}
    cells.execute("def f():\n    return 7", "<cell 3>", namespace)
    assert inspect.getsource(namespace["f"]) == "def f():\n    return 7"


def test_without_a_gpu_one_sentence(course, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert call(course) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1) and err.startswith("device = 'cuda' is not on this")
    assert os.listdir(course) == ["notebooks"]


def test_the_plan_names_every_lesson_once_and_only_parameters_that_exist():
    from amp_utils.course import bench, notebook

    numbers = {name.split("_")[0] for names in notebook.PARTS.values() for name in names}
    lessons = [step for step in gpu.PLAN["order"] if " " not in step]
    pairs = [pair for step in gpu.PLAN["order"] if " " in step for pair in step.split()[1:]]
    assert sorted(lessons) == sorted(numbers) and set(pairs) <= set(bench.PAIRS)
    for number, parameters in gpu.PLAN["shrink"].items():
        (path,) = notebook.choose([number], ROOT / "notebooks")
        (first,) = (cell for cell in notebook.cells(path) if "parameters" in cell.tags)
        assert all(f"\n{name}: int = " in first.source for name in parameters)


@pytest.mark.full
def test_a_rehearsal_keeps_going_and_says_how_each_lesson_ended(course, capsys, monkeypatch):
    monkeypatch.setitem(gpu.PLAN["shrink"], "10", {"batch": 512})
    out = course / "out"
    assert call(course, "--device", "cpu", "--out", str(out), "--limit", "8", "01", "02", "10") == 1
    results = json.loads((out / "results.json").read_text())
    rows = {row["lesson"]: row for row in results["rows"]}
    assert rows["01_float_formats"]["error"] is None
    assert rows["01_float_formats"]["claims"] == {"twice": 4}
    assert rows["02_numerical_stability"]["error"] == "cell 3: ZeroDivisionError: division by zero"
    assert rows["02_numerical_stability"]["claims"] == {}
    assert rows["10_amp_recipe"]["error"] is None
    assert rows["10_amp_recipe"]["parameters"] == {"device": "cpu", "batch": 128}
    first = json.loads((out / "01_float_formats.ipynb").read_text())["cells"]
    assert first[1]["outputs"][0]["text"] == "cpu\n"
    assert first[1]["outputs"][1]["data"]["text/plain"] == "3"
    (figure,) = first[2]["outputs"]
    assert figure["data"]["image/png"] and figure["metadata"]["image/png"]["alt"] == "two points"
    table = (out / "table.md").read_text()
    assert "| 10_amp_recipe | passed |" in table and "batch=128" in table


def test_a_benchmark_that_dies_without_a_word_has_not_passed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_limited", lambda *_, **__: (-9, ""))
    assert gpu.try_bench(["ledger"], tmp_path, "cpu", 1)["error"] == "exit status -9: "
    monkeypatch.setattr(gpu, "run_limited", lambda *_, **__: (0, ""))
    assert gpu.try_bench(["ledger"], tmp_path, "cpu", 1)["error"] is None


@pytest.mark.full
def test_the_limit_ends_a_lesson_and_all_that_it_started(course, monkeypatch):
    class OnceStarted(subprocess.Popen):
        """A process whose time is up when its worker is at work."""

        def communicate(self, *arguments, timeout=None):
            if timeout is not None:
                wait_for_number(course / "worker.pid")
                timeout = 0
            return super().communicate(*arguments, timeout=timeout)

    monkeypatch.setattr(gpu.subprocess, "Popen", OnceStarted)
    path = course / "notebooks" / "03_autocast_dtypes.ipynb"
    row = gpu.try_lesson(path, course, "cpu", limit=40)
    assert row["error"].startswith("stopped after 40 s, ")
    assert ended(wait_for_number(course / "worker.pid"))


@pytest.mark.full
def test_four_packages_are_enough(course, tmp_path):
    """As on a bare GPU machine: what torch, matplotlib, click and rich do not need is not there."""
    refuse = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        jupyter = "IPython ipykernel nbformat nbclient nbconvert papermill joblib psutil jsonschema"
        if name.split(".")[0] in jupyter.split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
"""
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(refuse)
    command = [sys.executable, "-m", "amp_utils.course", "--root", str(course), "gpu"]
    paths = f"{tmp_path / 'bare'}:{ROOT}"
    ended = subprocess.run(
        [*command, "--device", "cpu", "01"],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "1/1 01_float_formats: passed" in ended.stdout


@pytest.mark.full
def test_a_run_is_adopted(tmp_path, capsys):
    for name in ("notebooks", "imgs", ".github"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    name = next(iter(json.loads((tmp_path / "notebooks" / "measured.json").read_text())))
    origin = {"machine": "a GPU", "torch": "2.13.0", "date": "2026-11-21"}
    bench = {"results": [{"name": "a / b", "values": [2, 3, 4], "interval": [2, 4]}]}
    rows = [{"lesson": "x", "claims": {name: 7}}, {"lesson": "bench", "bench": bench}]
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"about": origin, "rows": rows}))
    shutil.copy(ROOT / "notebooks" / "06_grad_scaler.ipynb", folder)
    assert call(tmp_path, "--adopt", str(folder)) == 0
    assert "1 values of a GPU are in the ledger." in capsys.readouterr().out
    measured = json.loads((tmp_path / "notebooks" / "measured.json").read_text())
    assert measured[name]["a GPU"] == {"value": 7, "torch": "2.13.0", "date": "2026-11-21"}
    readme = (tmp_path / "README.md").read_text()
    assert (
        "a GPU, torch 2.13.0, 2026-11-21:" in readme
        and "| a / b | 3.000 | 2.000 to 4.000 |" in readme
    )
    assert (folder / "pages" / "06_grad_scaler.html").exists()


def test_what_is_no_run_is_not_adopted(course, capsys, tmp_path):
    assert call(course, "--adopt", str(tmp_path)) == 2
    assert capsys.readouterr().err.endswith("holds no results.json of `gpu`.\n")
