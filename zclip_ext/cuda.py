"""The operations of a step by the extension's CUDA kernels.

Each puts its work on the device's current stream and returns: nothing is copied to the host, nothing is waited for.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from ._build import OLDEST_CAPABILITY

# What the last thread block of a sum knows itself by: a zero before and after, so one for each stream will do.
_tickets: dict[tuple[int, int], Tensor] = {}
_one_at_a_time = threading.Lock()  # several launches of one sum must not mix with another thread's on the same stream


def is_capturing() -> bool:
    """Whether what runs now is recorded into a CUDA graph: it can't come to the host."""
    # Where CUDA hasn't been started, asking would start it, or fail for want of a driver.
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return started and torch.cuda.is_current_stream_capturing()


def serves(device: torch.device) -> bool:
    """Whether these operations are for tensors there."""
    return device.type == "cuda" and _is_new_enough(device.index)


def device_of(grads: Any) -> torch.device:
    """Where the gradients of a handle are."""
    return torch.device("cpu") if grads.place < 0 else torch.device("cuda", grads.place)


@functools.cache
def _is_new_enough(device: int | None) -> bool:
    if not torch.cuda.is_available():
        return True  # no card that is too old
    major, _ = torch.cuda.get_device_capability(device)
    return major >= OLDEST_CAPABILITY // 10


def local_sumsq(kernels: Any, grads: Any) -> Tensor:
    """See :func:`zclip_ext.ops.local_sumsq`. ``kernels``: the extension; ``grads``: a handle of it."""
    device, capturing = device_of(grads), is_capturing()
    stream = _stream(device)
    out = torch.empty(2, dtype=torch.float64, device=device)
    workspace = torch.empty(kernels.workspace(grads), dtype=torch.float64, device=device)
    place = (grads.place, stream)
    with _one_at_a_time:
        # One whose launches failed may have counted some, so it is back only after they didn't. A graph has its own.
        ticket = None if capturing else _tickets.pop(place, None)
        if ticket is None:
            ticket = torch.zeros(1, dtype=torch.int32, device=device)
        kernels.local_sumsq_cuda(grads, workspace, ticket, out, stream)
        if not capturing:
            _tickets[place] = ticket
    return out


def decide_(kernels: Any, sums: Tensor, state: Tensor, config: Tensor, record: Tensor, left_out: Tensor | None) -> None:
    """See :func:`zclip_ext.ops.decide_`."""
    kernels.decide_cuda(sums, state, config, record, left_out, state.device.index, _stream(state.device))


def scale_(kernels: Any, grads: Any, scale: Tensor) -> None:
    """See :func:`zclip_ext.ops.scale_`. The kernel reads the scale, and at 1.0 no gradient."""
    device = device_of(grads)
    kernels.scale_cuda(grads, scale.to(device), _stream(device))


def _stream(device: torch.device) -> int:
    stream: int = torch.cuda.current_stream(device).cuda_stream
    return stream
