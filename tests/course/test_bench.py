"""The benchmarks tell kept from broken from unknown, measure what they name, need no Jupyter."""

import json
import math
import subprocess
import sys

import click
import pytest
import torch
from torch import nn

from amp_utils import timing
from amp_utils.course import CourseError, bench


@pytest.fixture
def call(tmp_path):
    """Run the command with a root of its own; its exit status."""
    return lambda *arguments: bench.command.main(
        list(arguments), obj=tmp_path, standalone_mode=False
    )


@pytest.fixture
def cpu():
    return bench.Bench(torch.device("cpu"), repeats=2)


STRADDLING = [1.0, 1.2] * 20


@pytest.mark.parametrize(
    ("values", "limits", "verdict"),
    [
        ([1.02] * 20, {"bar": 1.05}, "kept"),
        ([1.05] * 20, {"bar": 1.05}, "kept"),
        ([1.06] * 20, {"bar": 1.05}, "broken"),
        (STRADDLING, {"bar": 1.1}, "cannot tell"),
        ([1.0] * 19 + [9.0], {"bar": 1.05}, "kept"),
        ([1.0], {"bar": 1.05}, "cannot tell"),
        ([0.95] * 20, {"bar": 1.1, "floor": 0.9}, "kept"),
        ([0.8] * 20, {"bar": 1.1, "floor": 0.9}, "broken"),
        ([0.8, 1.0] * 20, {"bar": 1.1, "floor": 0.9}, "cannot tell"),
        (STRADDLING, {}, ""),
    ],
)
def test_a_verdict_is_that_of_the_whole_interval(values, limits, verdict):
    assert bench.Result("a / b", values, **limits).verdict == verdict


@pytest.mark.parametrize(("values", "status"), [([1.0], 0), ([1.0, 1.2], 0), ([1.2], 1)])
def test_only_a_broken_bar_fails(values, status, call, monkeypatch, tmp_path, capsys):
    result = bench.Result("a / b", values * 10, "CPU", bar=1.1)
    monkeypatch.setitem(bench.PAIRS, "loop", lambda _: [result])
    assert call("loop", "--device", "cpu") == status
    header, row, *_ = capsys.readouterr().out.splitlines()
    assert row.split()[-1] == result.verdict.split()[-1] and "CPU" in row
    assert row.index("CPU") == header.index("clock")
    written = json.loads((tmp_path / "runs" / "bench-cpu.json").read_text())
    assert written["torch"] == torch.__version__ and written["device"] and written["date"]
    (kept,) = written["results"]
    assert tuple(kept["interval"]) == result.interval and kept["clock"] == "CPU"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["bench-cpu.json"]


def test_the_clock_with_the_narrower_interval_counts(cpu):
    noisy, steady = (1.0, 2.0, 4.0), (1.0, 1.0, 1.0)
    for taken, clock in (
        (timing.Timing(noisy, steady), "CPU"),
        (timing.Timing(steady, noisy), "wall"),
    ):
        result = cpu.result("a / b", lambda a, b: a / b, [taken, timing.Timing(steady, steady)])
        assert result.clock == clock and list(result.values) == [1, 1, 1]
    assert cpu.result("a", float, [timing.Timing((2.0,), (1.0,))]).clock == "CPU", "one repeat"
    gpu = bench.Bench(torch.device("cuda"), 2)
    assert gpu.result("a", float, [timing.Timing(noisy, steady)]).clock == "wall"
    assert cpu.result("a", float, [timing.Timing(noisy, steady)], wall=True).clock == "wall"


def test_what_is_wrong_is_one_sentence(call, tmp_path):
    with pytest.raises(click.UsageError, match="'speed' is not one of 'recipe', 'large', .*poin"):
        call("recipe", "speed")
    with pytest.raises(ValueError, match="^device = 'tpu' is not allowed"):
        call("--device", "tpu")
    with pytest.raises(click.UsageError, match="1 is not in the range x>=2"):
        call("--repeats", "1")
    with pytest.raises(click.UsageError, match="0.0 is not in the range x>0"):
        call("--patience", "0")
    assert not list(tmp_path.iterdir())


def test_the_exponent_is_that_of_a_power_law():
    sizes = 10, 30, 70
    for power in (0.5, 1.0, 1.7):
        assert bench.exponent(sizes, *(3 * s**power for s in sizes)) == pytest.approx(power)


def test_growth_runs_every_size(cpu, monkeypatch):
    monkeypatch.setattr(
        bench,
        "compare",
        lambda runs, *_: {n: timing.Timing((run(),) * 2, (run(),) * 2) for n, run in runs.items()},
    )
    (result,) = cpu.growth("things", {size: lambda size=size: 5.0 * size**2 for size in (2, 4, 8)})
    assert result.values == [pytest.approx(2.0)] * 2 and result.bar == 1.1
    assert result.verdict == "broken"


@pytest.mark.parametrize(
    ("dtype", "counts"),
    [
        # addmm forward; a product for each weight and for each layer's input but the first.
        (torch.float32, [8, 0, 6]),
        # Down: 3 weights, 3 biases, the input, the output's gradient. Up: the output, 6 gradients.
        (torch.bfloat16, [8, 8 + 7, 6]),
    ],
)
def test_the_parts_are_the_kernels_of_a_real_step(dtype, counts, cpu):
    steps = cpu.perceptron(dtype, 8, 4)
    products, casts, pointwise, optimizer = (run.args[0] for run in steps.parts())
    assert [len(products), len(casts), len(optimizer)] == counts
    names = {call.func.overloadpacket.__name__ for call in pointwise}
    assert {"relu", "threshold_backward", "mse_loss", "mse_loss_backward", "sum"} <= names
    (out, x, weight) = products[0].args
    assert x.dtype == dtype and torch.equal(products[0](), torch.addmm(out, x, weight))
    for call in optimizer:
        assert call.args[0].dtype == torch.float32, "weights and their update stay in float32"


def test_the_parts_predict_the_gain():
    fp32, low = (12.0, 6.0, 0.0, 4.0, 2.0), (6.0, 1.0, 1.0, 2.0, 2.0)
    assert bench.gain_by_parts(*fp32, *low) == pytest.approx((12 / 6) / (12 / 6))
    unexplained = (12.0, *low[1:])  # as long as in float32, though its parts take half of it
    assert bench.gain_by_parts(*fp32, *unexplained) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("gain", "end"), [(1.02, "+2.0%, within 10%."), (0.85, "-15.0%, not within 10%.")]
)
def test_the_table_says_whether_the_parts_explain_the_step(gain, end):
    text = bench.table("recipe", (12.0, 6.0, 0.0, 4.0, 2.0, 6.0, 1.0, 1.0, 2.0, 2.0), gain)
    lines = {line[:20].strip(): line[20:].split() for line in text.splitlines()}
    assert lines["products"] == ["6000.00", "1000.00", "6.000"]
    assert lines["casts"] == ["0.00", "1000.00"]
    assert lines["sum of the parts"] == ["12000.00", "6000.00", "2.000"]
    assert text.endswith(end)


def test_a_recipe_gives_its_gain_that_of_its_products_and_its_parts(cpu):
    step_gain, products, share, explained = cpu.recipe(8, 4)
    assert (explained.bar, explained.floor) == (1.1, 0.9) and step_gain.bar is None
    assert all(value > 0 for value in (*step_gain.values, *products.values))
    assert cpu.tables[0].startswith("\nrecipe 8/4")


def test_the_lessons_loop_is_measured_on_real_training(cpu):
    steps = cpu.perceptron(torch.float32, 8, 4)
    before = steps.net[0].weight.detach().clone()
    assert len(cpu.taught(steps, 3)()) == 3, "lesson 10's train returns a loss a step"
    assert not torch.equal(before, steps.net[0].weight)


def test_the_checkerboard_learns(cpu):
    steps = cpu.painter(torch.bfloat16, 8)
    assert steps.targets.shape == steps.net(steps.inputs).shape
    before = nn.functional.mse_loss(steps.net(steps.inputs), steps.targets).item()
    steps.train(60)
    assert nn.functional.mse_loss(steps.net(steps.inputs), steps.targets).item() < 0.7 * before


def test_lessons_import_no_matplotlib_and_the_benchmarks_no_jupyter_either():
    code = f"import sys, torch; {bench.INSTRUMENTS}; print(*sys.modules)"
    code += "; import amp_utils.course.bench; print(*sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=bench.ROOT)
    lesson, benchmarks = (set(line.split()) for line in output.splitlines())
    names = "formats ledger gradients scaler timing device lesson".split()
    assert {f"amp_utils.{name}" for name in names} <= lesson
    assert not {"matplotlib", "IPython"} & lesson
    assert not {"IPython", "nbformat", "matplotlib", "papermill", "joblib"} & benchmarks


@pytest.mark.parametrize("missing", ["papermill", "joblib"])
def test_sweeps_are_left_out_where_they_cannot_run(missing, call, monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == missing else object())
    assert call("sweep", "points", "--device", "cpu") == 0
    sentence = "Sweeps are not measured: that needs papermill, joblib and two cores."
    assert capsys.readouterr().out.startswith(sentence)


def test_a_command_that_fails_is_a_sentence():
    with pytest.raises(CourseError, match="failed: .*ZeroDivisionError"):
        bench.run_python("-c", "1 / 0")


def test_a_pair_that_fails_leaves_the_others_their_results(call, monkeypatch, tmp_path, capsys):
    good = [bench.Result("c / d", [0.5, 0.5])]
    monkeypatch.setitem(bench.PAIRS, "imports", lambda _: bench.run_python("-c", "1 / 0"))
    monkeypatch.setitem(bench.PAIRS, "pixels", lambda _: good)
    assert call("imports", "pixels", "--device", "cpu") == 1
    told = capsys.readouterr()
    assert "c / d" in told.out and told.err.endswith("ZeroDivisionError: division by zero\n")
    (kept,) = json.loads((tmp_path / "runs" / "bench-cpu.json").read_text())["results"]
    assert kept["name"] == "c / d"


def test_a_pair_runs_from_end_to_end(call, capsys):
    assert call("pixels", "--device", "cpu", "--repeats", "2") in (0, 1)
    assert "exponent of pixels (1024, 4096, 16384)" in capsys.readouterr().out


@pytest.mark.full
def test_the_sweep_and_the_loop_run_the_same_grid(monkeypatch, tmp_path):
    """With the lesson cut to its parameters."""
    bench.cut_lesson(tmp_path)
    kept = []
    monkeypatch.setattr(bench, "TemporaryDirectory", lambda: Kept(tmp_path, kept))
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    bench.sweep_of(tmp_path, bench.GRID)()
    bench.run_python("-c", bench.LOOP)
    for folder in kept:
        found = [path for path in folder.rglob("*.ipynb") if not path.name.startswith(".")]
        assert len(found) == math.prod(map(len, bench.GRID.values()))


class Kept:
    """A temporary directory that stays, to be looked into."""

    def __init__(self, root, kept):
        self.folder = root / str(len(kept))
        kept.append(self.folder)

    def __enter__(self):
        self.folder.mkdir()
        return str(self.folder)

    def __exit__(self, *_):
        return None
