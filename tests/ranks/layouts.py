"""The ways to split one model over ranks, each with its gradients as the whole model would have them."""

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks and a head whose first dimension is smaller than the number of ranks."""

    def __init__(self, width=12, hidden=20, out=1):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(2))
        self.head = nn.Linear(width, out)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def whole_batch(step, scale=1.0):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(8, 4, 12, generator=generator) * scale


def loss_of(model, batch):
    return model(batch).square().mean()


def my_part(batch, ranks=None, index=None):
    """This rank's part of the batch; the mean over ranks of the parts' gradients is the whole batch's."""
    ranks = dist.get_world_size() if ranks is None else ranks
    index = dist.get_rank() if index is None else index
    return batch.chunk(ranks)[index]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Layout:
    """A model, how to feed it, and how to read its whole gradients by name."""

    def __init__(self, model, module_for_clip=None, feed=my_part, shared_by=None):
        self.model = model
        self.module = module_for_clip
        self.feed = feed
        self.shared_by = shared_by

    def parameters(self):
        return list(self.model.parameters())

    def gradients(self):
        return {name.replace("module.", ""): full(p.grad) for name, p in self.model.named_parameters()}


class FSDP1Layout(Layout):
    def gradients(self):
        """Flat gradients are gathered by hand: FSDP's own way of showing them knows use_orig_params=True only."""
        whole = {}
        for module in FullyShardedDataParallel.fsdp_modules(self.model):
            handle = module._handle
            flat = handle.flat_param
            local = (
                torch.cat([p.grad.flatten() for p in flat._params if p.grad is not None]) if flat._params else flat.grad
            )
            parts = [local]
            if handle.uses_sharded_strategy:
                parts = gathered(local, handle.process_group)
            values = torch.cat(parts)
            for size, prefix_name in zip(flat._numels, flat._fqns, strict=True):
                prefix = next((n for n, m in self.model.named_modules() if m is module), "")
                name = ".".join(part for part in (prefix, prefix_name) if part).replace("_fsdp_wrapped_module.", "")
                whole[name.replace("_fsdp_wrapped_module", "").strip(".")] = values[:size]
                values = values[size:]
        return whole


def gathered(local, group):
    """Parts of different lengths, from all ranks of a group."""
    parts = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, local, group=group)
    return parts


def ddp():
    return Layout(DistributedDataParallel(Net()))


def fsdp1(strategy, use_orig_params="True", precision="fp32"):
    # On the CPU, which FSDP1 asks torch.cuda about.
    torch.cuda.current_device = lambda: torch.device("cpu")
    mixed = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if precision == "bf16" else None
    groups = None
    if strategy == "HYBRID_SHARD":
        groups = pairs_and_across()
    model = FullyShardedDataParallel(
        Net(),
        process_group=groups,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params == "True",
        mixed_precision=mixed,
        auto_wrap_policy=functools.partial(_is_block),
        device_id=torch.device("cpu"),
    )
    return FSDP1Layout(model, module_for_clip=model)


def _is_block(module, recurse, nonwrapped_numel):
    return recurse or isinstance(module, Block)


def pairs_and_across():
    """The groups (0, 1), (2, 3) and (0, 2), (1, 3), of which this rank's."""
    rank = dist.get_rank()
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return shard, replicate


def fsdp2(kind="1d"):
    world = dist.get_world_size()
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    model = Net()
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if kind == "offload" else {}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return Layout(model)


def tensor_parallel(model, mesh, sequence=False):
    from torch.distributed.tensor import Shard

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def tp():
    # The norms and the head are plain parameters beside DTensors, the same on all ranks.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return Layout(tensor_parallel(Net(), mesh), feed=lambda batch: batch)


class SequenceNet(nn.Module):
    """One norm whose input is split along the sequence: its gradients are partial sums."""

    def __init__(self, net, mesh):
        super().__init__()
        self.blocks, self.head, self.mesh = net.blocks, net.head, mesh

    def forward(self, x):
        from torch.distributed.tensor import Shard

        x = distribute_tensor(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        for block in self.blocks:
            norm = block.norm
            normed = nn.functional.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias)
            hidden = torch.tanh(nn.functional.linear(normed, block.up.weight, block.up.bias))
            x = x + nn.functional.linear(hidden, block.down.weight, block.down.bias)
        return nn.functional.linear(x, self.head.weight, self.head.bias).full_tensor()


def sequence_parallel():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
            setattr(module, name, replicated)
    return Layout(SequenceNet(net, mesh), feed=lambda batch: batch)


def fsdp2_tp():
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(Net(), mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return Layout(model, feed=lambda batch: my_part(batch, 2, mesh["dp"].get_local_rank()))


def mixed():
    """FSDP2 on the blocks; the head stays a plain parameter whose gradient is averaged by hand, as a LoRA's may be."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    for parameter in model.head.parameters():
        parameter.register_hook(average)
    return Layout(model)


def average(gradient):
    gradient = gradient.clone()
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def partial_gradients():
    """Replicated DTensor parameters whose gradients are partial sums that nobody has added up."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()])))
    return PartialLayout(net, mesh)


class PartialLayout(Layout):
    def __init__(self, model, mesh):
        super().__init__(model)
        self.mesh = mesh
        self.plain = Net()

    def backward(self, batch):
        loss = loss_of(self.plain, my_part(batch)) / dist.get_world_size()
        self.plain.zero_grad()
        loss.backward()
        for parameter, plain in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            parameter.grad = DTensor.from_local(plain.grad.clone(), self.mesh, [Partial()], run_check=False)
