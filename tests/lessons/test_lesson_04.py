"""The functions that lesson 4 defines: which of them survive autocast, and that those are right."""

import pytest
import torch
import torch.nn.functional as F
from support.each import each
from torch.autograd import gradcheck

from amp_utils.course.notebook import load

CPU = torch.device("cpu")
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module", params=LOW)
def lesson(request):
    return load("04", device=CPU, low=LOW[request.param], steps=30, seed=0)


@pytest.fixture
def matrices():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((8, 6), (6, 4))]


@pytest.fixture
def doubles(matrices):
    return tuple(matrix.detach().double().requires_grad_() for matrix in matrices)


def test_both_products_have_the_right_formula(lesson, doubles):
    assert gradcheck(lesson.Product.apply, doubles)
    assert gradcheck(lesson.AmpProduct.apply, doubles)
    assert not gradcheck(lesson.Doubled.apply, doubles, raise_exception=False)


def test_only_the_decorated_product_survives_autocast(lesson, matrices):
    assert not lesson.survives_autocast(lesson.Product.apply, *matrices)
    assert lesson.survives_autocast(lesson.AmpProduct.apply, *matrices)


@each("seed", range(5))
def test_decorated_gradients_are_those_of_torch_under_autocast(lesson, seed):
    torch.manual_seed(seed)
    inputs = [torch.randn(shape, requires_grad=True) for shape in ((5, 3), (3, 2))]
    ours, theirs = (
        lesson.gradients_of(f, *inputs) for f in (lesson.AmpProduct.apply, torch.matmul)
    )
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        assert (ours_one - theirs_one).norm() <= 4 * torch.finfo(lesson.low).eps * theirs_one.norm()
        assert ours_one.dtype == torch.float32


@each("devices", [("cpu", None), (None, "cpu"), ("cuda", "cuda"), (None, None)])
def test_half_decorated_products_fail(lesson, matrices, devices):
    with pytest.raises((RuntimeError, AttributeError)):
        lesson.gradients_of(lesson.decorated(*devices).apply, *matrices)


def test_a_product_decorated_twice_for_the_right_device_runs(lesson, matrices):
    assert lesson.survives_autocast(lesson.decorated("cpu", "cpu").apply, *matrices)


def test_of_the_fallbacks_only_both_together_run(lesson, matrices):
    lesson.imported = lesson.Product.apply
    narrow = matrices[0].detach().to(lesson.low).requires_grad_()
    for half_done in (lesson.only_float, lesson.only_off):
        with pytest.raises(RuntimeError):
            lesson.gradients_of(half_done, narrow, matrices[1])
    ours = lesson.gradients_of(lesson.off_and_float, narrow, matrices[1])
    output = narrow.detach().float() @ matrices[1].detach()
    torch.testing.assert_close(ours[1], narrow.detach().float().T @ (2 * output))


def test_length_is_torchs_norm_in_float32(lesson, capsys):
    vector = torch.linspace(100, 300, 16).half().requires_grad_()
    with torch.autocast("cpu", dtype=torch.float16):
        length = lesson.Length.apply(vector)
    length.backward()
    wide = vector.detach().float().requires_grad_()
    wide.norm().backward()
    torch.testing.assert_close(length, wide.norm())
    torch.testing.assert_close(vector.grad.float(), wide.grad, rtol=1e-3, atol=0)
    assert capsys.readouterr().out == "autocast on in forward: False   gradient torch.float32\n"


def test_length_is_not_cast_outside_a_region_nor_from_float64(lesson):
    with pytest.raises(TypeError, match="float16"):
        lesson.Length.apply(torch.ones(2).half())
    with pytest.raises(TypeError, match="float64"), torch.autocast("cpu", dtype=lesson.low):
        lesson.Length.apply(torch.ones(2).double())


def test_our_function_trains_like_torchs(lesson):
    points = torch.linspace(-2, 2, 32).reshape(-1, 1)
    lesson.x, lesson.y = torch.cat([points, torch.ones_like(points)], 1), torch.sin(2 * points)
    ours, dtypes = lesson.train(lesson.AmpProduct.apply)
    theirs, _ = lesson.train(torch.matmul)
    assert ours == pytest.approx(theirs, rel=0.1)
    assert len(ours) == 30 and ours[-1] < ours[0] and dtypes == {torch.float32}


def test_the_linear_function_is_torchs(lesson):
    inputs = [
        torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((7, 3), (2, 3), (2,))
    ]
    torch.testing.assert_close(lesson.Linear.apply(*inputs), F.linear(*inputs))
    assert gradcheck(lesson.Linear.apply, inputs)
    assert lesson.survives_autocast(
        lesson.Linear.apply, *(t.detach().float().requires_grad_() for t in inputs)
    )


def test_in_float32_changes_low_tensors_only(lesson):
    given = [
        torch.ones(1).half(),
        torch.ones(1).bfloat16(),
        torch.ones(1).double(),
        torch.ones(1).long(),
        "text",
    ]
    with torch.autocast("cpu", dtype=lesson.low):
        seen = lesson.in_float32(lambda *args: [*args, torch.is_autocast_enabled("cpu")])(*given)
    assert [t.dtype for t in seen[:4]] == [torch.float32, torch.float32, torch.float64, torch.int64]
    assert seen[4:] == ["text", False]


@each("size", [1.0, 100.0, 10_000.0])
def test_log_sum_exp_is_torchs_in_float32(lesson, size):
    x = (
        (size * torch.randn(6, 5, generator=torch.Generator().manual_seed(1)))
        .half()
        .requires_grad_()
    )
    with torch.autocast("cpu", dtype=torch.float16):
        ours = lesson.LogSumExp.apply(x)
    ours.sum().backward()
    wide = x.detach().float()
    torch.testing.assert_close(ours, wide.logsumexp(-1))
    torch.testing.assert_close(x.grad.float(), wide.softmax(-1), rtol=2e-3, atol=1e-6)
