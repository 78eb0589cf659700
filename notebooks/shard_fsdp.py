"""AMP with FSDP2; on 8 GPUs: torchrun --nproc-per-node 8 shard_fsdp.py --device cuda"""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """Notes each kind of message between the ranks: the dtype of each one."""

    def __init__(self) -> None:
        super().__init__()
        self.messages = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            name = op._opname.strip("_").removesuffix("_base")
            self.messages.setdefault(name, []).append(str(args[0].dtype))
        return op(*args, **(kwargs or {}))


def split(net: nn.Sequential, mesh: DeviceMesh, param_dtype, reduce_dtype=None) -> None:
    """Leave this rank its piece of each weight; the mesh lists the ranks."""
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # Each call makes one group of all weights in its module that no earlier call took. A group
    # is gathered and freed as a whole, so each linear layer gets a call of its own.
    fully_shard(net[0], mesh=mesh, mp_policy=policy)
    fully_shard(net[2], mesh=mesh, mp_policy=policy)
    # The last call makes the whole network the root. Without it, each layer would be a root,
    # whose weights FSDP2 by default keeps whole from forward to backward.
    fully_shard(net, mesh=mesh, mp_policy=policy)


def train_split(rank, ranks, device, steps, overflow_step, seed) -> torch.Tensor:
    """The points of train_ddp.py, in fp16 with FSDP2; returns the whole weights."""
    from train_ddp import points  # the file beside this one

    mesh = init_device_mesh(device.type, (ranks,))  # all ranks, in a row
    torch.manual_seed(seed)  # new: on each rank the same weights, since FSDP2 copies none
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    split(net, mesh, torch.float16, torch.float32)  # new: in place of DDP's wrapper
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)  # of this rank's pieces
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)  # bf16 needs none
    for step in range(1, steps + 1):
        x, y = points()
        if step == overflow_step:
            y[239] = math.inf
        x, y = x[rank::ranks].to(device), y[rank::ranks].to(device)
        optimizer.zero_grad()
        # To accumulate: net.set_requires_gradient_sync(False); True before the last micro-batch
        output = net(x)  # new: without autocast, since the policy casts x and the weights
        loss = nn.functional.mse_loss(output.float(), y)  # new: cast by hand, to float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([weight.full_tensor().detach().flatten() for weight in net.parameters()])


def dtypes(net: nn.Sequential, device: torch.device) -> dict:
    """Where the first layer of a split network has which dtype in a step, without a scaler."""
    weight, seen = net[0].weight, {}

    def look(layer, x, y):
        seen.update(used=str(y.dtype), loss=str(nn.functional.mse_loss(y, y).dtype))

    net[0].register_forward_hook(look)
    seen["kept"] = str(weight.dtype)
    seen["pieces"] = [list(layer.weight.to_local().shape) for layer in (net[0], net[2])]
    with Traffic() as traffic:
        net(torch.ones(4, 2, device=device)).float().square().mean().backward()
    seen |= {"gathers": len(traffic.messages["allgather"])}
    seen |= {name: " ".join(sorted({*dtypes})) for name, dtypes in traffic.messages.items()}
    return seen | {"gradient": str(weight.grad.dtype)}


def overflow_in_one_piece(net: nn.Sequential, device: torch.device, last: bool) -> dict:
    """One fp16 step with an infinity in the last rank's piece of a gradient."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # after fully_shard: of the pieces
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    loss = net(torch.ones(4, 2, device=device)).float().square().mean()
    scaler.scale(loss).backward()
    weight = net[0].weight
    before = weight.to_local().clone()  # this rank's piece
    piece = weight.grad.to_local()
    if last:
        piece[0, 0] = math.inf
    infinities = piece.isinf().sum().item()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    moved = (weight.to_local() - before).abs().max().item()
    return {"infinities": infinities, "moved": moved, "scale": scaler.get_scale()}


def main() -> None:
    from train_ddp import join, options

    chosen = options()
    rank, ranks, device = here = join(chosen.device)
    mesh = init_device_mesh(device.type, (ranks,))

    def new(*policy: torch.dtype) -> nn.Sequential:
        """A split network, the same in each call."""
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
        split(net, mesh, *policy)
        return net

    seen = {"param_dtype alone": dtypes(new(torch.bfloat16), device)}
    seen |= {"both": dtypes(new(torch.bfloat16, torch.float32), device)}
    net = new(torch.float16, torch.float32)
    seen |= {"overflow": overflow_in_one_piece(net, device, rank == ranks - 1)}
    weights = train_split(*here, chosen.steps, chosen.overflow_step, chosen.seed)
    seen |= {"weights": weights.cpu()}
    torch.save(seen, f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
