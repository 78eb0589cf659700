"""The functions that lesson 4 defines: which survive autocast, what they keep, what they give."""

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from torch.autograd import gradcheck

from amp_utils.course.notebook import load

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module", params=LOW)
def lesson(request):
    torch.manual_seed(0)
    a, b = (torch.randn(16, 16, requires_grad=True) for _ in range(2))
    return load("04", device=torch.device("cpu"), low=LOW[request.param], a=a, b=b, other="cuda")


def doubles(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_the_products_have_the_right_formula(lesson):
    inputs = doubles((3, 2), (2, 4))
    for product in (lesson.Product, lesson.AmpProduct, lesson.LeanProduct):
        assert gradcheck(product.apply, inputs)
    assert not gradcheck(lesson.Doubled.apply, inputs, raise_exception=False)


def test_a_product_that_cannot_train_passes_gradcheck_with_its_forward_in_a_region(lesson):
    in_region = torch.autocast("cpu", dtype=lesson.low)(lesson.Product.apply)
    assert gradcheck(in_region, doubles((3, 3), (3, 3)))
    floats = [tensor.detach().float().requires_grad_() for tensor in doubles((3, 3), (3, 3))]
    with pytest.raises(RuntimeError, match="same dtype"):
        in_region(*floats).float().sum().backward()


def test_only_what_is_decorated_for_the_tensors_device_survives_autocast(lesson):
    for product in (lesson.Product, lesson.ElsewhereProduct):
        assert lesson.error_under_autocast(product.apply) == float("inf")
    for product in (lesson.AmpProduct, lesson.LeanProduct):
        assert 0 < lesson.error_under_autocast(product.apply) < 4 * torch.finfo(lesson.low).eps
        ours, torchs = lesson.gradients(product.apply), lesson.gradients(torch.matmul)
        assert lesson.distance(ours, torchs) < 1e-3


def test_a_decorated_product_costs_memory_for_a_float32_activation_only(lesson):
    x = torch.randn(128, 16)
    for activation, sizes in ((x, [4608, 8192, 4608]), (x.to(lesson.low), [4608, 4096, 4608])):
        activation.requires_grad_()
        functions = torch.matmul, lesson.AmpProduct.apply, lesson.LeanProduct.apply
        assert [lesson.kept(f, activation, lesson.b) for f in functions] == sizes


def test_a_decorated_setup_context_stands_in_for_a_forward_without_ctx(lesson):
    ours, torchs = lesson.gradients(lesson.ApartProduct.apply), lesson.gradients(torch.matmul)
    assert lesson.distance(ours, torchs) < 1e-3


def test_backward_inside_the_region_hides_what_the_lesson_shows(lesson):
    with torch.autocast("cpu", dtype=lesson.low):
        output = lesson.Product.apply(lesson.a, lesson.b)
        inside = torch.autograd.grad(output.float().square().sum(), (lesson.a, lesson.b))
    assert lesson.distance(inside, lesson.gradients(torch.matmul)) < 0.02


@pytest.mark.full
def test_a_decorated_function_compiles(lesson):
    compiled = torch.compile(lesson.AmpProduct.apply, backend="aot_eager", fullgraph=True)
    eager = lesson.gradients(lesson.AmpProduct.apply)
    assert lesson.distance(lesson.gradients(compiled), eager) < 1e-3


@each("function", ["LeanProduct", "Linear"])
def test_a_lean_function_refuses_a_second_derivative(lesson, function):
    shapes = [(4, 4)] * 2 + [(4,)] * (function == "Linear")
    inputs = [torch.ones(shape) for shape in shapes]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        lesson.second_derivative(getattr(lesson, function).apply, inputs)


def test_a_copy_made_in_forward_loses_part_of_a_second_derivative_without_an_error(lesson):
    inputs = lesson.a, lesson.b
    right = lesson.second_derivative(torch.matmul, inputs, enabled=False)
    kept, lost = (
        lesson.distance(lesson.second_derivative(product.apply, inputs), right)
        for product in (lesson.AmpProduct, lesson.UnmarkedProduct)
    )
    assert kept < 0.05 < 0.2 < lost


@each("dtype", LOW.values())
def test_the_linear_function_follows_the_region(lesson, dtype):
    with torch.autocast("cpu", dtype=dtype):
        output = lesson.Linear.apply(*[torch.ones(s) for s in ((4, 4), (4, 4), (4,))])
    assert output.dtype == dtype


def test_of_the_fallbacks_only_both_together_run(lesson):
    mixed = lesson.a.detach().to(lesson.low).requires_grad_(), lesson.b
    for half_done in (lesson.only_float, lesson.only_off):
        with pytest.raises(RuntimeError):
            lesson.gradients(half_done, mixed)
    wide = mixed[0].detach().float(), lesson.b.detach()
    ours = lesson.gradients(lesson.off_and_float, mixed)
    torch.testing.assert_close(ours[1], wide[0].T @ (2 * wide[0] @ wide[1]))


def test_length_is_torchs_norm_in_float32_inside_a_region_only(lesson):
    vector = torch.linspace(100, 300, 16).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        length = lesson.Length.apply(vector)
    length.backward()
    wide = vector.detach().float().requires_grad_()
    wide.norm().backward()
    torch.testing.assert_close(length, wide.norm())
    torch.testing.assert_close(vector.grad.float(), wide.grad, rtol=1e-3, atol=0)
    assert lesson.Length.apply(vector).isinf()


def test_the_linear_function_is_torchs_and_as_lean(lesson):
    inputs = doubles((7, 3), (2, 3), (2,))
    torch.testing.assert_close(lesson.Linear.apply(*inputs), F.linear(*inputs))
    assert gradcheck(lesson.Linear.apply, inputs)
    floats = [t.detach().float().requires_grad_() for t in inputs]
    assert lesson.kept(lesson.Linear.apply, *floats) == lesson.kept(F.linear, *floats)


@each("size", [1.0, 100.0, 10_000.0])
def test_log_sum_exp_is_torchs_in_float32(lesson, size):
    random = torch.Generator().manual_seed(1)
    x = (size * torch.randn(6, 5, generator=random)).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        ours = lesson.LogSumExp.apply(x)
    ours.sum().backward()
    wide = x.detach().float()
    torch.testing.assert_close(ours, wide.logsumexp(-1))
    torch.testing.assert_close(x.grad.float(), wide.softmax(-1), rtol=2e-3, atol=1e-6)
