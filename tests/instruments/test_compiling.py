"""amp_utils.compiling: nothing is left on the disk, and one sentence where nothing can be built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import LIMIT

from amp_utils import compiling
from amp_utils.course import ROOT

NO_COMPILER = """
import torch
from amp_utils import compiling
chosen, sentence = compiling.choose_backend("auto", torch.sin, torch.ones(3))
print(chosen)
print(sentence)
print((torch.compile(torch.sin, backend=chosen)(torch.ones(3)) - torch.ones(3).sin()).norm().item())
"""


@pytest.fixture(autouse=True)
def cold(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_a_private_cache_is_named_to_the_compiler_and_goes(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    folder = compiling.private_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == folder.name and Path(folder.name).is_dir()
    folder.cleanup()
    assert not Path(folder.name).exists()


@pytest.mark.full
def test_without_a_compiler_the_lesson_goes_on(tmp_path):
    """In a process of its own, whose PATH leads to no compiler."""
    environment = {name: value for name, value in os.environ.items() if name != "CXX"}
    environment |= {"PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", NO_COMPILER]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr
    chosen, sentence, off = done.stdout.splitlines()
    assert (chosen, float(off)) == ("aot_eager", 0)
    assert "install a C++ compiler" in sentence
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_a_compiler_that_is_not_there_is_one_sentence(monkeypatch, tmp_path):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, str(tmp_path / "g++")))
    chosen, sentence = compiling.choose_backend("auto", torch.sin, torch.ones(3))
    assert chosen == "aot_eager"
    assert "InvalidCxxCompiler" in sentence and "install a C++ compiler" in sentence
    assert "\n" not in sentence and sentence.endswith(".") and str(tmp_path) not in sentence


def test_an_error_of_the_function_itself_is_not_blamed_on_the_compiler():
    with pytest.raises(RuntimeError, match="same reduction dim"):
        compiling.choose_backend("auto", lambda x: x @ x, torch.ones(2, 3))


def test_a_backend_that_is_asked_for_is_taken_without_a_trial():
    def never(*_):
        raise AssertionError("compiled")

    chosen, sentence = compiling.choose_backend("aot_eager", never, torch.ones(1))
    assert chosen == "aot_eager" and "no machine code" in sentence
