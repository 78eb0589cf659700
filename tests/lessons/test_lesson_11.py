"""Lesson 11: a resumed run is the same run, no kill breaks a checkpoint, code is refused."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
from support.each import each
from support.processes import LIMIT

from amp_utils import models
from amp_utils.course import ROOT, notebook

GIVEN = {
    "device": torch.device("cpu"),
    "pixels": models.pixel_grid(16),
    "board": models.checkerboard(16),
    "steps": 6,
    "width": 8,
    "low": torch.bfloat16,
}


@pytest.fixture(scope="module")
def lesson():
    return notebook.load("11", **GIVEN)


def trained(lesson, precision="fp16", steps=4, seed=0):
    return lesson.train(lesson.new_run(precision, seed), until=steps)


@each("precision", ["fp32", "bf16", "fp16"])
@each("stop", [1, 5])
def test_a_resumed_run_is_equal_to_the_bit_through_a_file(lesson, precision, stop, tmp_path):
    reference = lesson.snapshot(trained(lesson, precision, steps=9))
    lesson.save(lesson.snapshot(trained(lesson, precision, steps=stop)), tmp_path / "run.pt")
    resumed = lesson.restore(lesson.new_run(precision, 99), lesson.load(tmp_path / "run.pt"))
    after = lesson.snapshot(lesson.train(resumed, until=9))
    for name, weight in reference["model"].items():
        assert torch.equal(weight, after["model"][name]), name
    assert reference["scaler"] == after["scaler"]
    assert torch.equal(reference["rng"]["cpu"], torch.get_rng_state())
    assert lesson.same(reference, after)


@each("part", ["optimizer", "scheduler", "scaler", "rng"])
def test_no_part_can_be_forgotten(lesson, part):
    reference = trained(lesson, steps=30)
    half = lesson.snapshot(trained(lesson, steps=20))
    resumed = lesson.restore(lesson.new_run("fp16", 99), half, without=part)
    lesson.train(resumed, until=30)
    assert not lesson.same(reference.net.state_dict(), resumed.net.state_dict())


def test_same_tells_bits_dtypes_and_keys_apart(lesson):
    a = {"x": [torch.tensor([1.0, 2.0]), 3], "y": "z"}
    assert lesson.same(a, {"x": [torch.tensor([1.0, 2.0]), 3], "y": "z"})
    assert not lesson.same(a, {"x": [torch.tensor([1.0, 2.0 + 1e-6]), 3], "y": "z"})
    assert not lesson.same(a, {"x": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3], "y": "z"})
    assert not lesson.same(a, {"x": [torch.tensor([1.0, 2.0])], "y": "z"})
    assert not lesson.same(a, {"x": a["x"]})
    assert not lesson.same(torch.tensor(0.0), torch.tensor(-0.0))
    assert lesson.same(torch.tensor(torch.nan), torch.tensor(torch.nan))


KILLED = """
import io, os, signal, sys
import torch
from amp_utils.course import notebook

lesson = notebook.load("11", device=torch.device("cpu"))
path = lesson.Path(sys.argv[1])
old, new = ({"step": step, "weights": torch.full((10_000,), step)} for step in (0.0, 1.0))

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def killed_after(share):
    def write(checkpoint, file):
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        file.write(buffer.getvalue()[: int(share * len(buffer.getvalue()))])
        file.flush()
        killed()
    return write

def is_whole():
    try:
        found = torch.load(path, weights_only=True)
    except Exception:
        return False
    return bool((found["weights"] == found["step"]).all())

for way in (lesson.naive_save, lesson.save):
    for moment in (0, 0.5, 0.999, "rename"):
        way(old, path)
        if os.fork() == 0:
            if moment == "rename":
                os.replace = killed
                way(new, path)
            else:
                way(new, path, killed_after(moment))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.wait()[1]) == -signal.SIGKILL:
            print(way.__name__, moment, is_whole())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this test forks its writers")
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run.pt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    moments = [0, 0.5, 0.999]
    naive = [f"naive_save {moment} False" for moment in moments]
    atomic = [f"save {moment} True" for moment in [*moments, "rename"]]
    assert done.stdout.splitlines() == naive + atomic, done.stderr


def test_a_file_that_would_run_code_is_refused_and_runs_nothing(lesson, tmp_path, capsys):
    torch.save({"model": lesson.Trojan()}, tmp_path / "run.pt")
    with pytest.raises(pickle.UnpicklingError):
        lesson.load(tmp_path / "run.pt")
    assert "printed by the file" not in capsys.readouterr().out, "the file's code ran"


def test_a_random_state_must_stay_on_the_cpu(lesson, tmp_path):
    torch.save(lesson.snapshot(trained(lesson)), tmp_path / "run.pt")
    moved = torch.load(tmp_path / "run.pt", map_location="meta", weights_only=True)
    with pytest.raises(TypeError):
        torch.set_rng_state(moved["rng"]["cpu"])


@each("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_checkpoint_cut_anywhere_is_refused(lesson, share, tmp_path):
    path = tmp_path / "run.pt"
    lesson.save(lesson.snapshot(trained(lesson, steps=1)), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises((RuntimeError, OSError, EOFError, pickle.UnpicklingError)):
        lesson.load(path)


def test_the_saved_scaler_and_torchs_load_each_other(lesson):
    ours, theirs = lesson.SavedScaler(2.0**9, 7), torch.amp.GradScaler("cpu")
    for bad in (False, True, False, False):
        ours.update(bad)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    assert theirs.get_scale() == 2.0**8 and ours.state_dict()["_growth_tracker"] == 2


def test_a_converted_network_takes_no_casts(lesson):
    net = lesson.new_run("fp16", 0).net
    assert lesson.casts_under(torch.inference_mode, net) == 18
    assert lesson.casts_under(torch.inference_mode, net.bfloat16()) == 0


def test_a_checkpoint_of_another_device_brings_the_cpus_random_state_alone(lesson):
    checkpoint = lesson.snapshot(trained(lesson))
    checkpoint["rng"]["mps"] = torch.zeros(16, dtype=torch.uint8)
    lesson.restore(lesson.new_run("fp16", 99), checkpoint)
    assert torch.equal(torch.get_rng_state(), checkpoint["rng"]["cpu"])


def test_a_disabled_scalers_state_is_refused_on_the_way_to_fp16_alone(lesson):
    checkpoint = lesson.snapshot(trained(lesson, "bf16"))
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        lesson.restore(lesson.new_run("fp16", 0), checkpoint)
    lesson.restore(lesson.new_run("fp16", 0), checkpoint, without="scaler")
    lesson.restore(lesson.new_run("fp32", 0), lesson.snapshot(trained(lesson, "fp16")))


@each("frozen, casts", [(False, 6), (True, 18)])
def test_without_a_graph_autocast_keeps_only_parameters_that_require_a_gradient(
    lesson, frozen, casts
):
    net = lesson.new_run("fp16", 0).net.requires_grad_(not frozen)
    assert lesson.casts_under(torch.no_grad, net) == casts
    assert lesson.casts_under(torch.inference_mode, net) == 18
