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
    return load("04", device=torch.device("cpu"), low=LOW[request.param], a=a, b=b)


def doubles(*shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_the_products_have_the_right_formula(lesson):
    inputs = doubles((3, 2), (2, 4))
    for product in (lesson.Product.apply, lesson.AmpProduct.apply, lesson.lean_product):
        assert gradcheck(product, inputs)
    assert not gradcheck(lesson.Doubled.apply, inputs, raise_exception=False)


def test_a_product_that_cannot_train_passes_gradcheck_with_its_forward_in_a_region(lesson):
    assert lesson.checked(lesson.in_region) == "passes"
    floats = [tensor.detach().float().requires_grad_() for tensor in doubles((3, 3), (3, 3))]
    with pytest.raises(RuntimeError, match="same dtype"):
        lesson.in_region(*floats).float().sum().backward()


def test_only_what_is_decorated_for_the_tensors_device_or_cast_outside_survives_autocast(lesson):
    class ElsewhereProduct(lesson.Product):
        forward = staticmethod(torch.amp.custom_fwd(lesson.Product.forward, device_type="cuda"))
        backward = staticmethod(torch.amp.custom_bwd(lesson.Product.backward, device_type="cuda"))

    for product in (lesson.Product, ElsewhereProduct):
        with pytest.raises(RuntimeError, match="same dtype"):
            lesson.gradients(product.apply)
    exact = lesson.gradients(torch.matmul, enabled=False)
    for product in (lesson.AmpProduct.apply, lesson.lean_product):
        ours = lesson.gradients(product)
        assert 0 < lesson.distance(ours, exact) < 4 * torch.finfo(lesson.low).eps
        assert lesson.distance(ours, lesson.gradients(torch.matmul)) < 1e-3


def test_a_decorated_product_costs_memory_for_a_float32_activation_only(lesson):
    x = torch.randn(128, 16)
    for activation, sizes in ((x, [4608, 8192, 4608]), (x.to(lesson.low), [4608, 4096, 4608])):
        activation.requires_grad_()
        functions = torch.matmul, lesson.AmpProduct.apply, lesson.lean_product
        assert [lesson.kept(f, activation, lesson.b) for f in functions] == sizes


@pytest.mark.full
@each("name", ["AmpProduct", "lean_product"])
def test_a_product_compiles(lesson, name):
    function = getattr(lesson, name)
    function = getattr(function, "apply", function)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    assert lesson.distance(lesson.gradients(compiled), lesson.gradients(function)) < 1e-3


def gradient_of_gradient(function, x):
    with torch.autocast("cpu", dtype=torch.float16):
        value = function(x)
    (first,) = torch.autograd.grad(value.square(), x, create_graph=True)
    x.grad = None
    first.float().sum().backward()
    return x.grad


def test_a_cast_inside_forward_loses_part_of_a_second_derivative_and_one_outside_does_not(lesson):
    x = torch.tensor([1.0, 2.0], dtype=torch.float16, requires_grad=True)
    function = lesson.SumOfSquares.apply
    assert gradient_of_gradient(function, x).tolist() == [24, 48]
    assert gradient_of_gradient(lambda x: function(x.float()), x).tolist() == [44, 68]
    assert gradient_of_gradient(lambda x: x.float().square().sum(), x).tolist() == [44, 68]


def test_a_cast_outside_keeps_the_second_derivative(lesson):
    def second(function, enabled):
        with torch.autocast("cpu", dtype=lesson.low, enabled=enabled):
            output = function(lesson.a, lesson.b)
        mean = output.float().square().mean()
        (first,) = torch.autograd.grad(mean, lesson.a, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [lesson.b])

    assert lesson.distance(second(lesson.lean_product, True), second(torch.matmul, False)) < 0.05


def test_an_imported_product_needs_autocast_off_and_float(lesson):
    mixed = lesson.a.detach().to(lesson.low).requires_grad_(), lesson.b

    def only_float(x, y):
        return lesson.Product.apply(x.float(), y.float())

    for half_done in (only_float, torch.autocast("cpu", enabled=False)(lesson.Product.apply)):
        with pytest.raises(RuntimeError):
            lesson.gradients(half_done, mixed)
    wide = mixed[0].detach().float(), lesson.b.detach()
    ours = lesson.gradients(lesson.off_and_float, mixed)
    torch.testing.assert_close(ours[1], wide[0].T @ (2 * wide[0] @ wide[1]))


def test_the_sum_of_squares_is_float32_inside_a_region_only(lesson):
    vector = torch.linspace(100, 300, 16).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        total = lesson.SumOfSquares.apply(vector)
    total.backward()
    torch.testing.assert_close(total, vector.detach().float().square().sum())
    assert vector.grad.equal(2 * vector.detach())
    assert lesson.SumOfSquares.apply(vector).isinf()


@each("shape", [(7, 3), (4, 7, 3)])
@each("dtype", LOW.values())
def test_the_linear_function_is_torchs_as_lean_and_follows_the_region(lesson, dtype, shape):
    inputs = doubles(shape, (2, 3), (2,))
    torch.testing.assert_close(lesson.linear(*inputs), F.linear(*inputs))
    assert gradcheck(lesson.linear, inputs)
    floats = [t.detach().float().requires_grad_() for t in inputs]
    assert lesson.kept(lesson.linear, *floats) == lesson.kept(F.linear, *floats)
    with torch.autocast("cpu", dtype=dtype):
        assert lesson.linear(*floats).dtype == dtype


@each("size", [1.0, 100.0, 10_000.0])
def test_log_sum_exp_is_torchs_in_float32(lesson, size):
    operator = lesson.log_sum_exp
    operator.register_autograd(lesson.log_sum_exp_backward, setup_context=lesson.save_both)
    operator.register_autocast("cpu", torch.float32)
    random = torch.Generator().manual_seed(1)
    x = (size * torch.randn(6, 5, generator=random)).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        ours = operator(x)
    ours.sum().backward()
    wide = x.detach().float()
    torch.testing.assert_close(ours, wide.logsumexp(-1))
    torch.testing.assert_close(x.grad.float(), wide.softmax(-1), rtol=2e-3, atol=1e-6)
    torch.library.opcheck(operator, (wide.requires_grad_(),))
