"""FSDP2 with mixed precision: what train_ddp.py measures on each of its ranks."""

import math
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

POLICIES = {
    "param_dtype alone": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "both": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


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


def sharded(device: torch.device, ranks: int, policy: MixedPrecisionPolicy) -> nn.Module:
    """A small network, of which each rank keeps a piece."""
    torch.manual_seed(0)  # the same weights on all ranks: fully_shard copies none
    net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    mesh = init_device_mesh(device.type, (ranks,))  # the ranks that share the weights
    fully_shard(net[0], mesh=mesh, mp_policy=policy)
    fully_shard(net[2], mesh=mesh, mp_policy=policy)
    root = replace(policy, output_dtype=torch.float32)  # the loss gets float32
    fully_shard(net, mesh=mesh, mp_policy=root)
    return net


def dtypes(device: torch.device, ranks: int, policy: MixedPrecisionPolicy) -> dict:
    """Where the first layer has which dtype, and a loss computed inside the network."""
    net = sharded(device, ranks, policy)
    weight, seen = net[0].weight, {}

    def look(layer, x, y):
        seen.update(used=str(y.dtype), loss=str(nn.functional.mse_loss(y, y).dtype))

    net[0].register_forward_hook(look)
    seen["kept"], seen["piece"] = str(weight.dtype), list(weight.to_local().shape)
    with Traffic() as traffic:
        output = net(torch.ones(4, 2, device=device))
        output.square().mean().backward()
    seen |= {"gathers": len(traffic.messages["allgather"])}
    seen |= {name: " ".join(sorted({*dtypes})) for name, dtypes in traffic.messages.items()}
    return seen | {"output": str(output.dtype), "gradient": str(weight.grad.dtype)}


def overflow_in_one_piece(rank: int, ranks: int, device: torch.device) -> dict:
    """One fp16 step with an infinity in the last rank's piece of a gradient."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    net = sharded(device, ranks, policy)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # after fully_shard: of the pieces
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0)
    loss = net(torch.ones(4, 2, device=device)).square().mean()  # the policy casts to fp16
    scaler.scale(loss).backward()
    weight = net[0].weight
    before = weight.to_local().clone()  # this rank's piece
    piece = weight.grad.to_local()
    if rank == ranks - 1:
        piece[0, 0] = math.inf
    infinities = piece.isinf().sum().item()
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([p.grad for p in net.parameters()])  # as for clipping
    scaler.step(optimizer)
    scaler.update()
    moved = (weight.to_local() - before).abs().max().item()
    seen = {"infinities": infinities, "norm": norm.full_tensor().item()}
    return seen | {"moved": moved, "scale": scaler.get_scale()}


def measure(rank: int, ranks: int, device: torch.device) -> dict:
    """The dtypes under each policy, and the step with an infinity."""
    seen = {name: dtypes(device, ranks, policy) for name, policy in POLICIES.items()}
    return seen | {"overflow": overflow_in_one_piece(rank, ranks, device)}
