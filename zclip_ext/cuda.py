"""The operations of a step by the extension's CUDA kernels.

Each puts its work on the device's current stream and returns: nothing is copied to the host, nothing is waited for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# What the last thread block of a sum knows itself by: a zero before and after, so one for each stream will do.
_tickets: dict[tuple[int, int], Tensor] = {}


def is_capturing() -> bool:
    """Whether what runs now is recorded into a CUDA graph: it can't come to the host."""
    has_cuda = torch.version.cuda is not None or torch.version.hip is not None
    return has_cuda and torch.cuda.is_current_stream_capturing()


def serves(device: torch.device) -> bool:
    """Whether these operations are for tensors there."""
    return device.type == "cuda"


def device_of(grads: Any) -> torch.device:
    """Where the gradients of a handle are."""
    return torch.device("cpu") if grads.place < 0 else torch.device("cuda", grads.place)


def local_sumsq(kernels: Any, grads: Any, out: Tensor) -> None:
    """See :func:`zclip_ext.ops.local_sumsq`. ``kernels``: the extension; ``grads``: a handle of it."""
    stream = _stream(out.device)
    workspace = torch.empty(kernels.workspace(grads), dtype=torch.float64, device=out.device)
    place = (grads.place, stream)
    ticket = _tickets.get(place)
    if ticket is None or is_capturing():  # a graph has memory of its own
        ticket = torch.zeros(1, dtype=torch.int32, device=out.device)
    try:
        kernels.local_sumsq_cuda(grads, workspace, ticket, out, stream)
    except RuntimeError:
        _tickets.pop(place, None)  # it may have counted some
        raise
    if not is_capturing():
        _tickets[place] = ticket


def decide_(kernels: Any, sums: Tensor, state: Tensor, config: Tensor, record: Tensor, left_out: Tensor | None) -> None:
    """See :func:`zclip_ext.ops.decide_`."""
    kernels.decide_cuda(sums, state, config, record, left_out, state.device.index, _stream(state.device))


def scale_(kernels: Any, grads: Any, scale: Tensor) -> None:
    """See :func:`zclip_ext.ops.scale_`. The kernel reads the scale, and at 1.0 no gradient."""
    kernels.scale_cuda(grads, scale, _stream(scale.device))


def _stream(device: torch.device) -> int:
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream
