"""Many ranks: what share of each gradient this rank adds to the norm, and the one collective that adds them up.

Every rank adds the sum of squares of what it holds, divided by the number of ranks that hold the same, and an
all-reduce of two float64 over all ranks that train the model gives everyone the same bits, hence the same decision. The
shares come from where the parameters lie, never from a step's gradients: a rank without gradients joins in with 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gradients, ops
from .telemetry import warn

#: A process group for all parameters, or a function that names the group of each (None: this rank alone holds it).
SharedBy: TypeAlias = Any | Callable[[Tensor], Any] | None


@dataclasses.dataclass(frozen=True)
class Share:
    """Gradients on this rank, the parameters that they are of, and how many ranks hold the same."""

    copies: float
    parameters: list[Tensor]
    grads: ops.Gradients


@dataclasses.dataclass
class Bucket:
    """Parameters that lie on the ranks in the same way.

    ``holders`` are the ranks over which a copy or a shard of each is spread, ``split_over`` the groups over which it is
    split, ``copies`` how many of the holders hold the same part.
    """

    holders: tuple[int, ...]
    group: Any
    split_over: tuple[Any, ...]
    on_mesh: bool
    parameters: list[Tensor]

    @property
    def copies(self) -> float:
        return len(self.holders) / math.prod(dist.get_world_size(group) for group in self.split_over)


class Ranks:
    """How the parameters of an optimizer lie on the ranks of a process group.

    Args:
        group: all ranks that train the model; None: the default group.
        shared_by: over which ranks copies or shards of the same parameter are spread. None: all of ``group``.
    """

    def __init__(self, group: Any = None, shared_by: SharedBy = None) -> None:
        self.group = group
        self.shared_by = shared_by
        self._known: list[Tensor] = []
        self._buckets: list[Bucket] = []
        self._has_warned = False

    @staticmethod
    def _are_there() -> bool:
        return dist.is_available() and dist.is_initialized()

    def shares(self, parameters: list[Tensor], model: nn.Module | None) -> list[Share]:
        """This rank's part of the gradients that are there."""
        if not self._are_there():
            return [Share(1.0, parameters, ops.collect(parameters))]
        if not _same(parameters, self._known):
            self._buckets = self._lay_out(parameters, model)
            _check_holders(self._buckets)
            self._known = list(parameters)
        return [Share(bucket.copies, bucket.parameters, _local_gradients(bucket)) for bucket in self._buckets]

    def total(self, sums: Tensor) -> Tensor:
        """Adds up what all ranks have; the same bits on each of them."""
        if not self._are_there() or dist.get_world_size(self.group) == 1:
            return sums
        total = _reduced(sums, self.group, dist.ReduceOp.SUM)
        # Looking would wait for another device than the CPU.
        if total.device.type == "cpu" and not self._has_warned:
            self._compare(sums[0].item(), total[0].item())
        return total

    def _compare(self, part: float, total: float) -> None:
        """Copies of a model have the same gradients on all ranks where these are averaged: all parts are equal."""
        world = dist.get_world_size(self.group)
        copied = all(bucket.copies == world for bucket in self._buckets)
        if copied and math.isfinite(total) and not math.isclose(part * world, total, rel_tol=1e-9):
            self._has_warned = True
            warn(
                "ranks that hold copies of the same parameters have different gradients. ZClip wants gradients that "
                "are final and averaged: is it called within DDP.no_sync(), or before they are reduced?"
            )

    def check_equal(self, values: Tensor, names: Sequence[str]) -> None:
        """Raises on all ranks alike where the values (float64) are not the same bits on each of them.

        Raises:
            RuntimeError: names the ranks that differ from most, and the first field in which they do.
        """
        if not self._are_there():
            return
        bits = values.detach().view(torch.int64).to(_meeting_place(self.group, values.device))
        everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, bits, group=self.group)
        states = [tuple(state.tolist()) for state in everyone]
        usual = max(states, key=states.count)
        odd = [rank for rank, state in enumerate(states) if state != usual]
        if odd:
            field = next(index for index, (a, b) in enumerate(zip(states[odd[0]], usual, strict=True)) if a != b)
            where = names[field] if field < len(names) else "the warm-up samples"
            group: Any = self.group if self.group is not None else dist.group.WORLD
            ranks = ", ".join(str(dist.get_global_rank(group, rank)) for rank in odd)
            raise RuntimeError(f"ZClip's state is not the same on all ranks: rank {ranks} differs from most in {where}")

    def _lay_out(self, parameters: list[Tensor], model: nn.Module | None) -> list[Bucket]:
        flat_shards = _flat_shards(model)
        buckets: dict[Any, Bucket] = {}
        for parameter in {id(p): p for p in parameters}.values():
            on_mesh = gradients.is_dtensor(parameter)
            if on_mesh:
                split_over = _split_of_dtensor(parameter)
            elif getattr(parameter, "_fsdp_flattened", False):
                if id(parameter) not in flat_shards:
                    name = gradients.name_of(parameter, parameters, model)
                    raise RuntimeError(
                        f"{name} is a shard of FSDP, and over which ranks it is split stands in the FSDP module alone: "
                        "hand it in, as ZClipOptimizer(..., model=model) or zclip.step(model)"
                    )
                split_over = flat_shards[id(parameter)]
            else:
                split_over = ()
            group = self._group_of(parameter)
            holders = (dist.get_rank(),) if group is None else tuple(dist.get_process_group_ranks(group))
            key = (holders, tuple(map(_ranks_of, split_over)), on_mesh)
            bucket = buckets.setdefault(key, Bucket(holders, group, split_over, on_mesh, []))
            bucket.parameters.append(parameter)
        # In an order that ranks agree on: their first step reduces over the groups of each.
        return [buckets[key] for key in sorted(buckets)]

    def _group_of(self, parameter: Tensor) -> Any:
        if self.shared_by is None:
            return self.group if self.group is not None else dist.group.WORLD
        return self.shared_by(parameter) if callable(self.shared_by) else self.shared_by

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": [], "_buckets": []}

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group, self.shared_by)  # a process group can't be copied, and need not be


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _local_gradients(bucket: Bucket) -> ops.Gradients:
    """This rank's parts; of a DTensor, brought to its parameter's placements first."""
    if not bucket.on_mesh:
        return ops.collect(bucket.parameters)
    local = []
    for parameter in bucket.parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        placements = parameter.placements  # type: ignore[attr-defined]
        if tuple(grad.placements) != tuple(placements):
            grad = parameter.grad = grad.redistribute(placements=placements)
        part = grad.to_local()
        local.append(part.wait() if hasattr(part, "wait") else part)
    return ops.of(local)


def _split_of_dtensor(parameter: Any) -> tuple[Any, ...]:
    mesh = parameter.device_mesh
    return tuple(mesh.get_group(dim) for dim, place in enumerate(parameter.placements) if not place.is_replicate())


def _flat_shards(model: nn.Module | None) -> dict[int, tuple[Any, ...]]:
    """For each parameter that FSDP1 has flattened, by id: the group over which it is split."""
    if model is None:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel

    shards: dict[int, tuple[Any, ...]] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is not None:
            split_over = (handle.process_group,) if handle.uses_sharded_strategy else ()
            for parameter in (handle.flat_param, *(handle.flat_param._params or ())):
                shards[id(parameter)] = split_over
    return shards


def _check_holders(buckets: list[Bucket]) -> None:
    """Once, at the first step: the ranks that are said to hold a parameter do, as its values tell.

    Raises:
        RuntimeError: they don't; on all ranks of a group that isn't one.
    """
    fingerprints: dict[tuple[int, ...], tuple[Any, Tensor]] = {}
    for bucket in buckets:
        values = [p.to_local() if bucket.on_mesh else p for p in bucket.parameters]  # type: ignore[attr-defined]
        device = values[0].device
        held = torch.stack(
            [
                ops.local_sumsq([value.detach() for value in values], device)[0],
                torch.tensor(sum(value.numel() for value in values), dtype=torch.float64, device=device),
            ]
        )
        for group in bucket.split_over:
            held = _reduced(held, group, dist.ReduceOp.SUM)
        before = fingerprints.get(bucket.holders, (None, torch.zeros_like(held)))[1]
        fingerprints[bucket.holders] = (bucket.group, before.to(device) + held)
    for holders, (group, held) in fingerprints.items():
        if len(holders) == 1:
            continue
        most, least = _reduced(torch.stack([held, -held]), group, dist.ReduceOp.MAX)
        # The order of a sum over ranks may differ between copies.
        if bool(((most + least).abs() > 1e-9 * most.abs()).any()):
            raise RuntimeError(
                f"ranks {', '.join(map(str, holders))} don't hold the same parameters: their values differ. Say over "
                "which ranks copies or shards of one are spread: shared_by=a process group (in a pipeline: the ranks "
                "of this stage), or a function of a parameter that returns its group, or None for one that this rank "
                "alone holds (an expert). Ranks that train models apart: group=a group of each alone"
            )


def _reduced(values: Tensor, group: Any, op: Any) -> Tensor:
    meeting = values.to(_meeting_place(group, values.device), copy=True)
    dist.all_reduce(meeting, op=op, group=group)
    return meeting.to(values.device)


def _meeting_place(group: Any, device: torch.device) -> torch.device:
    """Where the group's backend can reduce: NCCL has nothing for gradients that are offloaded to the CPU."""
    kinds = [part.split(":")[0] for part in dist.get_backend_config(group).split(",")]
    if device.type in kinds:
        return device
    if kinds[0] == "cpu":
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())
