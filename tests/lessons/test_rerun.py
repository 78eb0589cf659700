"""Every lesson runs again with other parameters, and a wrong one ends in one sentence."""

import json
import os
import subprocess
import sys

import pytest
from nbformat.v4 import new_code_cell, new_notebook, writes
from support.processes import LIMIT

from amp_utils import lesson
from amp_utils.course import ROOT
from amp_utils.course.notebook import lessons

LESSONS = {path.stem: path for path in lessons(ROOT / "notebooks")}
OTHER = {  # one parameter that is not the default, and smaller where that saves time
    "00_start_here": {"steps": 20, "seed": 1},
    "01_float_formats": {"value": -3.5, "terms": 20_000, "seed": 2},
    "02_numerical_stability": {"seed": 1},
    "03_autocast_dtypes": {"precision": "fp16", "steps": 2, "seed": 1},
    "04_custom_autograd_functions": {"precision": "fp16", "seed": 1},
    "05_gradient_underflow": {"unit": 1.0, "seeds": 1, "steps": 20},
    "06_grad_scaler": {"steps": 12, "init_scale": 2.0, "growth_interval": 3, "overflow_step": 5},
    "07_unscaled_clipping": {"max_norm": 0.5, "steps": 5, "seed": 3, "steep_step": 2},
    "08_accumulation_and_penalty": {"accumulate": 2, "penalty_weight": 0.5, "seed": 1},
    "09_multiple_optimizers": {"steps": 8, "seed": 1},
    "10_amp_recipe": {"precision": "bf16", "batch": 32, "width": 64, "layers": 6, "repeats": 1},
    "11_checkpoint_and_inference": {"precision": "bf16", "steps": 3, "seed": 1},
    "12_checkerboard_cnn": {"precision": "bf16", "steps": 20, "seeds": 2, "squares": 2},
    "14_debugging_clinic": {"steps": 24, "seed": 1},
    "A1_tensors_and_autograd": {"steps": 600, "seed": 4},
    "A2_modules": {"noise": 0.8, "steps": 600, "seed": 1},
    "A3_broadcasting": {"steps": 80, "seed": 3},
    "A4_operators": {"rows": 60, "columns": 3, "repeats": 3, "seed": 1},
    "A5_compile": {"backend": "aot_eager", "numbers": 2000, "repeats": 3, "seed": 1},
    "13_data_parallel": {"ranks": 3, "steps": 8, "overflow_step": 2, "seed": 1},
    "15_precision_ladder": {"steps": 40, "seeds": 1, "seed": 5},
    "16_small_language_model": {
        "precision": "bf16",
        "context": 4,
        "steps": 3,
        "race_steps": 2,
        "seeds": 2,
    },
    "A6_data_loading": {
        "precision": "fp16",
        "images": 16,
        "shards": 2,
        "workers": 3,
        "seed": 1,
    },
}


def rehearse(path, parameters, tmp_path):
    """What support/rehearse.py says of a lesson, and the executed notebook."""
    script, out = ROOT / "tests" / "support" / "rehearse.py", tmp_path / path.name
    told = str(path), str(out), json.dumps(parameters | {"device": "cpu"})
    environment = os.environ | {"MPLBACKEND": "agg", "CUDA_VISIBLE_DEVICES": ""}
    process = [sys.executable, script, *told]
    whole = 6 * LIMIT  # a lesson, on a crowded machine
    said = subprocess.check_output(process, text=True, env=environment, timeout=whole)
    return json.loads(said.splitlines()[-1]), json.loads(out.read_text("utf-8"))


@pytest.mark.full
@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_with_other_parameters_and_leaves_no_tensor_on_the_cpu(name, tmp_path):
    assert name in OTHER, f"name a parameter of {name} to run it again with"
    result, notebook = rehearse(LESSONS[name], OTHER[name], tmp_path)
    assert (result["error"], result["changed"], result["strays"]) == (None, [], [])
    assert result["asked"] == sum(
        "guess" in c["metadata"].get("tags", []) for c in notebook["cells"]
    )
    assert all(c["execution_count"] for c in notebook["cells"] if c["cell_type"] == "code")


STRAY = """
import torch
from torch import nn


class Stray(nn.Module):
    def forward(self, x):
        return x + torch.ones(3)


nn.Sequential(Stray())(torch.ones(2, 3))
nn.Linear(3, 2)(torch.ones(2, 3))
"""


@pytest.mark.full
def test_a_tensor_left_on_the_cpu_is_found(tmp_path):
    cells = [new_code_cell("x = 1", metadata={"tags": ["parameters"]}), new_code_cell(STRAY)]
    path = tmp_path / "01_float_formats.ipynb"
    path.write_text(writes(new_notebook(cells=cells)))
    (tmp_path / "out").mkdir()
    result, _ = rehearse(path, {}, tmp_path / "out")
    assert (result["tried"], result["unknown"]) == (2, [])
    (stray,) = result["strays"]
    assert stray.startswith("Sequential: ")


@pytest.mark.full
def test_a_parameter_reaches_the_results(tmp_path):
    parameters = {"precision": "bf16", "steps": 3, "size": 16, "width": 8, "seeds": 2}
    _, executed = rehearse(LESSONS["12_checkerboard_cnn"], parameters, tmp_path)
    results = lesson.recorded(executed)
    assert sorted(results["pixel_accuracy"]) == ["bf16", "fp32"]
    assert 0 <= results["pixel_accuracy"]["bf16"] <= 1


@pytest.mark.full
def test_a_wrong_parameter_is_one_sentence_at_the_console(tmp_path):
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    command = [sys.executable, "-m", "amp_utils.course", "--root", str(tmp_path), "run", "6"]
    done = subprocess.run(
        [*command, "-p", "init_scale", "inf"], capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode != 0 and "Traceback" not in done.stdout + done.stderr
    # On a crowded machine ZeroMQ may speak of itself while a kernel is being stopped.
    said = [line for line in done.stderr.splitlines() if "signaler.cpp" not in line]
    sentence = "init_scale = inf is not allowed: give a finite number at least 1e-06 and"
    assert len(said) == 1 and said[0].startswith(sentence), done.stderr
    assert not list(tmp_path.glob("runs/06_grad_scaler.ipynb"))
