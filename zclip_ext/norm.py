"""Sum of squares and scaling in torch ops, on any device: the same sums in the same order as ``csrc/norm_cpu.cpp``.

A tensor is cut, in the order of its memory, into blocks of 64 chunks of 32 rows of 64 elements. The squares of a chunk
are added up row by row in float32 to 64 sums, these are folded in half in float64 down to one; so are chunk sums to
block sums, and these to the total. The result depends on the values and their order alone, not on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

LANES = 64
CHUNK = 32 * LANES
CHUNKS_PER_BLOCK = 64
BLOCK = CHUNK * CHUNKS_PER_BLOCK

# A float32 sum outside this range may have lost squares to underflow or overflow and is taken again in float64.
_SMALLEST_SAFE_SUM = 1e-25
_LARGEST_SAFE_SUM = 1e30
# How many rows, padded to one chunk, or elements are worked on at once: bounds the memory used on the way.
_ROWS_AT_ONCE = 512
_ELEMENTS_AT_ONCE = 8 * BLOCK


def sum_of_squares(tensors: Sequence[Tensor], out: Tensor) -> None:
    """Writes the sum of squares of all elements, and how many of them are inf or NaN.

    Args:
        tensors: strided, dense (no gaps, no overlap), floating-point or complex, all on ``out``'s device.
        out: float64, shape (2,).
    """
    flats = [flat for tensor in tensors if (flat := in_memory_order(tensor)).numel()]
    blocks_before = [0]
    for flat in flats:
        blocks_before.append(blocks_before[-1] + -(-flat.numel() // BLOCK))
    sums = torch.zeros(2, blocks_before[-1], dtype=torch.float64, device=out.device)
    small: dict[torch.dtype, list[int]] = {}
    for index, flat in enumerate(flats):
        if flat.numel() <= CHUNK:
            small.setdefault(flat.dtype, []).append(index)
            continue
        for begin in range(0, flat.numel(), _ELEMENTS_AT_ONCE):
            part = _blocks(flat[begin : begin + _ELEMENTS_AT_ONCE])
            first = blocks_before[index] + begin // BLOCK
            sums[:, first : first + part.shape[1]] = part
    for indices in small.values():
        for begin in range(0, len(indices), _ROWS_AT_ONCE):
            group = indices[begin : begin + _ROWS_AT_ONCE]
            positions = _on_device([blocks_before[index] for index in group], out.device)
            sums[:, positions] = _chunks(_as_rows([flats[index] for index in group]))
    out.copy_(_fold(sums))


def scale_(tensors: Sequence[Tensor], scale: Tensor) -> None:
    """Multiplies all elements by ``scale`` in float64 and rounds them once to float32, then to their dtype.

    Memory that several tensors share is multiplied once.

    Args:
        tensors: as for :func:`sum_of_squares`, changed in place.
        scale: float64, shape (), on the same device. On the CPU nothing is written where it is 1.0.
    """
    if scale.device.type == "cpu" and scale.item() == 1.0:
        return
    for flat in _without_shared_memory([in_memory_order(tensor) for tensor in tensors]):
        for begin in range(0, flat.numel(), _ELEMENTS_AT_ONCE):
            part = flat[begin : begin + _ELEMENTS_AT_ONCE]
            product = part.to(torch.float64) * scale
            part.copy_(product if part.dtype == torch.float64 else product.to(torch.float32))


def in_memory_order(tensor: Tensor) -> Tensor:
    """A 1-D real view of a dense tensor, in the order of its memory."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
    return by_stride(tensor).view(-1)


def by_stride(tensor: Tensor) -> Tensor:
    """A view with the dimensions in the order of their strides: contiguous where the tensor is dense."""
    if tensor.is_contiguous():
        return tensor
    return tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


def _without_shared_memory(flats: list[Tensor]) -> Iterator[Tensor]:
    covered = 0
    for flat in sorted(flats, key=Tensor.data_ptr):
        begin, size = flat.data_ptr(), flat.element_size()
        shared = max(0, -(-(covered - begin) // size))
        covered = max(covered, begin + flat.numel() * size)
        if shared < flat.numel():
            yield flat[shared:]


def _blocks(flat: Tensor) -> Tensor:
    """Sums of the blocks of a flat tensor that starts at the start of a block; shape (2, blocks)."""
    chunks = _chunks(_padded(flat, CHUNK).view(-1, CHUNK))
    return _fold(_padded(chunks, CHUNKS_PER_BLOCK).view(2, -1, CHUNKS_PER_BLOCK))


def _chunks(rows: Tensor) -> Tensor:
    """Sum of squares and not-finite count of each row; shape (2, rows)."""
    if rows.dtype == torch.float64:
        return _careful(rows)
    wide = _padded(rows, LANES).to(torch.float32)
    lanes, *others = (wide * wide).view(len(rows), -1, LANES).unbind(1)
    for squares in others:
        lanes += squares
    sums = _fold(lanes.to(torch.float64))
    out = torch.stack([sums, torch.zeros_like(sums)])
    unsafe = ~((sums >= _SMALLEST_SAFE_SUM) & (sums <= _LARGEST_SAFE_SUM))
    if rows.device.type != "cpu":  # asking whether there is one would wait for the device
        return torch.where(unsafe, _careful(rows), out)
    if unsafe.any():
        out[:, unsafe] = _careful(rows[unsafe])
    return out


def _careful(rows: Tensor) -> Tensor:
    wide = rows.to(torch.float64)
    return torch.stack([_fold(wide * wide), (~wide.isfinite()).sum(dim=-1, dtype=torch.float64)])


def _fold(values: Tensor) -> Tensor:
    """Adds the second half of the last dimension to the first until one is left, and drops it."""
    width = 1
    while width < values.shape[-1]:
        width *= 2
    values = _padded(values, width)
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _padded(values: Tensor, multiple: int) -> Tensor:
    """Zeros behind the last dimension, up to a multiple."""
    missing = -values.shape[-1] % multiple if values.shape[-1] else multiple
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Whole numbers; from pinned memory to a CUDA device, since a copy from elsewhere is waited for."""
    there = torch.tensor(numbers, device="cpu", pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)


def _as_rows(flats: list[Tensor]) -> Tensor:
    """Tensors of at most one chunk as rows, zeros behind each."""
    sizes = _on_device([flat.numel() for flat in flats], flats[0].device).unsqueeze(-1)
    width = max(flat.numel() for flat in flats)
    filled = torch.arange(width, device=flats[0].device) < sizes
    rows = torch.zeros(filled.shape, dtype=flats[0].dtype, device=flats[0].device)
    return rows.masked_scatter_(filled, torch.cat(flats))
