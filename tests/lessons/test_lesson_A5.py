"""The functions that lesson A5 defines. No test here needs a C++ compiler, or takes one's time."""

import sys

import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load


@pytest.fixture
def lesson(monkeypatch):
    """The lesson's functions, with what they use; the compiler forgets all before and after."""
    torch.compiler.reset()
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 32, generator=random), torch.randn(32, 32, generator=random) / 6
    given = {"graphs": [], "x": x, "weight": weight}
    given["reference"] = gradient_in_float64(x, weight)
    loaded = load("A5", device=torch.device("cpu"), **given)
    monkeypatch.setitem(sys.modules, loaded.__name__, loaded)  # Dynamo imports it by its name
    yield loaded
    torch.compiler.reset()


def gradient_in_float64(x, weight):
    w = weight.double().requires_grad_()
    (x.double() @ w).pow(2).mean().backward()
    return w.grad


@each("rows, columns, picks", [(1, 1, 1), (5, 9, 3), (40, 7, 20)])
def test_every_batch_gather_is_torch_gather(lesson, rows, columns, picks):
    tensor, indices = lesson.example(rows, columns, picks)
    expected = torch.gather(tensor, 1, indices)
    assert torch.equal(lesson.gather_loop(tensor, indices), expected)
    assert torch.equal(lesson.batch_gather_vec(tensor, indices), expected)


def test_a_loop_is_compiled_for_each_size_and_given_up_at_the_limit(lesson):
    calls = [lesson.example(n) for n in (2, 2, 3, 4, 5)]
    with torch._dynamo.config.patch(recompile_limit=3):
        assert lesson.graphs_after(lesson.gather_loop, calls) == [1, 1, 2, 3, 3]
    assert lesson.graphs_after(lesson.batch_gather_vec, calls) == [1, 1, 2, 2, 2]
    for rows, graphs in ((2, 1), (4, 2)):  # 4 rows of 4 picks: two sizes taken for one
        calls = [lesson.example(n) for n in (rows, 6)]
        varied = lesson.graphs_after(lesson.batch_gather_vec, calls, dynamic=True)
        assert varied[-1] == graphs


def test_the_gate_is_a_smooth_step_times_x(lesson):
    x = torch.tensor([-9.0, -3.0, 0.0, 3.0, 9.0])
    torch.testing.assert_close(lesson.gate(x), x * torch.tensor([0, 0, 0.5, 1, 1]))


@each("length", [0.0, 0.5, 1.0, 2.0])
def test_limit_without_a_branch_is_limit(lesson, length):
    vector = (torch.tensor([0.6, 0.8]) * length).requires_grad_()
    results = [function(vector) for function in (lesson.limit_whole, lesson.limit)]
    assert torch.equal(*results)
    if length != 1:  # the kink
        gradients = [torch.autograd.grad(result.sum(), vector)[0] for result in results]
        torch.testing.assert_close(*gradients)


def test_limit_breaks_a_graph_and_limit_without_a_branch_does_not(lesson):
    assert torch._dynamo.explain(lesson.limit)(torch.ones(2)).graph_break_count == 1
    torch.compile(lesson.limit_whole, backend="eager", fullgraph=True)(torch.ones(2))


def inside(lesson, function, dtype, loss_scale=1.0):
    """The function's gradient where the compiled code itself opens the region around it."""

    def region_inside(x, w):
        with torch.autocast("cpu", dtype=dtype):
            return function(x, w)

    torch.compiler.reset()
    w = lesson.weight.clone().requires_grad_()
    output = torch.compile(region_inside, backend="aot_eager")(lesson.x, w)
    (loss_scale * output.pow(2).mean()).backward()
    return w.grad / loss_scale


@each("dtype", [torch.bfloat16, torch.float16])
def test_an_island_keeps_its_precision_where_the_region_is_inside_until_a_break(lesson, dtype):
    island = lesson.island

    def interrupted(x, w):
        torch._dynamo.graph_break()
        return island(x, w)

    assert lesson.error(lesson.gradient(island, dtype)) < 1e-6
    compiled = torch.compile(island, backend="aot_eager")
    assert 1e-4 < lesson.error(lesson.gradient(compiled, dtype)) < 1e-1
    assert lesson.error(inside(lesson, island, dtype, loss_scale=1e-8)) < 1e-6
    assert 1e-4 < lesson.error(inside(lesson, interrupted, dtype)) < 1e-1


def test_the_compilers_setting_alone_makes_the_difference(lesson):
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        compiled = torch.compile(lesson.island, backend="aot_eager")
        assert lesson.error(lesson.gradient(compiled)) < 1e-6


def test_the_fp16_island_loses_a_small_gradient_and_scaling_saves_it(lesson):
    compiled = torch.compile(lesson.island, backend="aot_eager")
    assert lesson.error(lesson.gradient(lesson.island, torch.float16, 1e-6)) < 1e-6
    assert (lesson.gradient(compiled, torch.float16, 1e-6) == 0).all()
    scaled = lesson.gradient(compiled, torch.float16, 1e-6 * 2**16)
    assert 1e-5 < lesson.error(scaled) < 1e-3


@each("part, least, most", [("model", 0, 1e-6), ("network", 1e-4, 1e-1)])
def test_a_model_keeps_all_its_gradients_where_the_whole_model_is_compiled(
    lesson, part, least, most
):
    options, gradients = {"backend": "aot_eager", "fullgraph": True}, []
    for compiled in ("nothing", part):
        torch.manual_seed(0)
        model = lesson.Net()
        if compiled == "model":
            model.compile(**options)
        elif compiled == "network":
            model.network = torch.compile(model.network, **options)
        first_loss = lesson.train(model, steps=1)
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert lesson.train(model, steps=20) < first_loss / 2
    for plain, found in zip(*gradients, strict=True):
        assert least <= ((found - plain).norm() / plain.norm()).item() < most


def test_with_fullgraph_the_ninth_graph_of_a_loop_is_an_error(lesson):
    calls = [lesson.example(n) for n in range(2, 11)]
    assert lesson.graphs_after(lesson.gather_loop, calls[:-1], fullgraph=True) == [*range(1, 9)]
    with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
        lesson.graphs_after(lesson.gather_loop, calls, fullgraph=True)


@each("factor", [1, 9])  # without the division and with it
def test_the_mended_classifier_is_one_graph_with_the_gradients_of_eager_mode(lesson, factor):
    y, gradients = torch.arange(len(lesson.x)) % 10, []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = lesson.Mended()
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        loss = lesson.mended_loss(model, factor * lesson.x, y)
        loss.backward()
        assert loss.dtype == torch.float32
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, found in zip(*gradients, strict=True):
        assert torch.equal(plain, found) and plain.norm() > 0
