"""amp_utils.ledger against its oracles: torch's own lists, and unwatched runs."""

import copy
import importlib
import json
import os
import subprocess
import sys
import threading
import types
import unittest
from collections import Counter
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

from amp_utils import ledger, memory

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOW = pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])


# ---- policy: torch's own lists of what autocast treats how


def torch_lists():
    """torch's lists, without the test machinery they import, which freezes torch.backends."""
    name = "torch.testing._internal.common_utils"
    machinery = types.SimpleNamespace(TEST_WITH_ROCM=False, TestCase=unittest.TestCase)
    with mock.patch.dict(sys.modules, {name: machinery}):
        lists = importlib.import_module("torch.testing._internal.autocast_test_lists")
    return {"cpu": lists.AutocastCPUTestLists("cpu"), "cuda": lists.AutocastTestLists("cpu")}


LISTED = {
    "cpu": {
        "torch_16": "lower_precision",
        "nn_16": "lower_precision",
        "torch_fp32": "fp32",
        "nn_fp32": "fp32",
        "torch_need_autocast_promote": "promote",
        "torch_expect_builtin_promote": "passthrough",  # the op itself promotes
        "methods_expect_builtin_promote": "passthrough",
    },
    "cuda": {
        "torch_fp16": "lower_precision",
        "nn_fp16": "lower_precision",
        "linalg_fp16": "lower_precision",
        "methods_fp16": "lower_precision",
        "torch_fp32": "fp32",
        "nn_fp32": "fp32",
        "methods_fp32": "fp32",
        "torch_need_autocast_promote": "promote",
        "torch_expect_builtin_promote": "passthrough",
        "methods_expect_builtin_promote": "passthrough",
        "banned": "banned",
    },
}
MODULES = {"nn": torch._C._nn, "banned": torch._C._nn, "linalg": torch._C._linalg, "torch": torch}

# What a CPU build of torch cannot run on fake CUDA tensors, and why. It may shrink, it must not
# grow.
UNAVAILABLE = {
    "cpu": set(),
    "cuda": {
        "torch.cudnn_convolution",  # asks the CUDA runtime for the device
        "torch.cudnn_convolution_transpose",
        "torch.gru_cell",  # its fused kernel does so too; lstm_cell's does not
        "torch.grid_sampler",  # asks whether cuDNN would take it
        "torch.equal",  # its result depends on data, which fake tensors do not have
        "Tensor.equal",
    },
}


def listed_ops(device, lists):
    """(name, callable, args, kwargs, documented policy) per op: function and method."""
    for list_name, documented in LISTED[device].items():
        for name, args, *rest in getattr(lists, list_name):
            kwargs = next((extra for extra in rest if isinstance(extra, dict)), {})
            if name == "einsum":
                # A slip in torch's CUDA list: the equation stands where the arguments belong, and
                # torch's own test then takes the matrices for a truthy "skip" flag. The policy
                # holds all the same.
                assert isinstance(args, str)
                args = args, torch.randn(2, 2, 2, 2), torch.randn(2, 2, 2, 2)
            module = MODULES.get(list_name.split("_")[0])
            found = (
                [(f"torch.{name}", getattr(module, name))]
                if module and hasattr(module, name)
                else []
            )
            found += (
                [(f"Tensor.{name}", getattr(torch.Tensor, name))]
                if hasattr(torch.Tensor, name)
                else []
            )
            assert found, f"{name} is neither in {module} nor a method"
            for label, op in found:
                yield label, op, args, kwargs, documented


def test_no_list_of_torch_is_forgotten():
    for device, lists in torch_lists().items():
        assert {name for name, value in vars(lists).items() if isinstance(value, list)} == set(
            LISTED[device]
        )


@pytest.mark.parametrize(("device", "low"), [("cpu", BF16), ("cuda", FP16)])
@pytest.mark.filterwarnings(
    "ignore:.*(chain_matmul|cross).*deprecated", "ignore:Accessing the data"
)
def test_every_listed_op_has_the_policy_that_torch_documents(device, low, capfd):
    got = Counter()
    unavailable, wrong = set(), []
    for name, op, args, kwargs, documented in listed_ops(device, torch_lists()[device]):
        policy = ledger.policy(op, *args, device=device, dtype=low, **kwargs)
        got[policy] += 1
        if policy == "unavailable":
            unavailable.add(name)
        elif policy != documented:
            wrong.append(f"{name}: documented {documented}, found {policy}")
    assert not wrong, "\n".join(wrong)
    assert unavailable <= UNAVAILABLE[device]
    assert sum(got.values()) == {"cpu": 72, "cuda": 182}[device] and got["unavailable"] <= len(
        UNAVAILABLE[device]
    )
    assert capfd.readouterr().err == "", (
        "an op that fails must not leave its traceback in a learner's notebook"
    )
    with capfd.disabled():
        print(f"\n{device} {low}: {dict(got)}, not available here: {sorted(unavailable)}")


@pytest.mark.parametrize(
    ("op", "args", "cpu", "cuda"),
    [
        (F.linear, (torch.rand(2, 4), torch.rand(3, 4)), "lower_precision", "lower_precision"),
        (F.softmax, (torch.rand(2, 4), 1), "passthrough", "fp32"),
        (torch.exp, (torch.rand(4),), "passthrough", "fp32"),
        (torch.sum, (torch.rand(4),), "passthrough", "fp32"),
        (torch.cumsum, (torch.rand(4), 0), "passthrough", "fp32"),
        (torch.pow, (torch.rand(4), 2), "passthrough", "fp32"),
        (torch.norm, (torch.rand(4),), "passthrough", "fp32"),
        (F.layer_norm, (torch.rand(2, 4), (4,)), "passthrough", "fp32"),
        (F.mse_loss, (torch.rand(4), torch.rand(4)), "fp32", "fp32"),
        (F.cross_entropy, (torch.rand(2, 4), torch.tensor([0, 1])), "fp32", "fp32"),
        (F.binary_cross_entropy, (torch.rand(4), torch.rand(4)), "fp32", "banned"),
        (torch.mean, (torch.rand(4),), "passthrough", "passthrough"),
        (F.gelu, (torch.rand(4),), "passthrough", "passthrough"),
        (F.dropout, (torch.rand(4),), "passthrough", "passthrough"),
        (torch.add, (torch.rand(4), torch.rand(4)), "passthrough", "passthrough"),
        (torch.stack, ([torch.rand(4), torch.rand(4)],), "promote", "passthrough"),
        (torch.dot, (torch.rand(4), torch.rand(4)), "passthrough", "promote"),
        (
            F.scaled_dot_product_attention,
            (torch.rand(1, 2, 4, 8),) * 3,
            "lower_precision",
            "lower_precision",
        ),
        (torch.relu_, (torch.rand(4),), "passthrough", "passthrough"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_policies_that_the_lessons_name(op, args, cpu, cuda):
    assert (ledger.policy(op, *args), ledger.policy(op, *args, device="cuda")) == (cpu, cuda)


def test_a_dtype_that_the_caller_asks_for_is_not_autocasts_doing():
    assert ledger.policy(partial(torch.sum, dtype=FP32), torch.rand(4)) == "passthrough"
    assert ledger.policy(torch.Tensor.bfloat16, torch.rand(4)) == "passthrough"
    assert ledger.policy(torch.Tensor.half, torch.rand(4), device="cuda") == "passthrough"
    assert (
        ledger.policy(partial(F.softmax, dtype=FP32), torch.rand(4), 0, device="cuda")
        == "passthrough"
    )


def test_what_cannot_run_is_unavailable():
    def broken(x):
        raise RuntimeError("no kernel")

    assert (
        ledger.policy(broken, torch.rand(2))
        == ledger.policy(broken, torch.rand(2), device="cuda")
        == "unavailable"
    )
    assert (
        ledger.policy(nn.Linear(4, 4), torch.rand(2, 4), device="cuda") == "unavailable"
    )  # its weights are real


@pytest.mark.parametrize("use_autograd", [torch.func.grad, torch.func.hessian, torch.enable_grad()])
def test_autograd_on_cuda_is_unavailable_and_does_not_end_the_process(use_autograd):
    def product(x):
        return (x @ x).sum()

    x = torch.rand(3, 3)
    assert ledger.policy(use_autograd(product), x, device="cuda") == "unavailable"
    assert ledger.policy(use_autograd(product), x) == "lower_precision"


INSIDE = {
    "bilinear": (F.bilinear, (torch.rand(2, 3), torch.rand(2, 3), torch.rand(4, 3, 3))),
    "sparse.mm": (lambda a, b: torch.sparse.mm(a.to_sparse(), b), (torch.rand(3, 3),) * 2),
    "pinv": (torch.linalg.pinv, (torch.rand(3, 3),)),
    "cdist": (torch.cdist, (torch.rand(30, 3), torch.rand(30, 3))),
}


@pytest.mark.parametrize("name", INSIDE)
def test_ops_inside_a_kernel_are_autocast_as_unwatched(name):
    op, args = INSIDE[name]
    expected = "fp32" if name == "cdist" else "lower_precision"  # whose own rule covers its inside
    assert ledger.policy(op, *args) == expected
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode(), torch.autocast("cpu", dtype=BF16):
            alone = op(*args)
            with ledger.record() as rows:
                watched = op(*args)
        torch.testing.assert_close(watched, alone, rtol=0, atol=0)
        assert bool(rows[-1].casts) == (name in ("bilinear", "sparse.mm"))


def everything_that_policy_touches():
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        nesting,
        torch.is_autocast_cache_enabled(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        _get_current_function_mode_stack(),
        _get_current_dispatch_mode(),
        torch._subclasses.fake_tensor.log.disabled,
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_policy_leaves_everything_as_it_was(device):
    def raises(x):
        F.dropout(x)
        raise KeyboardInterrupt

    x = torch.rand(4, requires_grad=True)
    before, values = everything_that_policy_touches(), x.tolist()
    ledger.policy(F.dropout, x, device=device)
    ledger.policy(torch.Tensor.mul_, x, 3.0, device=device)
    ledger.policy(torch.gru_cell, x, device=device)  # fails: arguments are missing
    with pytest.raises(KeyboardInterrupt):
        ledger.policy(raises, x, device=device)
    assert everything_that_policy_touches() == before
    assert x.tolist() == values and x.requires_grad and x.grad is None


def test_policy_inside_a_region_leaves_the_region_and_its_weight_cache_alone():
    layer, x = nn.Linear(4, 4), torch.rand(2, 4)
    with torch.autocast("cpu", dtype=FP16):
        layer(x)
        before = everything_that_policy_touches()
        assert ledger.policy(torch.mm, x.T, x, device="cuda", dtype=BF16) == "lower_precision"
        assert ledger.policy(torch.sum, x, device="cpu", dtype=BF16) == "passthrough"
        assert everything_that_policy_touches() == before
        with ledger.record() as rows:
            layer(x)
    assert rows[0].casts == ("float32→float16",) and rows[0].output == FP16


def test_bad_input_gets_one_sentence():
    with pytest.raises(
        ValueError, match=r"^device = 'tpu' is not allowed: give 'cpu' or 'cuda'\.$"
    ):
        ledger.policy(torch.exp, torch.rand(2), device="tpu")
    with pytest.raises(
        ValueError,
        match=r"^dtype = torch.float64 is not allowed: give torch.float16 or torch.bfloat16",
    ):
        ledger.policy(torch.exp, torch.rand(2), dtype=torch.float64)
    with pytest.raises(ValueError, match="args hold no floating-point tensor"):
        ledger.policy(torch.exp, torch.arange(3))


# ---- record: a row per op


def recorded(function, low=BF16):
    with ledger.record() as rows:
        with torch.autocast("cpu", dtype=low):
            function()
    return rows


def ops(rows):
    return [row.op for row in rows]


@LOW
def test_a_network_op_by_op(low):
    to_low = f"float32→{ledger._name(low)}"
    to_fp32 = f"{ledger._name(low)}→float32"
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    x, target = torch.rand(2, 1, 6, 6), torch.tensor([0, 1])
    assert recorded(lambda: F.cross_entropy(net(x), target), low) == [
        ledger.Row("conv2d", (FP32,) * 3, low, low, (to_low,) * 3),
        ledger.Row("batch_norm", (low, *[FP32] * 4), low, low, ()),
        ledger.Row("relu", (low,), low, low, ()),
        ledger.Row("max_pool2d", (low,), low, low, ()),
        ledger.Row("dropout", (low,), low, low, ()),
        ledger.Row("linear", (low, FP32, FP32), low, low, (to_low,) * 2),
        ledger.Row("cross_entropy", (low,), FP32, FP32, (to_fp32,)),
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_on_cuda_cross_entropy_begins_in_the_logits_dtype(dtype):
    """Autocast widens its last part only: the logarithms of 16-bit logits stay in 16 bits."""
    model = nn.Module()
    model.forward = F.cross_entropy
    (row,) = ledger.on_cuda(model, torch.randn(4, 3, dtype=dtype), torch.randint(3, (4,)))
    assert (row.ran_in, row.output) == (dtype, torch.float32)


def test_a_model_under_the_rules_of_cuda_needs_no_gpu_and_stays_as_it_was():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x):
            return torch.softmax(self.norm(self.layer(x)), dim=-1)

    model, x = Normalised().eval(), torch.randn(4, 8)
    before, on = copy.deepcopy(model.state_dict()), torch.is_autocast_enabled("cuda")
    found = {row.op: (row.output, row.casts) for row in ledger.on_cuda(model, x)}
    assert found["linear"] == (torch.float16, ("float32→float16",) * 3)
    assert found["softmax"][0] == torch.float32
    bf16 = ledger.on_cuda(model, x, dtype=torch.bfloat16)
    assert next(row for row in bf16 if row.op == "linear").output == torch.bfloat16
    plain = ledger.on_cuda(model, x, region=nullcontext())
    assert {row.output for row in plain} == {torch.float32}
    torch.testing.assert_close(model.state_dict(), before)
    assert torch.is_autocast_enabled("cuda") == on and model.layer.weight.device.type == "cpu"


@pytest.mark.parametrize("index", [0, None, slice(1, 3), (..., 0), (slice(None), None)], ids=str)
def test_indexing_under_the_rules_of_cuda_needs_no_gpu(index):
    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("order", torch.tensor([2, 0]))

        def forward(self, x):
            x[index] = x[index] + 1
            return x[index] @ x[index].mT + x[:, self.order].sum()

    rows = ledger.on_cuda(Indexed(), torch.randn(4, 4, 4))
    low, wide = torch.float16, torch.float32
    assert [(row.op, row.output) for row in rows if row.output] == [
        ("add", wide),
        ("matmul", low),
        ("getitem", wide),
        ("sum", wide),
        ("add", low),
    ]


def test_adding_promotes_by_itself_and_multiplying_matrices_is_cast():
    x = torch.rand(3, 3)
    low = x.bfloat16()
    assert recorded(lambda: (low + x, low @ x, torch.stack([low, x]))) == [
        ledger.Row("add", (BF16, FP32), FP32, FP32, ()),
        ledger.Row("matmul", (BF16, FP32), BF16, BF16, ("float32→bfloat16",)),
        ledger.Row("stack", (BF16, FP32), FP32, FP32, ("bfloat16→float32",)),
    ]


def test_a_weight_is_cast_once_in_a_region():
    layer, x = nn.Linear(4, 4, bias=False), torch.rand(2, 4)
    first, second = recorded(lambda: (layer(x), layer(x)))
    assert (len(first.casts), len(second.casts)) == (2, 1)
    assert first.inputs == second.inputs == (FP32, FP32)


def test_a_conversion_by_the_user_is_a_row_and_no_inserted_cast():
    low = torch.rand(3).bfloat16()
    rows = recorded(
        lambda: (
            low.float(),
            low.to(FP16),
            low.to(torch.rand(1)),
            low.double(),
            F.softmax(low, 0, dtype=FP32),
        )
    )
    assert [(row.op, row.ran_in, row.output) for row in rows] == [
        ("float", FP32, FP32),
        ("to", FP16, FP16),
        ("to", FP32, FP32),
        ("double", torch.float64, torch.float64),
        ("softmax", FP32, FP32),
    ]
    assert all(row.casts == () and row.inputs[0] == BF16 for row in rows)


def test_outside_a_region_nothing_is_cast():
    layer, x = nn.Linear(4, 4), torch.rand(2, 4)
    rows = recorded(lambda: [layer(x), torch.autocast("cpu", enabled=False)(layer)(x)])
    assert [row.ran_in for row in rows] == [BF16, FP32] and rows[1].casts == ()
    with ledger.record() as rows:
        layer(x)
        F.softmax(x.half(), 0, dtype=FP32)
    assert [row.casts for row in rows] == [(), (), ()]


def test_looking_viewing_and_integers_have_no_row():
    x, target = torch.rand(2, 3), torch.tensor([1, 0])

    def look():
        (x.shape, x.dtype, x.T, x.grad, x.size(), x[0], x.view(3, 2), x.is_floating_point())
        (x.T.reshape(6), x.contiguous(), x.clone(), x.detach(), x.expand(2, 2, 3), x.tolist())
        x[0, 0].item()
        torch.zeros(3), target + 1, target.float(), x.float()
        F.dropout(x, training=False)

    assert recorded(look) == []


def test_operators_in_place_and_composed():
    x = torch.rand(2, 2)

    def run():
        y = x @ x
        y += 1
        y.mul_(2)
        1 - y
        y > 0  # noqa: B015
        torch.einsum("ij,jk->ik", x, x)
        F.normalize(y)
        F.relu(y, inplace=True)
        y.argmax()

    rows = recorded(run)
    assert ops(rows) == "matmul add_ mul_ rsub gt einsum norm clamp_min div relu argmax".split()
    assert {row.ran_in for row in rows} == {BF16}
    assert [row.output for row in rows if row.op in ("gt", "argmax")] == [torch.bool, torch.int64]


def test_attention_and_recurrent_layers():
    x = torch.rand(2, 3, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    assert (
        ops(recorded(lambda: attention(x, x, x)))
        == "linear mul bmm softmax bmm linear mean".split()
    )
    rows = recorded(lambda: attention(x, x, x, need_weights=False))
    assert ops(rows) == ["linear", "scaled_dot_product_attention", "linear"]
    assert [row.inputs for row in rows] == [(FP32,) * 3, (BF16,) * 3, (BF16, FP32, FP32)]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_grad_mode_shows_the_same(mode, batch_first):
    # Without data, since not every CPU has a bfloat16 kernel for recurrent layers.
    with memory.without_data(), mode():
        layer, x = nn.LSTM(8, 4, batch_first=batch_first), torch.rand(2, 3, 8)
        rows = recorded(lambda: layer(x)[0].float() @ x.new_ones(4, 2))
    assert [row for row in rows if row.op != "new_ones"] == [
        ledger.Row("lstm", (FP32,) * 7, BF16, BF16, ("float32→bfloat16",) * 7),
        ledger.Row("float", (BF16,), FP32, FP32, ()),
        ledger.Row("matmul", (FP32, FP32), BF16, BF16, ("float32→bfloat16",) * 2),
    ]


def test_casts_before_a_complex_or_integer_result():
    x = torch.rand(4, 4).bfloat16()
    rows = recorded(lambda: [torch.fft.fft(x), torch.linalg.eig(x), torch.linalg.matrix_rank(x)])
    assert [row.output for row in rows] == [torch.complex64, torch.complex64, torch.int64]
    assert [row.casts for row in rows] == [("bfloat16→float32",)] * 3


def test_a_widening_of_the_ops_own_is_no_cast_of_autocasts():
    rows = recorded(lambda: torch.float_power(torch.rand(3), 2))
    assert (rows[-1].output, rows[-1].casts) == (torch.float64, ())


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_higher_order_ops_are_one_row():
    from torch.nn.attention.flex_attention import flex_attention

    q, x = torch.rand(1, 1, 16, 16), torch.rand(3, 3)
    calls = [
        lambda: flex_attention(q, q, q),
        lambda: torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: (x + 1) @ x, (x,)),
    ]
    for call, name in zip(calls, ("flex_attention", "cond"), strict=True):
        with torch.autocast("cpu", dtype=BF16):
            alone = call()
        seen = []
        rows = recorded(lambda: seen.append(call()))  # noqa: B023
        assert torch.equal(seen[0], alone) and seen[0].dtype == alone.dtype
        assert (rows[-1].op, rows[-1].output) == (name, BF16)


def test_attention_without_a_fused_kernel_widens_by_itself():
    q = torch.rand(1, 2, 4, 8, dtype=BF16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        (row,) = recorded(lambda: F.scaled_dot_product_attention(q, q, q))
    assert (row.ran_in, row.output, row.casts) == (FP32, BF16, ())


def test_the_backward_pass_is_not_recorded_and_unharmed():
    layer, x = nn.Linear(4, 4), torch.rand(2, 4)
    rows = recorded(lambda: layer(x).float().square().mean().backward())
    assert ops(rows) == ["linear", "float", "square", "mean"]
    grad, layer.weight.grad = layer.weight.grad, None
    with torch.autocast("cpu", dtype=BF16):
        loss = layer(x).float().square().mean()
    loss.backward()
    assert torch.equal(grad, layer.weight.grad)


def test_inside_a_custom_autograd_function():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 2 * x * grad

    x = torch.rand(3, requires_grad=True)
    assert ops(recorded(lambda: Square.apply(x).sum().backward())) == ["mul", "sum"]
    assert torch.allclose(x.grad, 2 * x)


def test_an_exception_keeps_the_rows_so_far_and_pops_the_modes():
    layer = nn.Linear(4, 4)
    with pytest.raises(RuntimeError, match="shapes"):
        with ledger.record() as rows:
            F.mse_loss(layer(torch.rand(2, 4)), torch.rand(2, 4))
            F.normalize(torch.rand(2, 4) @ torch.rand(3, 3))
    assert ops(rows) == ["linear", "mse_loss"]
    assert _get_current_function_mode_stack() == [] and _get_current_dispatch_mode() is None


def test_ledgers_nest():
    x = torch.rand(2)
    with ledger.record() as outer:
        torch.exp(x)
        with ledger.record() as inner:
            torch.sin(x)
    assert ops(inner) == ["sin"] and ops(outer) == ["exp", "sin"]


def test_a_ledger_sees_its_own_thread_only():
    x, seen_inside = torch.rand(2), []

    def work():
        torch.sin(x)
        with ledger.record() as rows:
            torch.cos(x)
        seen_inside.extend(ops(rows))

    with ledger.record() as rows:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        torch.exp(x)
    assert ops(rows) == ["exp"] and seen_inside == ["cos"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_recording_changes_no_result(mode):
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with torch.backends.mkldnn.flags(enabled=False):  # not every CPU has its kernel in bfloat16
        for name, op, args, kwargs in [
            *(listed[:4] for listed in listed_ops("cpu", torch_lists()["cpu"])),
            ("a wrapped number", torch.take_along_dim, (x, torch.zeros_like(x).long(), 1), {}),
            ("lazy conjugates", torch.fft.hfftn, (torch.randn(4, 5, 6),), {}),
            ("encoder", encoder, (x,), {}),
            ("gru", nn.GRU(8, 4), (x,), {}),
            ("lstm", nn.LSTM(8, 4), (x,), {}),
        ]:
            results = []
            for watch in (nullcontext, ledger.record):
                torch.manual_seed(0)
                with mode(), torch.autocast("cpu", dtype=BF16), watch():
                    results.append(op(*args, **kwargs))
            torch.testing.assert_close(*results, rtol=0, atol=0, msg=name)


@pytest.mark.full
def test_torchs_own_samples_of_ops_and_modules_agree():
    command = [sys.executable, "tests/support/ledger_sweep.py", "--every", "12", "--samples", "2"]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["wrong"] == []
    assert found["counts"]["runs"] > 300 and found["counts"]["with casts"] > 4


# ---- table


def test_the_table_is_plain_aligned_text():
    rows = [
        ledger.Row("linear", (BF16, FP32, FP32), BF16, BF16, ("float32→bfloat16",) * 2),
        ledger.Row("equal", (FP16, torch.float64), torch.float64, None, ()),
        ledger.Row("argmax", (FP16,), FP16, torch.int64, ()),
    ]
    assert ledger.table(rows).split("\n") == [
        "op      inputs         ran in  output  casts inserted",
        "linear  bf16, 2× fp32  bf16    bf16    2× fp32→bf16",
        "equal   fp16, fp64     fp64    –       –",
        "argmax  fp16           fp16    int64   –",
    ]
    assert ledger.table([]) == "op  inputs  ran in  output  casts inserted"
