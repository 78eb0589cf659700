"""FSDP2 in lesson 13, one rank. Its arguments: the source of `split`, and the device."""

import math
import sys

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


def network(device: torch.device) -> nn.Sequential:
    """A small network with the same weights on all ranks: fully_shard copies none."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)


def dtypes(net: nn.Sequential, device: torch.device) -> dict:
    """Where the first layer of a split network has which dtype in a step, without a scaler."""
    weight, seen = net[0].weight, {}

    def look(layer, x, y):
        seen.update(used=str(y.dtype), loss=str(nn.functional.mse_loss(y, y).dtype))

    net[0].register_forward_hook(look)
    seen["kept"], seen["piece"] = str(weight.dtype), list(weight.to_local().shape)
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
    from train_ddp import join  # the file beside this one

    rank, ranks, device = join(sys.argv[2])
    space = globals() | {"DeviceMesh": DeviceMesh, "fully_shard": fully_shard}
    space |= {"MixedPrecisionPolicy": MixedPrecisionPolicy}
    exec(sys.argv[1], space)
    mesh = init_device_mesh(device.type, (ranks,))  # the ranks that share the weights

    def split(*dtypes: torch.dtype) -> nn.Sequential:
        net = network(device)
        space["split"](net, mesh, *dtypes)
        return net

    last = rank == ranks - 1
    seen = {"param_dtype alone": dtypes(split(torch.bfloat16), device)}
    seen |= {"both": dtypes(split(torch.bfloat16, torch.float32), device)}
    net = split(torch.float16, torch.float32)
    seen |= {"overflow": overflow_in_one_piece(net, device, last)}
    torch.save(seen, f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
