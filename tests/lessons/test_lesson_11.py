"""Lesson 11: a resumed run is the same run, no kill breaks a checkpoint, bad files are refused."""

import os
import subprocess
import sys

import pytest
import torch
from support.each import each
from support.processes import LIMIT

from amp_utils import models
from amp_utils.course import ROOT, notebook

DEVICE = torch.device("cpu")
GIVEN = {
    "device": DEVICE,
    "pixels": models.pixel_grid(16),
    "board": models.checkerboard(16),
    "steps": 6,
    "width": 8,
}


@pytest.fixture(scope="module")
def lesson():
    return notebook.load("11", **GIVEN)


def trained(lesson, precision="fp16", steps=4, seed=0):
    run = lesson.new_run(precision, seed, 8)
    lesson.train(run, until=steps)
    return run


@each("precision", ["fp32", "bf16", "fp16"])
@each("stop", [1, 5])
def test_a_resumed_run_is_equal_to_the_bit_through_a_file(lesson, precision, stop, tmp_path):
    reference = lesson.snapshot(trained(lesson, precision, steps=9))
    lesson.save(lesson.snapshot(trained(lesson, precision, steps=stop)), tmp_path / "run.pt")
    resumed = lesson.restore(lesson.new_run(precision, 99, 8), lesson.load(tmp_path / "run.pt"))
    lesson.train(resumed, until=9)
    for (name, a), (other, b) in zip(
        sorted(reference["model"].items()), sorted(resumed.net.state_dict().items()), strict=True
    ):
        assert name == other and torch.equal(a, b), name
    assert reference["scaler"] == resumed.scaler.state_dict()
    assert torch.equal(reference["rng"]["cpu"], torch.get_rng_state())
    assert lesson.same(reference, lesson.snapshot(resumed))


@each("part", ["optimizer", "scheduler", "scaler", "rng"])
def test_no_part_can_be_forgotten(lesson, part):
    reference = trained(lesson, steps=30)
    half = lesson.snapshot(trained(lesson, steps=20))
    resumed = lesson.restore(lesson.new_run("fp16", 99, 8), half, without=(part,))
    lesson.train(resumed, until=30)
    assert not lesson.same(reference.net.state_dict(), resumed.net.state_dict())


def test_same_tells_bits_dtypes_and_keys_apart(lesson):
    a = {"x": [torch.tensor([1.0, 2.0]), 3], "y": "z"}
    assert lesson.same(a, {"x": [torch.tensor([1.0, 2.0]), 3], "y": "z"})
    assert not lesson.same(a, {"x": [torch.tensor([1.0, 2.0 + 1e-6]), 3], "y": "z"})
    assert not lesson.same(a, {"x": [torch.tensor([1.0, 2.0], dtype=torch.float64), 3], "y": "z"})
    assert not lesson.same(a, {"x": [torch.tensor([1.0, 2.0])], "y": "z"})
    assert not lesson.same(a, {"x": a["x"]})


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
    for moment in (0, 0.1, 0.5, 0.999, "rename"):
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
    moments = [0, 0.1, 0.5, 0.999]
    naive = [f"naive_save {moment} False" for moment in moments]
    atomic = [f"save {moment} True" for moment in [*moments, "rename"]]
    assert done.stdout.splitlines() == naive + atomic, done.stderr


@each(
    "how, sentence",
    [
        ("cut off", "run.pt is cut off or damaged."),
        ("one bit flipped", "run.pt is damaged: wrong checksum in "),
        ("a text", "run.pt is not a torch checkpoint."),
        ("a Trojan", "run.pt is refused, since loading it would run code: builtins.print."),
        (
            "bare weights",
            "run.pt is no checkpoint of a run: no step, model, optimizer, scheduler, scaler, rng.",
        ),
        ("missing", "run.pt is not there."),
    ],
)
def test_each_bad_file_is_one_sentence(lesson, how, sentence, tmp_path, capsys):
    path = tmp_path / "run.pt"
    vars(lesson)["whole"] = trained(lesson)
    lesson.save(lesson.snapshot(lesson.whole), path)
    lesson.spoil(path, how)
    with pytest.raises(lesson.CheckpointError) as caught:
        lesson.load(path)
    assert str(caught.value).startswith(sentence) and str(caught.value).count(".") <= 4
    assert "\n" not in str(caught.value)
    assert "printed by the file" not in capsys.readouterr().out, "the file's code ran"


@each("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_checkpoint_cut_anywhere_is_refused(lesson, share, tmp_path):
    path = tmp_path / "run.pt"
    lesson.save(lesson.snapshot(trained(lesson)), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(lesson.CheckpointError):
        lesson.load(path)


def test_another_network_is_refused_before_the_run_changes(lesson):
    small, large = trained(lesson), lesson.new_run("fp16", 1, 9)
    before = lesson.copy.deepcopy(lesson.snapshot(large))
    with pytest.raises(
        lesson.CheckpointError,
        match=r"0\.bias is \(8,\) torch.float32 there and \(9,\) torch.float32 here",
    ):
        lesson.check_fit(large, lesson.snapshot(small))
    assert lesson.same(before["model"], large.net.state_dict())


@each("another", ["dtype", "optimizer", "groups"])
def test_a_checkpoint_that_torch_would_take_is_refused_where_it_is_of_another_run(lesson, another):
    run = trained(lesson)
    checkpoint = lesson.snapshot(run)
    if another == "dtype":
        checkpoint["model"] = {name: value.half() for name, value in checkpoint["model"].items()}
    else:
        split = (
            [{"params": [p]} for p in run.net.parameters()]
            if another == "groups"
            else run.net.parameters()
        )
        run.optimizer = (torch.optim.Adam if another == "groups" else torch.optim.SGD)(
            split, lr=1e-2
        )
    what = "network: 0.bias is .* torch.float16 there" if another == "dtype" else "optimizer"
    with pytest.raises(lesson.CheckpointError, match=f"^the checkpoint is of another {what}"):
        lesson.check_fit(run, checkpoint)


def test_inference_gives_back_the_mode_and_float32(lesson):
    net = trained(lesson).net.train()
    output = lesson.infer(net, GIVEN["pixels"], torch.bfloat16)
    assert net.training and output.dtype == torch.float32 and not output.requires_grad
    with torch.no_grad():
        assert torch.allclose(output, net.eval()(GIVEN["pixels"]), atol=0.05)
