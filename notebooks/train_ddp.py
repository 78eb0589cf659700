"""AMP on several ranks; on 8 GPUs: torchrun --nproc-per-node 8 train_ddp.py --device cuda"""

import argparse
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Message = torch.futures.Future[torch.Tensor]


def join(wanted: str) -> tuple[int, int, torch.device]:
    """Meet the other ranks: this one's number, how many there are, and its device."""
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"  # torchrun sets them
    rank, ranks, local, neighbours = (int(os.environ[name]) for name in names)
    device, backend = torch.device("cpu"), "gloo"
    if wanted == "cuda" and torch.cuda.device_count() >= neighbours:
        device, backend = torch.device("cuda", local), "nccl"
        torch.cuda.set_device(device)
    meeting = os.environ.get("INIT_METHOD", "env://")  # `launch` sets another
    # new: wait until all have come
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
    return rank, ranks, device


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """240 points of a square and the height of a wave there."""
    x = torch.cartesian_prod(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 15))
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def note(story: dict, net: nn.Module, loss: torch.Tensor, scaler: torch.amp.GradScaler) -> None:
    """Write down a step: for a lesson only, since each .item() waits for the device."""
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu().clone()
    finite = all(p.grad.isfinite().all().item() for p in net.parameters())
    scale = scaler.get_scale()
    values = weights, loss.item(), finite, scale < story["scale"][-1], scale
    for column, value in zip(story.values(), values, strict=True):
        column.append(value)


def train(rank, ranks, device, dtype, steps, overflow_step=0, seed=0) -> dict:
    """Train on this rank's share of the points; the weights, losses and skips of each step."""
    torch.manual_seed(seed + rank)  # on purpose, other random weights on each rank
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    if dist.is_initialized():  # in the notebook's own process it is not
        net = DistributedDataParallel(net)  # new
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    amp = dtype != torch.float32
    scaler = torch.amp.GradScaler(
        device.type, init_scale=1024.0, enabled=dtype == torch.float16
    )
    story = {name: [] for name in ("weights", "loss", "finite", "skipped")}
    story["scale"] = [scaler.get_scale()]
    for step in range(1, steps + 1):
        x, y = points()
        if step == overflow_step:
            y[-1] = math.inf  # the last sample belongs to the last rank
        x, y = x[rank::ranks].to(device), y[rank::ranks].to(device)  # new: its share
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=amp):
            output = net(x)
            loss = nn.functional.mse_loss(output, y)
        scaler.scale(loss).backward()  # DDP averages the gradients of all ranks in here
        scaler.step(optimizer)
        scaler.update()
        note(story, net, loss, scaler)  # keeps what the lesson shows
    return story | {"output": str(output.dtype)}


def average(state: tuple[list, torch.dtype], bucket: dist.GradBucket) -> Message:
    """A communication hook: gradients travel in the dtype of your choice."""
    sent, dtype = state
    message = bucket.buffer().to(dtype).div_(dist.get_world_size())  # many gradients in a row
    sent.append(message.nbytes)
    done = dist.all_reduce(message, async_op=True).get_future()  # backward goes on meanwhile
    return done.then(lambda sums: bucket.buffer().copy_(sums.value()[0]))  # back to float32


def accumulate(
    rank, ranks, device, dtype=torch.float32, quiet: bool = True, spoilt: bool = False
) -> dict:
    """One gradient from four micro-batches; `quiet` ranks exchange the last one only."""
    torch.manual_seed(0)
    net, sent, finite = DistributedDataParallel(nn.Linear(64, 64).to(device)), [], []
    net.register_comm_hook((sent, dtype), average)
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    batches = torch.randn(4, ranks, 16, 64)[:, rank].to(device)
    if spoilt and rank == ranks - 1:
        batches[1] = math.inf
    for i, batch in enumerate(batches):
        # FSDP2, in place of no_sync: net.set_requires_gradient_sync(i == 3)
        with net.no_sync() if quiet and i < 3 else nullcontext():
            with torch.autocast(device.type, dtype=torch.float16):
                loss = net(batch).square().mean() / 4
            scaler.scale(loss).backward()
        finite.append(net.module.weight.grad.isfinite().all().item())
    return {"sent": sent, "finite": finite, "gradient": net.module.weight.grad.cpu()}


def refusal() -> str:
    """What DDP says to a process that wants two devices."""
    try:
        DistributedDataParallel(nn.Linear(1, 1), device_ids=[0, 1])
    except ValueError as error:
        return str(error)
    return ""


def experiments(here: tuple, steps: int, overflow_step: int, seed: int) -> dict:
    """What each rank measures, by name; `launch` returns one such dictionary for each rank."""
    return {
        "fp32": train(*here, torch.float32, steps, seed=seed),
        "fp16": train(*here, torch.float16, steps, overflow_step, seed),
        "every micro-batch": accumulate(*here, quiet=False),
        "no_sync, float32": accumulate(*here),
        "no_sync, bfloat16": accumulate(*here, torch.bfloat16),
        "infinite micro-batch": accumulate(*here, spoilt=True),
        "two devices": refusal(),
    }


def main() -> None:
    from shard_fsdp import measure  # the file beside this one

    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--overflow-step", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    here = rank, ranks, device = join(chosen.device)
    saved = experiments(here, chosen.steps, chosen.overflow_step, chosen.seed)
    saved |= {"fsdp": measure(*here), "backend": dist.get_backend()}
    torch.save(saved, f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
