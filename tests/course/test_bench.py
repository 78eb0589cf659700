"""The benchmarks measure pairs in turn, keep their bars, and need no Jupyter."""

import json
import subprocess
import sys

import pytest
import torch

from amp_utils.course import bench


@pytest.mark.parametrize(
    ("ratio", "bar", "verdict"), [(1.2, None, ""), (1.05, 1.05, "kept"), (1.06, 1.05, "broken")]
)
def test_a_bar_is_kept_or_broken(ratio, bar, verdict):
    assert bench.Result("x", ratio, 0.0, bar).verdict == verdict


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--device", "tpu"], "device = 'tpu' is not allowed"),
        (["--repeats", "0"], "repeats = 0 is not allowed: give a whole number from 1 on."),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    assert bench.main() == 2
    assert capsys.readouterr().err.startswith(sentence)


def test_results_are_printed_and_written(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "--device", "cpu"])
    monkeypatch.setattr(
        bench, "measure", lambda device, repeats: [bench.Result("a / b", 1.5, 0.1, 1.2)]
    )
    assert bench.main() == 1, "a broken bar is told by the exit status"
    assert "1.500" in capsys.readouterr().out
    written = json.loads((tmp_path / "runs" / "bench-cpu.json").read_text())
    assert written["torch"] == torch.__version__ and written["results"][0]["ratio"] == 1.5
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["bench-cpu.json"]


def test_training_steps_really_train():
    for steps in (
        bench.checkerboard_step(torch.device("cpu"), torch.bfloat16, steps=1),
        lambda: bench.recipe_steps(torch.device("cpu"), torch.float32, 1)(
            torch.amp.GradScaler("cpu")
        ),
    ):
        steps()


def test_the_lessons_loop_is_measured_on_real_training():
    taught, bare = bench.lesson_loop(torch.device("cpu"), steps=2)
    before = taught.args[1][0].weight.detach().clone()
    assert len(taught()) == 2, "lesson 10's train returns a loss a step"
    assert not torch.equal(before, taught.args[1][0].weight)
    bare()


@pytest.mark.parametrize("missing", ["papermill", "joblib"])
def test_sweeps_are_left_out_where_they_cannot_run(missing, monkeypatch, capsys):
    monkeypatch.setattr(bench, "find_spec", lambda name: None if name == missing else object())
    assert bench.sweep_and_loop() is None
    assert (
        capsys.readouterr().out
        == "Sweeps are not measured: that needs papermill, joblib and two cores.\n"
    )


def test_the_benchmarks_import_neither_jupyter_nor_matplotlib():
    code = "import sys, amp_utils.course.bench; print([m for m in ('IPython', 'matplotlib', 'rich') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
