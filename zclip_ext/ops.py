"""The three operations of a step, each on all gradients at once: compiled where there is an extension, else torch.

Both give the same bits. Nobody else asks which of them runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from . import _extension, cuda, norm, rule

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)

_compiled: Any = _extension.load()


def backend(device: torch.device | str = "cpu") -> str:
    """``"compiled"`` where the extension's kernels run for gradients on a device, ``"torch"`` where pure torch does.

    On CUDA both adapt without the host; torch reads the gradients several times, and can't be captured into a graph.
    """
    place = torch.device(device)
    has_kernels = _has_cuda() if cuda.serves(place) else _compiled is not None and place.type == "cpu"
    return "compiled" if has_kernels else "torch"


def _has_cuda() -> bool:
    return _compiled is not None and _compiled.cuda


class UnsupportedGradientError(TypeError):
    """A gradient that can't be read. ``index`` is its place in the list that was handed in."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(f"gradient {index}: {problem}")
        self.index = index
        self.problem = problem


# The gradients of a step: a list, or a handle of the extension that spares a Python object for each. Both have len().
Gradients: TypeAlias = Any


def collect(parameters: list[Tensor]) -> Gradients:
    """The gradients that are there, for the other operations."""
    gathered = _gather(parameters, are_parameters=True)
    if gathered is not None:
        return gathered
    return [grad for parameter in parameters if (grad := parameter.grad) is not None]


def of(tensors: list[Tensor]) -> Gradients:
    """Gradients that are at hand already, for the other operations."""
    gathered = _gather(tensors, are_parameters=False)
    return tensors if gathered is None else gathered


def _gather(objects: list[Tensor], *, are_parameters: bool) -> Any:
    """A handle of the extension; None where its kernels can't take what is there as it stands."""
    gathered = _compiled.gather(objects, are_parameters) if _compiled is not None else None
    on_cpu = gathered is None or gathered.place < 0
    return gathered if on_cpu or cuda.serves(cuda.device_of(gathered)) else None


def kinds_of_device(grads: Gradients) -> set[str]:
    """Such as ``{"cuda"}``; more than one where they are partly offloaded."""
    if isinstance(grads, list):
        return {grad.device.type for grad in grads}
    return {cuda.device_of(grads).type} if len(grads) else set()


def local_sumsq(grads: Gradients, device: torch.device) -> Tensor:
    """Sum of squares of all elements, and how many of them are inf or NaN.

    Args:
        grads: from :func:`collect`, or a list of tensors of a dtype in ``DTYPES``, of any shape and strides, or sparse
            COO, on any devices. An element of an expanded gradient counts as often as it stands there, values of a
            sparse one are added up first, and a tensor that is listed twice, as a tied parameter's can be, counts once.
        device: where the result is wanted.

    Returns:
        float64, shape (2,), on ``device``.

    Raises:
        UnsupportedGradientError: a tensor of another kind.
    """
    if not isinstance(grads, list):
        return _sumsq(grads, device)
    readable = {id(grad): _readable(index, grad) for index, grad in enumerate(grads)}
    out = torch.zeros(2, dtype=torch.float64, device=device)
    for place, group in _by_device(readable.values()).items():
        out += _sumsq(of(group), place).to(device)
    return out


def decide_(sums: Tensor, state: Tensor, config: Tensor, left_out: Tensor | None = None) -> Tensor:
    """One step of the rule; see :func:`zclip_ext.rule.decide_`. Changes ``state`` and returns the record.

    Args:
        left_out: float32, shape (), on the same device: becomes 1.0 where the optimizer must not step, else 0.0.
    """
    record = torch.empty(len(rule.RECORD_FIELDS), dtype=torch.float64, device=state.device)
    if _has_cuda() and cuda.serves(state.device):
        cuda.decide_(_compiled, sums, state, config, record, left_out)
        return record
    if state.device.type == "cpu" and _compiled is not None:
        _compiled.decide(sums, state, config, record)
    else:
        rule.decide_(sums, state, config, record)
    if left_out is not None:
        torch.ne(record[rule.RECORD_FIELDS.index("verdict")], rule.STEP, out=left_out)
    return record


def scale_(grads: Gradients, scale: Tensor) -> None:
    """Multiplies all gradients in place by ``scale``; at 1.0 kernels, and pure torch on the CPU, write nothing.

    The product is taken in float64 and rounded once to float32, then to the gradient's dtype. Elements that an expanded
    gradient repeats, and memory that several gradients share, are multiplied once.

    Args:
        grads: as :func:`local_sumsq` takes them.
        scale: float64, shape (), finite and above 0.
    """
    if not isinstance(grads, list):
        _scale(grads, scale)
    elif scale.device.type != "cpu" or scale.item() != 1.0:
        with torch.no_grad():
            _scale_list(grads, scale)


def _scale_list(grads: list[Tensor], scale: Tensor) -> None:
    targets = list({id(grad): _writable(grad) for grad in grads}.values())
    dense = [_dense(target) for target in targets]
    for place, group in _by_device(dense).items():
        _scale(of(group), scale.to(place))
    for target, scaled in zip(targets, dense, strict=True):
        if scaled is not target and not target._is_zerotensor():
            target.copy_(scaled)


def _sumsq(grads: Gradients, device: torch.device) -> Tensor:
    if not len(grads):
        return torch.zeros(2, dtype=torch.float64, device=device)
    if isinstance(grads, list):
        out = torch.empty(2, dtype=torch.float64, device=device)
        norm.sum_of_squares(grads, out)
    elif grads.place < 0:
        out = torch.empty(2, dtype=torch.float64, device="cpu")
        _compiled.local_sumsq(grads, out, torch.get_num_threads())
    else:
        out = cuda.local_sumsq(_compiled, grads)
    return out.to(device)


def _scale(grads: Gradients, scale: Tensor) -> None:
    if not len(grads):  # nor may a number that nobody needs be waited for
        return
    if isinstance(grads, list):
        norm.scale_(grads, scale)
    elif grads.place >= 0:
        cuda.scale_(_compiled, grads, scale)
    elif (factor := scale.item()) != 1.0:
        _compiled.scale(grads, factor, torch.get_num_threads())


def unreadable(tensor: Tensor) -> str | None:
    """Why :func:`local_sumsq` can't take a tensor; None where it can."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        return f"got a {type(tensor).__name__}, expected a plain torch.Tensor"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"got layout {tensor.layout}, expected strided or sparse_coo"
    if tensor.dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"got dtype {tensor.dtype}, expected one of {allowed}"
    if tensor.is_meta:
        return "got a tensor on the meta device, which holds no values"
    return None


def _readable(index: int, grad: Tensor) -> Tensor:
    """The gradient as a dense tensor: itself where it is one, else a copy."""
    problem = unreadable(grad)
    if problem is not None:
        raise UnsupportedGradientError(index, problem)
    return _dense(grad.coalesce().values() if grad.layout == torch.sparse_coo else grad)


def _writable(grad: Tensor) -> Tensor:
    """A view of the gradient's memory that holds each place once: scaling it scales the gradient."""
    if grad.layout == torch.sparse_coo:
        return grad._values()  # also of an uncoalesced gradient: its sum scales with its terms
    for dim in range(grad.dim()):
        if grad.stride(dim) == 0 and grad.shape[dim] > 1:
            grad = grad.narrow(dim, 0, 1)
    return grad


def _dense(tensor: Tensor) -> Tensor:
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor if norm.by_stride(tensor).is_contiguous() else tensor.contiguous()


def _by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return groups
