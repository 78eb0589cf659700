"""Exercise 2 of lesson 13: one rank. Its argument is the source of your `train_rank`."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from train_ddp import join  # the file beside this one

messages = []  # the number of gradients in each


class Counted(DistributedDataParallel):
    """DDP that notes each message, and sends it as DDP does."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, self.note)

    def note(self, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        messages.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)


def main() -> None:
    rank, ranks, _ = join("cpu")
    space = globals() | {"DistributedDataParallel": Counted}
    exec(sys.argv[1], space)
    generator = torch.Generator().manual_seed(1)
    x, y = (size * torch.randn(8, n, generator=generator) for size, n in ((1, 4), (3, 1)))
    torch.manual_seed(rank)  # other weights on each rank
    net, outputs, gradients, left = nn.Linear(4, 1), [], [], []
    net.register_forward_hook(lambda _, x, y: outputs.append((len(y), str(y.dtype))))

    def look(gradient: torch.Tensor) -> None:
        gradients.append(gradient.abs().max().item())
        left.append(0 if net.weight.grad is None else net.weight.grad.abs().max().item())

    net.weight.register_hook(look)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024)
    space["train_rank"](net, optimizer, scaler, x, y, rank, ranks)
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    seen = {"x": x, "y": y, "weights": weights, "outputs": outputs}
    seen |= {"gradients": gradients, "left": left, "messages": messages}
    torch.save(seen, f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
