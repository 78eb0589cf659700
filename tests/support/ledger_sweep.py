"""Run torch's own samples of every op and module with and without the ledger, and compare.

A process of its own: importing torch's test machinery freezes torch.backends.

    python tests/support/ledger_sweep.py --every 9 --samples 2
"""

import argparse
import itertools
import json
import sys
import types
import unittest
import warnings
from collections import Counter

import torch

# The test machinery subclasses it, its lists of samples do not need it.
sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))
from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402
from torch.testing._internal.common_modules import module_db  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves, tree_map  # noqa: E402

from amp_utils import ledger  # noqa: E402

MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


# They ask whether a mode is on, or depend on where their data lies in memory.
OTHER_KERNEL = {
    *("linalg.svdvals", "linalg.eigvalsh", "linalg.cond", "linalg.matrix_rank", "norm.nuc"),
    *("linalg.lstsq", "linalg.lstsq.grad_oriented", "linalg.matrix_norm"),
}


class Conversions(TorchDispatchMode):
    """The oracle: conversions between floating dtypes, in all and of what the call was given."""

    COPIES = {"clone", "empty_like", "copy_", "_unsafe_view"}

    def __init__(self):
        super().__init__()
        self.seen, self.of_inputs, self.made = Counter(), Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        calculated = any(tensor is made for tensor in tensors for made in self.made)
        if func is torch.ops.aten._to_copy.default:
            a, b = args[0], result
            if a.dtype != b.dtype and a.is_floating_point() and b.is_floating_point():
                cast = f"{ledger._name(a.dtype)}→{ledger._name(b.dtype)}"
                self.seen[cast] += 1
                self.of_inputs[cast] += not calculated
        if calculated or not (func.is_view or func.overloadpacket.__name__ in self.COPIES):
            self.made += [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result


def run(prepare, mode, autocast, watch=None):
    """(result or the type of its error, what `watch` yielded)."""
    call = prepare()
    torch.manual_seed(0)
    with mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        try:
            if watch is None:
                return call(), None
            with watch() as seen:
                return call(), seen
        except (Exception, AssertionError) as error:
            return f"{type(error).__name__}: {str(error)[:200]}", None


def same(a, b):
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a.split(":")[0] == b.split(":")[0]
    first, second = tree_leaves(a), tree_leaves(b)
    return len(first) == len(second) and all(map(same_leaf, first, second))


def same_leaf(a, b):
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b)
    if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad:
        return False
    if a.is_nested:
        return all(map(same_leaf, a.unbind(), b.unbind()))
    a, b = (t.detach().to_dense() if t.layout != torch.strided else t.detach() for t in (a, b))
    a, b = a.resolve_conj().resolve_neg(), b.resolve_conj().resolve_neg()
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if a.is_floating_point():
        return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
    return a.is_quantized or torch.equal(a, b)


def close(a, b):
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-4) for x, y in pairs)


def calls(every, start, samples):
    """(name, function that prepares a call) per sample, of every n-th op and module."""
    for op in op_db[start::every]:
        for dtype in (torch.float32, torch.complex64):
            if not op.supports_dtype(dtype, "cpu") or "empty" in op.name:
                continue
            inputs = op.sample_inputs("cpu", dtype, requires_grad=False)
            for sample in itertools.islice(inputs, samples):

                def prepare(op=op, sample=sample):
                    given = sample.input, sample.args, sample.kwargs
                    x, args, kwargs = tree_map(
                        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, given
                    )
                    return lambda: op(x, *args, **kwargs)

                yield f"{op.name}.{op.variant_test_name}".rstrip("."), prepare
    for info in module_db[start::every]:
        for training in (True, False):
            inputs = info.module_inputs_func(
                info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
            )
            for entry in inputs[:samples]:

                def prepare(info=info, entry=entry, training=training):
                    torch.manual_seed(1)
                    made = entry.constructor_input
                    module = info.module_cls(*made.args, **made.kwargs).train(training)
                    given = entry.forward_input
                    return lambda: module(*given.args, **given.kwargs)

                yield info.name, prepare


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)  # the documented shortcut
    counts, wrong, names = Counter(), [], set()
    for name, prepare in calls(options.every, options.start, options.samples):
        names.add(name)
        counts["samples"] += 1
        casts = {}
        for mode_name, mode in MODES.items():
            alone, _ = run(prepare, mode, True)
            if not same(alone, run(prepare, mode, True)[0]):
                counts["not repeatable"] += 1
                continue
            counts["runs"] += 1
            counts["runs that raise"] += isinstance(alone, str)
            seen, rows = run(prepare, mode, True, ledger.record)
            if not same(alone, seen):
                if name in OTHER_KERNEL and close(alone, seen):
                    counts["last bits of linear algebra"] += 1
                    continue
                wrong.append(
                    ("result", mode_name, name, str(seen) if isinstance(seen, str) else "")
                )
            if rows is not None:
                casts[mode_name] = Counter(cast for row in rows for cast in row.casts)
        if len(casts) != len(MODES):
            continue

        def conversions(mode_name, prepare=prepare):
            with torch.autograd.profiler.profile(use_kineto=False) as seen:
                run(prepare, MODES[mode_name], True)
            return sum(event.name == "aten::_to_copy" for event in seen.function_events)

        # In inference mode autocast keeps no cast of a weight; the profiler, which changes nothing,
        # has to agree (asked only where needed, since it writes to stderr).
        more = casts["inference"].total() - casts["grad"].total()
        agreed = not more or more == conversions("inference") - conversions("grad")
        if casts["grad"] != casts["no_grad"] or not agreed:
            wrong.append(("modes", "", name, str({k: dict(v) for k, v in casts.items()})))
        plain, on = run(prepare, MODES["grad"], True, Conversions)
        off = run(prepare, MODES["grad"], False, Conversions)[1]
        if on is None or off is None or not same(plain, run(prepare, MODES["grad"], True)[0]):
            counts["the oracle changes the result"] += 1
            continue
        inserted, of_inputs = on.seen - off.seen, on.of_inputs - off.of_inputs
        counts["casts compared"] += 1
        counts["with casts"] += bool(inserted)
        counts["casts equal"] += casts["grad"] in (inserted, of_inputs)
        if not of_inputs <= casts["grad"] <= inserted:
            wrong.append(
                ("casts", "", name, f"oracle {dict(inserted)}, ledger {dict(casts['grad'])}")
            )
    counts["names"] = len(names)
    print(json.dumps({"counts": counts, "wrong": wrong}))


if __name__ == "__main__":
    main()
