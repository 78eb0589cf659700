"""The functions that lesson A5 defines. No test here needs a C++ compiler, or takes one's time."""

import os
import subprocess
import sys

import pytest
import torch
from support.each import each
from support.processes import LIMIT
from torch import nn

from amp_utils.course import ROOT
from amp_utils.course.notebook import load

CPU = torch.device("cpu")
NO_COMPILER = """
import torch
from amp_utils.course.notebook import load
lesson = load("A5", device=torch.device("cpu"))
inputs = lesson.example(2)
chosen, sentence = lesson.choose_backend("auto", lesson.gather_loop, *inputs)
print(chosen)
print(sentence)
compiled = torch.compile(lesson.gather_loop, backend=chosen)
print(torch.equal(compiled(*inputs), lesson.gather_vectorised(*inputs)))
"""


@pytest.fixture(scope="module", autouse=True)
def cold_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture
def lesson():
    """The lesson's functions, with what they use; the compiler forgets all before and after."""
    torch.compiler.reset()
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=random), torch.randn(32, 32, generator=random) / 6
    yield load("A5", device=CPU, graphs=[], lowered=[], x=x, weight=weight)
    torch.compiler.reset()


@each("rows, columns, picks", [(1, 1, 1), (5, 9, 3), (40, 7, 20)])
def test_every_batch_gather_is_torch_gather(lesson, rows, columns, picks):
    tensor, indices = lesson.example(rows, columns, picks)
    expected = torch.gather(tensor, 1, indices)
    assert torch.equal(lesson.gather_loop(tensor, indices), expected)
    assert torch.equal(lesson.gather_vectorised(tensor, indices), expected)
    compiled = torch.compile(lesson.gather_loop, backend="aot_eager")
    assert torch.equal(compiled(tensor, indices), expected)


def test_a_loop_is_compiled_for_each_size_and_the_vectorised_function_twice(lesson):
    calls = [lesson.example(n) for n in (3, 3, 4, 5)]
    assert lesson.graphs_after(lesson.gather_loop, calls) == [1, 1, 2, 3]
    assert lesson.graphs_after(lesson.gather_vectorised, calls) == [1, 1, 2, 2]


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
    chosen, sentence, equal = done.stdout.splitlines()
    assert (chosen, equal) == ("aot_eager", "True")
    assert "install a C++ compiler" in sentence
    assert "Traceback" not in done.stderr


def test_a_compiler_that_is_not_there_is_one_sentence(lesson, monkeypatch, tmp_path):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, str(tmp_path / "g++")))
    chosen, sentence = lesson.choose_backend("auto", lesson.gather_vectorised, *lesson.example(3))
    assert chosen == "aot_eager"
    assert "InvalidCxxCompiler" in sentence and "install a C++ compiler" in sentence
    assert "\n" not in sentence and sentence.endswith(".") and str(tmp_path) not in sentence


def test_an_error_of_the_function_itself_is_not_blamed_on_the_compiler(lesson):
    with pytest.raises(RuntimeError, match="same reduction dim"):
        lesson.choose_backend("auto", lambda x: x @ x, torch.ones(2, 3))


def test_a_backend_that_is_asked_for_is_taken_without_a_trial(lesson):
    def never(*_):
        raise AssertionError("compiled")

    chosen, sentence = lesson.choose_backend("aot_eager", never, torch.ones(1))
    assert chosen == "aot_eager" and "no machine code" in sentence


def test_the_compiler_gives_up_after_eight_graphs(lesson):
    calls = [lesson.example(n) for n in range(2, 13)]
    assert lesson.graphs_after(lesson.gather_loop, calls) == [1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8]


def prints(x):
    y = 2 * x
    print("now")
    return y + 1


@each("breaks", [lambda x: x + x.sum().item(), prints])
def test_an_item_and_a_print_break_the_graph(lesson, breaks):
    assert torch._dynamo.explain(breaks)(torch.ones(3)).graph_break_count == 1


@each("length", [0.5, 1.0, 2.0])
def test_limit_without_a_branch_is_limit(lesson, length):
    vector = torch.tensor([0.6, 0.8]) * length
    assert torch.equal(lesson.limit_whole(vector), lesson.limit(vector))
    assert torch._dynamo.explain(lesson.limit)(vector).graph_break_count == 1
    torch.compile(lesson.limit_whole, backend="eager", fullgraph=True)(vector)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_compiled_function_gives_the_dtypes_of_eager(lesson, dtype):
    compiled = torch.compile(lesson.gate, backend="aot_eager")
    assert (
        lesson.call_in(dtype, compiled).dtype == lesson.call_in(dtype, lesson.gate).dtype == dtype
    )


def test_an_island_loses_its_precision_in_the_compiled_backward_pass_only_there(lesson):
    w = lesson.weight.double().requires_grad_()
    (lesson.x.double() @ w).pow(2).mean().backward()

    def error(gradient):
        return ((gradient - w.grad).norm() / w.grad.norm()).item()

    assert error(lesson.gradient(lesson.island, torch.bfloat16)) < 1e-6
    compiled = torch.compile(lesson.island, backend="aot_eager")
    assert 1e-4 < error(lesson.gradient(compiled, torch.bfloat16)) < 1e-1
    torch.compiler.reset()
    with lesson.functorch_config.patch(backward_pass_autocast="off"):
        assert (
            error(
                lesson.gradient(torch.compile(lesson.island, backend="aot_eager"), torch.bfloat16)
            )
            < 1e-6
        )
    torch.compiler.reset()
    inside = torch.compile(lesson.region_inside, backend="aot_eager")
    assert error(lesson.call_outside(inside)) < 1e-6


def test_the_fp16_island_loses_a_small_gradient_and_scaling_saves_it(lesson):
    compiled = torch.compile(lesson.island, backend="aot_eager")
    assert (lesson.gradient(lesson.island, torch.float16, 1e-8) != 0).all()
    assert (lesson.gradient(compiled, torch.float16, 1e-8) == 0).all()
    assert (lesson.gradient(compiled, torch.float16, 1e-8 * 2**24) != 0).all()


@each("width", [1, 4])
def test_windows_are_unfolds(lesson, width):
    tensor, start = torch.arange(60.0).reshape(6, 10), torch.tensor([0, 1, 2, 3, 6, 6])
    expected = tensor.unfold(1, width, 1)[torch.arange(6), start]
    assert torch.equal(lesson.window_vectorised(tensor, start, width), expected)


@each("largest", [1e-4, 9.9e-4, 1.1e-3, 5.0])
def test_boosted_is_the_branch(lesson, largest):
    x = torch.tensor([largest, -largest / 3])
    expected = x * 1000 + 1 if largest < 1e-3 else x + 1
    torch.testing.assert_close(lesson.boosted_whole(x), expected)


def test_same_gradient_tells_an_island_from_a_product(lesson):
    def island(x, w):
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(x, w)

    assert lesson.same_gradient(nn.functional.linear, torch.bfloat16)
    assert not lesson.same_gradient(island, torch.bfloat16)
