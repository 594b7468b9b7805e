"""How the parameters of one rank lie on all ranks, as far as it can tell, and whether what all ranks tell agrees."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import gradients, ops

# Sums over copies of the same values may be taken in another order, and copies in low precision may drift by a bit.
_SAME = 1e-6
_CPU = torch.device("cpu")


@dataclasses.dataclass
class Bucket:
    """Parameters that lie on the ranks in the same way.

    ``holders`` are the ranks over which copies or shards of each are spread, ``split_over`` the groups of ranks over
    which it is split, one for each dimension of a mesh that splits it.
    """

    holders: tuple[int, ...]
    split_over: tuple[tuple[int, ...], ...]
    on_mesh: bool
    parameters: list[Tensor]

    @property
    def copies(self) -> float:
        """How many of the holders hold the same part."""
        return len(self.holders) / math.prod(map(len, self.split_over))


def lay_out(parameters: list[Tensor], model: nn.Module | None, group_of: Callable[[Tensor], Any]) -> list[Bucket]:
    """Reads the layout from the parameters, each once however often it is listed. Asks no other rank.

    Args:
        parameters: of this rank, with or without gradients.
        model: the module that FSDP1 wraps, where it does.
        group_of: the process group over which a parameter is spread; None: this rank alone holds it.

    Raises:
        RuntimeError: a layout that can't be known, or that contradicts ``group_of``; names the parameter.
    """
    flat_shards = _flat_shards(model)
    buckets: dict[Any, Bucket] = {}
    for parameter in {id(p): p for p in parameters}.values():
        if hasattr(parameter, "ds_id") or getattr(parameter, "_hp_mapping", None) is not None:
            raise RuntimeError(
                f"{gradients.name_of(parameter, parameters, model)} belongs to DeepSpeed's ZeRO, which keeps the "
                "gradients to itself: nothing is to be clipped here. Import zclip_ext.integrations.deepspeed before "
                'deepspeed.initialize and put "zclip": {"enabled": true} into the DeepSpeed config'
            )
        on_mesh = gradients.is_dtensor(parameter)
        split_over: tuple[tuple[int, ...], ...] = ()
        if on_mesh:
            split_over = _split_of_dtensor(parameter)
        elif getattr(parameter, "_fsdp_flattened", False):
            if id(parameter) not in flat_shards:
                raise RuntimeError(
                    f"{gradients.name_of(parameter, parameters, model)} is a shard of FSDP, and over which ranks it is "
                    "split stands in the FSDP module alone: hand it in, as ZClipOptimizer(..., model=model) or "
                    "zclip.step(model)"
                )
            split_over = flat_shards[id(parameter)]
        group = group_of(parameter)
        holders = (dist.get_rank(),) if group is None else _ranks_of(group)
        for ranks in split_over:
            if not set(ranks) <= set(holders):
                raise RuntimeError(
                    f"{gradients.name_of(parameter, parameters, model)} is split over ranks {_listed(ranks)}, but "
                    f"shared_by says that it is spread over {_listed(holders)} alone"
                )
        key = (holders, split_over, on_mesh)
        buckets.setdefault(key, Bucket(holders, split_over, on_mesh, [])).parameters.append(parameter)
    return list(buckets.values())


@dataclasses.dataclass(frozen=True)
class Told:
    """What a rank tells the others of a bucket: small, since there may be thousands of ranks. Groups are a digest of
    their ranks and their size.
    """

    holders: tuple[str, int]
    split_over: tuple[tuple[str, int], ...]
    values: tuple[float, float, float]  # sum of squares, elements that are not finite, all elements


def tell(bucket: Bucket) -> Told:
    """Of values that can't be read as they are (quantised, say) only the number counts."""
    local = [p.to_local() if bucket.on_mesh else p.detach() for p in bucket.parameters]  # type: ignore[attr-defined]
    readable = [value for value in local if ops.unreadable(value) is None]
    sumsq, nonfinite = ops.local_sumsq(readable, _CPU).tolist()
    if nonfinite:
        sumsq = ops.local_sumsq([torch.where(v.isfinite(), v, 0) for v in readable], _CPU)[0].item()
    size = float(sum(value.numel() for value in local))
    split_over = tuple(map(_digest, bucket.split_over))
    return Told(_digest(bucket.holders), split_over, (sumsq, nonfinite, size))


def disagreement(told: dict[int, list[Told]]) -> str | None:
    """What is wrong with what all ranks tell, by rank; None where it agrees. All ranks find the same."""
    members: dict[Any, list[tuple[int, Told]]] = {}
    for rank, buckets in told.items():
        for bucket in buckets:
            members.setdefault((bucket.holders, 0, 0, bucket.holders), []).append((rank, bucket))
            for depth, group in enumerate(bucket.split_over):
                key = (bucket.holders, len(bucket.split_over), depth, group)
                members.setdefault(key, []).append((rank, bucket))
    for key, found in members.items():
        size, ranks = key[-1][1], {rank for rank, _ in found}
        if len(ranks) != size:
            return (
                f"{size} ranks are said to hold copies or shards of the same parameters, but only {_listed(ranks)} do"
            )
    wholes: dict[Any, tuple[float, ...]] = {}

    def whole(bucket: Told, depth: int = 0) -> tuple[float, ...]:
        """The values of the whole parameters, from those of all shards."""
        if depth == len(bucket.split_over):
            return bucket.values
        key = (bucket.holders, len(bucket.split_over), depth, bucket.split_over[depth])
        if key not in wholes:
            parts = [whole(part, depth + 1) for _, part in members[key]]
            wholes[key] = tuple(map(math.fsum, zip(*parts, strict=True)))
        return wholes[key]

    first: dict[tuple[str, int], tuple[int, tuple[float, ...]]] = {}
    for rank, buckets in told.items():
        for holders in {bucket.holders for bucket in buckets}:
            parts = [whole(bucket) for bucket in buckets if bucket.holders == holders]
            values = tuple(map(math.fsum, zip(*parts, strict=True)))
            other, known = first.setdefault(holders, (rank, values))
            if not all(math.isclose(a, b, rel_tol=_SAME) for a, b in zip(values, known, strict=True)):
                sizes = f"{known[2]:.0f} and {values[2]:.0f} elements"
                squares = f"sums of squares {known[0]:.9g} and {values[0]:.9g}"
                return f"ranks {other} and {rank} don't hold the same parameters: {sizes}, {squares}"
    return None


def _split_of_dtensor(parameter: Any) -> tuple[tuple[int, ...], ...]:
    mesh = parameter.device_mesh
    placements = enumerate(parameter.placements)
    return tuple(_ranks_of(mesh.get_group(dim)) for dim, place in placements if not place.is_replicate())


def _flat_shards(model: nn.Module | None) -> dict[int, tuple[tuple[int, ...], ...]]:
    """For each parameter that FSDP1 has flattened, by id: the ranks over which it is split."""
    if model is None:
        return {}
    from torch.distributed.fsdp import FullyShardedDataParallel

    shards: dict[int, tuple[tuple[int, ...], ...]] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is not None:
            split_over = (_ranks_of(handle.process_group),) if handle.uses_sharded_strategy else ()
            for parameter in (handle.flat_param, *(handle.flat_param._params or ())):
                shards[id(parameter)] = split_over
    return shards


def _ranks_of(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _digest(ranks: tuple[int, ...]) -> tuple[str, int]:
    return hashlib.sha256(repr(ranks).encode()).hexdigest()[:16], len(ranks)


def _listed(ranks: Any) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:8]))
    return f"{shown}, ..." if len(ranks) > 8 else shown
