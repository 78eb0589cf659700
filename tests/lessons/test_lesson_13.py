"""Lesson 13: what reaches a thread, what a script's training equals, what ranks tell each other."""

import math
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.each import each
from support.processes import patience
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks

from amp_utils.course import ROOT
from amp_utils.course.notebook import load
from amp_utils.device import choose_device
from amp_utils.launch import launch
from amp_utils.threads import in_data_parallel

CPU = torch.device("cpu")
SCRIPT = ROOT / "notebooks" / "train_ddp.py"
LISTENERS = """
listening = set()
mine = {os.stat(f"/proc/{pid}/fd/{fd}").st_ino for pid in (os.getpid(), os.getppid())
        for fd in os.listdir(f"/proc/{pid}/fd") if os.path.exists(f"/proc/{pid}/fd/{fd}")}
for name in ("tcp", "tcp6"):
    for line in open(f"/proc/net/{name}").readlines()[1:]:
        row = line.split()
        if row[3] == "0A" and int(row[9]) in mine:
            listening.add(row[1].split(":")[0])
saved |= {"listening": sorted(listening), "host": os.uname().nodename}
"""

SHARDED = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, sys.argv[1])
from shard_fsdp import Traffic, split
from train_ddp import join, points

rank, ranks, device = join("cpu")
mesh = init_device_mesh("cpu", (ranks,))
x, y = (10 * part for part in points())
saved = {}
for name in ("alone", "clipped", "synchronised", "quiet"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    if name != "alone":
        split(net, mesh, torch.float32)
    parts = 4 if name in ("synchronised", "quiet") else 1
    first, step = (0, 1) if name == "alone" else (rank, ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Traffic() as traffic:
        pairs = zip(x[first::step].chunk(parts), y[first::step].chunk(parts), strict=True)
        for i, (some, heights) in enumerate(pairs):
            if name == "quiet":
                net.set_requires_gradient_sync(i == parts - 1)
            loss = nn.functional.mse_loss(net(some), heights) / parts
            scaler.scale(loss).backward()
        sums = len(traffic.messages.get("reduce_scatter", []))
    scaler.unscale_(optimizer)
    if parts == 1:
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    whole = [getattr(w.grad, "full_tensor", lambda w=w: w.grad)() for w in net.parameters()]
    saved[name] = {"sums": sums, "gradient": torch.cat([part.flatten() for part in whole])}
torch.save(saved, f"rank{rank}.pt")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def lesson():
    return load("13", device=CPU, seed=0, other=torch.float16)


@pytest.fixture(scope="module")
def train():
    return runpy.run_path(str(SCRIPT))["train"]


@each("dtype", [torch.float16, torch.bfloat16])
def test_only_autocast_in_forward_reaches_a_thread(lesson, dtype):
    x = torch.ones(2, 4)
    with torch.autocast("cpu", dtype=dtype), ThreadPoolExecutor(3) as pool:
        assert [*pool.map(lesson.product, [x] * 3)] == [torch.float32] * 3
        assert [*pool.map(lesson.Net(), [x] * 3)] == [torch.float16] * 3


def test_dataparallel_hands_on_the_switch_and_not_the_dtype():
    x = torch.ones(2, 4, device=choose_device())
    kind, default = x.device.type, torch.get_autocast_dtype(x.device.type)
    other = torch.float16 if default == torch.bfloat16 else torch.bfloat16

    def dtypes():
        return in_data_parallel(lambda x: torch.mm(x, x.T).dtype, x)

    with torch.autocast(kind, dtype=other):
        assert dtypes() == [default] * 2
    assert dtypes() == [torch.float32] * 2


def test_one_process_trains_as_an_average_over_shares_does(train):
    """DDP by hand, in float32: the mean of the gradients of three shares."""
    one = train(0, 1, CPU, torch.float32, 12)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    x, y = runpy.run_path(str(SCRIPT))["points"]()
    for _ in range(12):
        optimizer.zero_grad()
        for rank in range(3):
            (nn.functional.mse_loss(net(x[rank::3]), y[rank::3]) / 3).backward()
        optimizer.step()
    by_hand = nn.utils.parameters_to_vector(net.parameters())
    torch.testing.assert_close(one["weights"][-1], by_hand, rtol=1e-4, atol=1e-5)
    assert one["loss"][-1] < 0.7 * one["loss"][0]


def test_the_bad_sample_costs_one_step(train):
    story = train(0, 1, CPU, torch.float16, 8, overflow_step=5)
    assert [step for step, skipped in enumerate(story["skipped"], 1) if skipped] == [5]
    assert [step for step, finite in enumerate(story["finite"], 1) if not finite] == [5]
    assert story["weights"][-1].isfinite().all() and {*story["output"]} == {"torch.float16"}


@each("dtype", [torch.float32, torch.bfloat16])
def test_the_hook_does_what_torchs_own_hook_does(monkeypatch, dtype):
    """Three ranks with the same gradients, in one process."""

    def all_reduce(message, group=None, async_op=False):
        message.copy_(message + message + message)
        future = torch.futures.Future()
        future.set_result([message])
        return SimpleNamespace(get_future=lambda: future)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    gradients, sent = torch.randn(100), []
    mine, torchs = gradients.clone(), gradients.clone()
    hook = {torch.float32: hooks.allreduce_hook, torch.bfloat16: hooks.bf16_compress_hook}[dtype]
    average = runpy.run_path(str(SCRIPT))["average"](
        (sent, dtype), SimpleNamespace(buffer=lambda: mine)
    ).wait()
    ranks, bucket = SimpleNamespace(size=lambda: 3), SimpleNamespace(buffer=lambda: torchs)
    assert torch.equal(average, hook(ranks, bucket).wait())
    assert average is mine and average.dtype == torch.float32
    assert sent == [100 * dtype.itemsize]


@each("total, ranks", [(7, 2), (240, 4), (5, 5), (3, 4)])
def test_rank_loss_averages_to_the_mean_and_its_gradient(lesson, total, ranks):
    errors = torch.rand(total, requires_grad=True)
    losses = [lesson.rank_loss(errors[rank::ranks], total, ranks) for rank in range(ranks)]
    (sum(losses) / ranks).backward()
    assert torch.allclose(errors.grad, torch.full((total,), 1 / total))


@pytest.fixture
def nameless(tmp_path, monkeypatch) -> None:
    """Programs started from here see a host name that does not resolve; skips where not allowed."""
    words = (
        "unshare --user --map-root-user --uts sh -c 'hostname nowhere.invalid && exec \"$@\"' sh"
    )
    if subprocess.run(f"{words} true", shell=True, capture_output=True).returncode:
        pytest.skip("this machine lets no one change the host name for one program")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {words} {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and makes a namespace")
def test_three_ranks_without_a_network_train_as_one_process_does(train, nameless, tmp_path):
    save = "    torch.save(saved,"
    text = SCRIPT.read_text("utf-8")
    assert save in text
    spy = "\n".join(f"    {line}" for line in LISTENERS.strip().splitlines())
    path = tmp_path / "script.py"
    path.write_text(text.replace(save, f"{spy}\n{save}"), "utf-8")
    shutil.copy(SCRIPT.with_name("shard_fsdp.py"), tmp_path)
    with patience():
        saved = launch(path, 3, "--steps", 12)
    for name, dtype, tolerance in (("fp32", torch.float32, 1e-5), ("fp16", torch.float16, 1e-3)):
        weights = [by_rank[name]["weights"][-1] for by_rank in saved]
        assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])
        alone = train(0, 1, CPU, dtype, 12, 6 if dtype == torch.float16 else 0)["weights"][-1]
        assert (weights[0] - alone).norm() < tolerance * alone.norm()
    for rank, by_rank in enumerate(saved):
        story = by_rank["fp16"]
        assert [step for step, skipped in enumerate(story["skipped"]) if skipped] == [5]
        assert math.isfinite(story["loss"][5]) == (rank < 2)
        names = "every micro-batch", "no_sync", "no_sync, bfloat16"
        assert [len(by_rank[name]["sent"]) for name in names] == [4, 1, 1]
        assert by_rank["listening"] == ["0100007F"]  # 127.0.0.1, as /proc writes it
        assert by_rank["host"] == "nowhere.invalid"


@pytest.mark.full
def test_fsdp2_clips_by_the_norm_of_all_pieces_and_accumulates_in_silence(tmp_path):
    path = tmp_path / "sharded.py"
    path.write_text(SHARDED, "utf-8")
    with patience():
        ranks = launch(path, 2, SCRIPT.parent)
    for saved in ranks:
        clipped = saved["clipped"]["gradient"]
        assert math.isclose(clipped.norm().item(), 1.0, rel_tol=1e-5)
        torch.testing.assert_close(clipped, saved["alone"]["gradient"], rtol=1e-3, atol=1e-6)
        often, once = saved["synchronised"], saved["quiet"]
        assert (often["sums"], once["sums"]) == (8, 2)  # two layers in four micro-batches
        torch.testing.assert_close(once["gradient"], often["gradient"], rtol=1e-4, atol=1e-5)
