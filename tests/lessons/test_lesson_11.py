"""Lesson 11: a resumed run is the same run, no kill breaks a checkpoint, bad files are refused."""

import contextlib
import os
import random
import subprocess
import sys
import zipfile

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


SPOIL = {
    "cut off": lambda lesson, path: path.write_bytes(path.read_bytes()[:-1000]),
    "one bit flipped": lambda lesson, path: lesson.flip_a_bit(path),
    "a Trojan": lambda lesson, path: torch.save({"model": lesson.Trojan()}, path),
}


@each(
    "how, sentence",
    [
        ("cut off", "run.pt is missing, damaged, or no checkpoint."),
        ("one bit flipped", "run.pt has a wrong checksum in "),
        ("a Trojan", "run.pt would run code: builtins.print."),
    ],
)
def test_each_bad_file_is_one_sentence_and_runs_nothing(lesson, how, sentence, tmp_path, capsys):
    path = tmp_path / "run.pt"
    lesson.save(lesson.snapshot(trained(lesson)), path)
    SPOIL[how](lesson, path)
    with pytest.raises(lesson.CheckpointError) as caught:
        lesson.load(path)
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)
    assert (caught.value.__cause__ is None) == (how == "one bit flipped"), "the reason is lost"
    assert "printed by the file" not in capsys.readouterr().out, "the file's code ran"


def test_a_damaged_bit_is_refused_by_one_exception_or_changes_nothing(lesson, tmp_path):
    path = tmp_path / "run.pt"
    lesson.save(good := lesson.snapshot(trained(lesson, steps=1)), path)
    content, bits = path.read_bytes(), random.Random(0)
    for content_of_pickle in (b"", b"\x80", b"\xff" * 99, *[None] * 300):
        damaged = bytearray(content)
        damaged[bits.randrange(len(content))] ^= 1 << bits.randrange(8)
        path.write_bytes(damaged)
        if content_of_pickle is not None:
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("archive/data.pkl", content_of_pickle)
                archive.writestr("archive/version", "3")
        with contextlib.suppress(lesson.CheckpointError):
            assert lesson.same(lesson.load(path), good)


@each("share", [0.0, 0.1, 0.5, 0.9, 0.999])
def test_a_checkpoint_cut_anywhere_is_refused(lesson, share, tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(lesson.CheckpointError):
        lesson.load(path)
    lesson.save(lesson.snapshot(trained(lesson, steps=1)), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(lesson.CheckpointError):
        lesson.load(path)


def test_the_saved_scaler_and_torchs_load_each_other(lesson):
    ours, theirs = lesson.SavedScaler(2.0**9, 7), torch.amp.GradScaler("cpu")
    for bad in (False, True, False, False):
        ours.update(bad)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict()
    assert theirs.get_scale() == 2.0**8 and ours.state_dict()["_growth_tracker"] == 2


def test_autocast_casts_each_weight_at_each_call_and_a_converted_net_none(lesson):
    net, request = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with lesson.CastCounter() as counter, torch.inference_mode():
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                net(request)
    assert counter.numbers == 2 * (16 + 4)
    with lesson.CastCounter() as counter, torch.no_grad():
        net.bfloat16()(request.bfloat16())
    assert counter.numbers == 4 + 16


def test_convert_leaves_batch_norm_and_the_given_network_alone(lesson):
    layers = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    net = torch.nn.Sequential(*layers)
    net(torch.randn(64, 4))  # statistics that 16 bits cannot hold
    small = lesson.convert(net, torch.bfloat16)
    assert [layer.weight.dtype.itemsize for layer in small] == [2, 4, 2]
    assert lesson.same(net[1].state_dict(), small[1].state_dict())
    assert net.training and {weight.dtype for weight in net.parameters()} == {torch.float32}
    assert small(torch.randn(3, 4).bfloat16()).dtype == torch.bfloat16
