"""Many ranks: what share of each gradient this rank adds to the norm, and the one collective that adds them up.

Every rank adds the sum of squares of what it holds, divided by the number of ranks that hold the same, and an
all-reduce of two float64 over all ranks that train the model gives everyone the same bits, hence the same decision. The
shares come from where the parameters lie, never from a step's gradients: a rank without gradients joins in with 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import cuda, layout, ops
from .telemetry import warn

#: A process group for all parameters, or a function that names the group of each (None: this rank alone holds it).
SharedBy: TypeAlias = Any | Callable[[Tensor], Any] | None

#: The calls at which ranks compare what they have: at once, and after weights that started alike on all have moved.
CHECKED = (1, 2, 10, 100)


def _are_there() -> bool:
    return dist.is_available() and dist.is_initialized()


def is_first(group: Any = None) -> bool:
    """Whether this rank speaks for all of a group; None: of all there are."""
    return not _are_there() or dist.get_rank(group) <= 0


@dataclasses.dataclass(frozen=True)
class Share:
    """Gradients on this rank, the parameters that they are of, and how many ranks hold the same."""

    copies: float
    parameters: list[Tensor]
    grads: ops.Gradients


class Ranks:
    """How the parameters of an optimizer lie on the ranks of a process group.

    Args:
        group: all ranks that train the model; None: the default group.
        shared_by: over which ranks copies or shards of the same parameter are spread. None: all of ``group``.
    """

    def __init__(self, group: Any = None, shared_by: SharedBy = None) -> None:
        self.group = group
        self.shared_by = shared_by
        self._forget(None)

    def _forget(self, world: Any) -> None:
        self._world = world  # process groups may be made anew within a process
        self._calls = 0
        self._known: list[Tensor] = []
        self._buckets: list[layout.Bucket] = []
        self._has_warned = False

    def shares(self, parameters: list[Tensor], model: nn.Module | None) -> list[Share]:
        """This rank's part of the gradients that are there.

        Raises:
            RuntimeError: the layout can't be known; or, on all ranks alike at the calls of ``CHECKED``, ranks don't
                agree on it.
        """
        if not _are_there():
            return [Share(1.0, parameters, ops.collect(parameters))]
        if self._world is not dist.group.WORLD:
            self._forget(dist.group.WORLD)
        self._calls += 1
        problem = None
        if not _same(parameters, self._known):
            try:
                self._buckets = layout.lay_out(parameters, model, self._group_of)
                self._known = list(parameters)
            except RuntimeError as error:
                problem = str(error)
        # When to check depends on the number of calls alone, the same on all ranks. A CUDA graph can't hold it.
        if self._calls in CHECKED and dist.get_world_size(self.group) > 1 and not cuda.is_capturing():
            self._check(problem)
        elif problem is not None:
            raise RuntimeError(problem)
        return [Share(bucket.copies, bucket.parameters, _local_gradients(bucket)) for bucket in self._buckets]

    def _check(self, problem: str | None) -> None:
        """Each rank tells all others how its parameters lie; all come to the same verdict."""
        mine = (dist.get_rank(), problem, [] if problem else [layout.tell(bucket) for bucket in self._buckets])
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, mine, group=self.group)
        failed = [f"rank {rank}: {text}" for rank, text, _ in everyone if text is not None]
        if failed:
            raise RuntimeError(failed[0])
        wrong = layout.disagreement({rank: told for rank, _, told in everyone})
        if wrong is not None:
            raise RuntimeError(
                f"{wrong}. Hand in all parameters, also those without gradients, and say over which ranks copies or "
                "shards of one are spread: shared_by=a process group (in a pipeline: the ranks of this stage), or a "
                "function of a parameter that returns its group, or None for one that this rank alone holds (an "
                "expert). Ranks that train models apart: group=a group of each alone"
            )

    def total(self, sums: Tensor) -> Tensor:
        """Adds up what all ranks have; the same bits on each of them."""
        if not _are_there() or dist.get_world_size(self.group) == 1:
            return sums
        total = sums.to(_meeting_place(self.group), copy=True)  # the reduction is in place
        dist.all_reduce(total, group=self.group)
        total = total.to(sums.device)
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
        if not _are_there():
            return
        bits = values.detach().view(torch.int64).to(_meeting_place(self.group))
        everyone = [torch.empty_like(bits) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(everyone, bits, group=self.group)
        states = [tuple(state) for state in torch.stack(everyone).tolist()]
        (usual, _), *_ = Counter(states).most_common(1)
        odd = [rank for rank, state in enumerate(states) if state != usual]
        if odd:
            field = next(index for index, (a, b) in enumerate(zip(states[odd[0]], usual, strict=True)) if a != b)
            where = names[field] if field < len(names) else "the warm-up samples"
            group: Any = self.group if self.group is not None else dist.group.WORLD
            ranks = ", ".join(str(dist.get_global_rank(group, rank)) for rank in odd)
            raise RuntimeError(f"ZClip's state is not the same on all ranks: rank {ranks} differs from most in {where}")

    def _group_of(self, parameter: Tensor) -> Any:
        if self.shared_by is None:
            return self.group if self.group is not None else dist.group.WORLD
        return self.shared_by(parameter) if callable(self.shared_by) else self.shared_by

    def __reduce__(self) -> Any:
        if self.group is not None or self.shared_by is not None:
            raise TypeError("a ZClip with group= or shared_by= can't be pickled: a process group lives in its process")
        return Ranks, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return Ranks(self.group, self.shared_by)  # a process group can't be copied, and need not be


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _local_gradients(bucket: layout.Bucket) -> ops.Gradients:
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


def _meeting_place(group: Any) -> torch.device:
    """Where a group's ranks reduce: it depends on the group alone, so that all meet, wherever their gradients are.

    On an accelerator that has a backend of its own (NCCL has nothing for gradients offloaded to the CPU), else the CPU.
    """
    backends = dict(part.split(":") for part in dist.get_backend_config(group).split(","))
    for kind, backend in backends.items():
        if kind != "cpu" and backend not in ("gloo", "mpi"):
            module = torch.get_device_module(kind)
            if module.is_available():
                return torch.device(kind, module.current_device())
    return torch.device("cpu")
