"""AMP on several ranks; on 8 GPUs: torchrun --nproc-per-node 8 train_ddp.py --device cuda"""

import argparse
import math
import os
from collections import defaultdict
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def join(wanted: str) -> tuple[int, int, torch.device]:
    """Meet the other ranks; returns this rank's number, how many there are, and its device."""
    local, neighbours = (int(os.environ[n]) for n in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    device, backend = torch.device("cpu"), "gloo"
    if wanted == "cuda" and torch.cuda.device_count() >= neighbours:  # a GPU for each
        device, backend = torch.device("cuda", local), "nccl"
        torch.cuda.set_device(device)
    # they meet as torchrun says, unless the lesson's `launch` names a place
    dist.init_process_group(backend, init_method=os.environ.get("INIT_METHOD"))
    return dist.get_rank(), dist.get_world_size(), device


def points() -> tuple[torch.Tensor, torch.Tensor]:
    """240 points of a square and the height of a wave there."""
    x = torch.cartesian_prod(torch.linspace(-1, 1, 16), torch.linspace(-1, 1, 15))
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def note(story: dict, net: nn.Module, output, loss, scaler: torch.amp.GradScaler) -> None:
    """Write down a step: for a lesson only, since each .item() waits for the device."""
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu().clone()
    scale = scaler.get_scale()
    story["weights"].append(weights)
    story["output"].append(str(output.dtype))
    story["loss"].append(loss.item())
    story["finite"].append(all(p.grad.isfinite().all().item() for p in net.parameters()))
    story["skipped"].append(scale < story["scale"][-1])  # a skipped step lowers the scale
    story["scale"].append(scale)


def train(rank, ranks, device, dtype, steps, overflow_step=0, seed=0) -> dict:
    """Train on this rank's share of the points; returns what happened in each step."""
    torch.manual_seed(seed + rank)  # on purpose, each rank draws other weights
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    if dist.is_initialized():  # torchrun started this process
        net = DistributedDataParallel(net)  # new: copies rank 0's weights to all ranks
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    fp16 = dtype == torch.float16
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, enabled=fp16)
    story = defaultdict(list, scale=[scaler.get_scale()])
    for step in range(1, steps + 1):
        x, y = points()  # 240 points, and the height of a wave there
        if step == overflow_step:
            y[239] = math.inf  # the last of 240 points belongs to the last of 2, 3 or 4 ranks
        # new: this rank's share (with a DataLoader: DistributedSampler, set_epoch each epoch)
        x, y = x[rank::ranks].to(device), y[rank::ranks].to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            output = net(x)
            loss = nn.functional.mse_loss(output, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        note(story, net, output, loss, scaler)  # for the lesson's figures
    return dict(story)


def average(state, bucket):
    """A hook that averages in `dtype`, if one is given; torch has a bf16_compress_hook, too."""
    sent, dtype = state
    gradients = bucket.buffer()  # one flat tensor
    message = gradients.to(dtype or gradients.dtype) / dist.get_world_size()
    sent.append(message.nbytes)
    future = dist.all_reduce(message, async_op=True).get_future()  # so backward can go on
    return future.then(lambda done: gradients.copy_(done.value()[0]))  # casts the average back


def accumulate(rank, ranks, device, quiet=True, dtype=None) -> dict:
    """The gradient of four micro-batches, three of them under `no_sync` if `quiet`."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64).to(device)  # 4160 weights and biases
    net = DistributedDataParallel(layer)
    sent = []  # the bytes of each message, as average hands it to the all-reduce
    net.register_comm_hook((sent, dtype), average)  # averages as DDP does, and counts
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)

    def forward_and_backward(batch):
        with torch.autocast(device.type, dtype=torch.float16):
            loss = net(batch).square().mean() / 4
        scaler.scale(loss).backward()

    batches = torch.randn(4, ranks, 16, 64)[:, rank].to(device)  # this rank's share of each
    # Forward runs inside too, because DDP decides there whether backward will send.
    with net.no_sync() if quiet else nullcontext():
        for batch in batches[:3]:
            forward_and_backward(batch)
    forward_and_backward(batches[3])
    return {"sent": sent, "gradient": layer.weight.grad.cpu()}


def refusal() -> str:
    """What DDP says to two device_ids."""
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
        "no_sync": accumulate(*here),
        "no_sync, bfloat16": accumulate(*here, dtype=torch.bfloat16),
        "two devices": refusal(),
    }


def options() -> argparse.Namespace:
    """What stands behind the script's name in the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--overflow-step", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    here = rank, *_ = join(chosen.device)
    saved = experiments(here, chosen.steps, chosen.overflow_step, chosen.seed)
    saved |= {"backend": dist.get_backend()}
    torch.save(saved, f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
