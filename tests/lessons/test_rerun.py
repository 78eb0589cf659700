"""Every lesson runs again with other parameters, through papermill, and wrong ones end in one sentence."""

import subprocess
import sys
from pathlib import Path

import nbformat
import papermill
import pytest

from amp_utils import lesson
from amp_utils.course import run

ROOT = Path(__file__).parents[2]
LESSONS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
OTHER = {  # one parameter that is not the default, and smaller where that saves time
    "00_start_here": {"seed": 1},
    "01_float_formats": {"value": -3.5, "terms": 5000, "seed": 2},
    "02_numerical_stability": {"steps": 40, "seed": 1},
    "03_autocast_dtypes": {"precision": "fp16", "steps": 2},
    "04_custom_autograd_functions": {"precision": "fp16", "steps": 5, "seed": 1},
    "05_gradient_underflow": {"unit": 1.0, "seeds": 1, "steps": 20},
    "06_grad_scaler": {"steps": 12, "init_scale": 2.0, "growth_interval": 3, "overflow_step": 5},
    "07_unscaled_clipping": {"max_norm": 1.0, "steps": 5, "seed": 3},
    "08_accumulation_and_penalty": {"accumulate": 2, "epochs": 2, "seed": 1},
    "09_multiple_optimizers": {"steps": 8, "overflow_step": 3, "seed": 1},
    "10_amp_recipe": {"precision": "bf16", "batch": 32, "width": 64, "repeats": 1, "seed": 1},
    "11_checkpoint_and_inference": {"precision": "bf16", "steps": 3, "seed": 1},
    "12_checkerboard_cnn": {"precision": "bf16", "steps": 20},
    "A1_tensors_and_autograd": {"seeds": 1, "steps": 1500, "seed": 4},
    "A2_modules": {"noise": 0.8, "steps": 6000, "seed": 1},
    "A3_broadcasting": {"steps": 200, "batch": 2, "length": 16, "seed": 3},
    "A4_operators": {"rows": 60, "columns": 3, "repeats": 3, "seed": 1},
    "A5_compile": {"backend": "aot_eager", "rows": 3, "repeats": 3, "seed": 1},
    "13_data_parallel": {"ranks": 3, "steps": 8, "overflow_step": 2, "seed": 1},
    "A6_data_loading": {
        "precision": "fp16",
        "images": 16,
        "shards": 2,
        "workers": 3,
        "epochs": 1,
        "seed": 1,
    },
}


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_with_another_parameter(name, tmp_path):
    assert name in OTHER, f"name a parameter of {name} to run it again with"
    run.run_lesson(LESSONS[name], tmp_path, OTHER[name], step=lambda **_: None)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.ipynb"]
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    assert notebook.metadata.papermill.parameters == OTHER[name]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")


def test_a_parameter_reaches_the_results(tmp_path):
    parameters = {"precision": "bf16", "steps": 3, "size": 16, "width": 8}
    run.run_lesson(LESSONS["12_checkerboard_cnn"], tmp_path, parameters, step=lambda **_: None)
    results = lesson.recorded(nbformat.read(tmp_path / "12_checkerboard_cnn.ipynb", as_version=4))
    assert list(results["pixel_accuracy"]) == ["bf16"]
    assert 0 <= results["pixel_accuracy"]["bf16"] <= 1


@pytest.mark.parametrize(
    ("number", "name", "value", "sentence"),
    [
        (
            "12",
            "precision",
            "fp12",
            "precision = 'fp12' is not allowed: give one of 'all', 'fp32', 'bf16', 'fp16'.",
        ),
        ("12", "steps", "-1", "steps = -1 is not allowed: give a whole number from 0 to 100000."),
        (
            "05",
            "steps",
            "many",
            "steps = 'many' is not allowed: give a whole number from 1 to 10000.",
        ),
        (
            "07",
            "max_norm",
            "0",
            "max_norm = 0 is not allowed: give a finite number above 0 and at most 10.",
        ),
        (
            "06",
            "init_scale",
            "inf",
            "init_scale = inf is not allowed: give a finite number at least 1e-06 and at most 1.70141e+38.",
        ),
        ("00", "device", "tpu", "device = 'tpu' is not allowed: give one of 'auto', 'cpu'."),
        (
            "00",
            "device",
            "cuda",
            "device = 'cuda' is not on this machine: give one of 'auto', 'cpu'.",
        ),
        (
            "00",
            "seed",
            "1.5",
            "seed = 1.5 is not allowed: give a whole number from 0 to 2147483648.",
        ),
        (
            "12",
            "presicion",
            "fp16",
            "presicion = 'fp16' is not allowed: 12_checkerboard_cnn has no such parameter",
        ),
    ],
)
def test_a_wrong_parameter_is_one_sentence_at_the_console(number, name, value, sentence, tmp_path):
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    command = [sys.executable, "-m", "amp_utils.course", "run", number, "-p", name, value]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode != 0
    # ZeroMQ, on a crowded machine, may say this of itself while a kernel is being stopped.
    said = [line for line in done.stderr.splitlines() if "src/signaler.cpp" not in line]
    assert len(said) == 1 and said[0].startswith(sentence), done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert not (
        tmp_path / "runs" / f"{LESSONS[run.choose([number], ROOT / 'notebooks')[0].stem].name}"
    ).exists()


@pytest.mark.parametrize("name", LESSONS)
def test_papermill_lists_every_parameter_with_type_and_help(name):
    parameters = papermill.inspect_notebook(str(LESSONS[name]))
    assert parameters
    for parameter in parameters.values():
        assert parameter["inferred_type_name"] in ("str", "int", "float", "bool")
        assert len(parameter["help"]) > 10, (
            f"{parameter['name']} needs a comment that says what it is"
        )
