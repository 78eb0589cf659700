"""The functions that lesson A4 defines, against Python's own integers, NumPy and torch."""

import numpy as np
import pytest
import torch
from support.each import each

from amp_utils.course.notebook import load


@pytest.fixture(scope="module")
def lesson():
    return load("A4")


def test_operations_are_listed_in_order_and_only_inside(lesson):
    x = torch.ones(3)
    with lesson.Operations() as done:
        (x + 1) * x
    torch.neg(x)
    assert done.names == ["add", "mul"]


def test_an_operator_is_its_function_and_the_outcome_is_a_dtype_or_an_error(lesson):
    x, y = torch.tensor([7, -3, 6]), torch.tensor([3, 2, 1])
    for text, function in lesson.OPERATORS.items():
        assert torch.equal(function(x, y), eval(text, {"x": x, "y": y})), text
    assert lesson.outcome(lambda x, y: x ^ y, torch.int64, torch.int64) == "int64"
    assert lesson.outcome(lambda x, y: x / y, torch.int64, torch.int64) == "float32"
    assert lesson.outcome(lambda x, y: x & y, torch.float32, torch.float32) == "error"
    assert lesson.outcome(lambda x, y: ~x, torch.float32, torch.float32) == "error"


def test_a_listed_kernel_is_not_looked_into(lesson):
    """The mode sees `unbind` once; a profiler sees its views, one a row."""
    x = torch.ones(7, 2)
    with lesson.Operations() as done:
        torch.unbind(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.unbind(x)
    inside = {event.key: event.count for event in profile.key_averages()}
    assert done.names == ["unbind"]
    assert inside["aten::select"] == 7


def test_a_product_picks_its_operation_by_the_shapes(lesson):
    matrix, batch = torch.ones(2, 2), torch.ones(3, 2, 2)
    for a, b, operation in ((matrix, matrix, "mm"), (matrix[0], matrix[0], "dot")):
        with lesson.Operations() as done:
            a @ b
        assert done.names[-1] == operation
    with lesson.Operations() as done:
        batch @ batch
    assert "bmm" in done.names and "mm" not in done.names
    with lesson.Operations() as done:
        batch @ matrix
    assert "mm" in done.names and "matmul" not in done.names


@each("symbol", ["^", "&", "|"])
def test_the_bit_operators_are_those_of_python(symbol):
    numbers = range(-4, 9)
    for a in numbers:
        for b in numbers:
            scope = {"a": a, "b": b, "x": torch.tensor(a), "y": torch.tensor(b)}
            assert eval(f"(x {symbol} y).item() == (a {symbol} b)", scope)


@each("a", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32])
@each("b", [torch.bool, torch.int8, torch.int32, torch.float16, torch.bfloat16])
def test_a_sum_promotes_and_a_product_of_matrices_refuses(lesson, a, b):
    expected = str(torch.promote_types(a, b)).removeprefix("torch.")
    assert lesson.outcome(torch.add, a, b) == expected == lesson.outcome(torch.add, b, a)
    if a != b:
        assert lesson.outcome(torch.matmul, a, b) == "error"


KINDS = [[torch.bool], [torch.uint8, torch.int64], [torch.float16, torch.bfloat16, torch.float32]]


@each("a", [dtype for kind in KINDS for dtype in kind])
@each("b", [dtype for kind in KINDS for dtype in kind])
def test_a_tensor_without_dimensions_counts_only_if_of_a_higher_kind(lesson, a, b):
    rank = {dtype: i for i, kind in enumerate(KINDS) for dtype in kind}
    expected = str(b if rank[b] > rank[a] else a).removeprefix("torch.")
    assert lesson.outcome(lambda x, y: x + y[0, 0], a, b) == expected


def test_a_python_number_counts_only_if_of_a_higher_kind():
    half, whole = torch.ones(2, 2, dtype=torch.float16), torch.ones(2, 2, dtype=torch.int64)
    assert (half * 0.5).dtype == torch.float16
    assert (whole * 0.5).dtype == torch.get_default_dtype()


@each("way", ["by_slicing", "by_unbind", "by_sum"])
@each("shape", [(1, 1), (7, 3), (500, 10)])
def test_the_three_sums_agree_with_numpy(lesson, way, shape):
    data = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    np.testing.assert_allclose(
        getattr(lesson, way)(data), data.numpy().astype(np.float64).sum(0), rtol=1e-4
    )


@each("rows", [50, 500])
def test_the_number_of_operations_is_what_the_lesson_says(lesson, rows):
    counts, ones = [], torch.ones(rows, 2)
    for way in (lesson.by_slicing, lesson.by_unbind, lesson.by_sum):
        with lesson.Operations() as done:
            way(ones)
        counts.append(len(done.names))
    assert counts == [2 * rows + 1, rows + 2, 1]


@each("way", ["by_slicing", "by_unbind"])
def test_an_fp16_accumulator_sticks_and_sum_does_not(lesson, way):
    ones = torch.ones(3000, 1).half()
    assert getattr(lesson, way)(ones).item() == 2048
    assert lesson.by_sum(ones).item() == 3000


@each("dtype", [torch.float16, torch.float32])
def test_a_masked_mean_sends_nothing_back_to_the_fillings(lesson, dtype):
    losses = torch.tensor([[1, torch.nan], [4, torch.inf]], dtype=dtype, requires_grad=True)
    mean = lesson.masked_mean(losses, torch.tensor([[1, 0], [1, 0]]))
    mean.backward()
    assert (mean.item(), mean.dtype) == (2.5, dtype)
    assert losses.grad.tolist() == [[0.5, 0], [0.5, 0]]


@each("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_a_running_mean_forgets_geometrically(lesson, dtype):
    values = torch.tensor([[5], [-3], [1], [7]]).to(dtype)
    average = torch.tensor([2.0])
    for value in values:
        lesson.update(average, value, 0.9)
    weights = 0.1 * 0.9 ** np.arange(4)[::-1]
    expected = 0.9**4 * 2 + weights @ values.double().numpy()
    np.testing.assert_allclose(average.double(), expected, rtol=1e-6)
