"""Where each of DeepSpeed's optimizers can be told how to scale its gradients.

All of them but two have ``unscale_and_clip_grads``, called once for each group or sub-group with the global norm, which
divides by the loss scale and by ``max(1, (norm / loss_scale + 1e-6) / clip_grad)``. ZClip stands before it and, for the
length of the call, hands it ``clip_grad`` and a norm of which that comes out as the decision.
"""

from __future__ import annotations

import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)
from torch import Tensor

from ... import gradients
from .step import Step, loss_scale_of

_EPS = 1e-6  # DeepSpeed's


def install(engine: Any, step: Step, *, checks_norms: bool) -> str:
    """Takes over the clipping of an engine, by the kind of its optimizer.

    Args:
        checks_norms: this version of DeepSpeed tells a norm that isn't finite from others.

    Returns:
        What the log calls the path.

    Raises:
        ValueError: a kind of optimizer that is not known; names it.
    """
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    if kind == "BF16_Optimizer":
        _gate(optimizer.optimizer, "step", step)
        if not step.zclip.config.dry_run:
            _take_over_bf16(optimizer, step)
            if not checks_norms:
                _leave_out_what_it_asserts(optimizer, step)
    elif kind in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        _gate(optimizer, "_optimizer_step", step)
        if not step.zclip.config.dry_run:
            _bring_norm_to_host(optimizer)
        _take_over_unscale(optimizer, step, norm_at=1, on_device=True)
        if not checks_norms:
            _look_at_group_norms(optimizer, step)
    elif kind in ("FP16_Optimizer", "FP16_UnfusedOptimizer"):
        _gate(optimizer.optimizer, "step", step)
        _take_over_unscale(optimizer, step, norm_at=1 if kind == "FP16_Optimizer" else 0, on_device=False)
    elif optimizer is engine.basic_optimizer:
        _gate(optimizer, "step", step)
        _take_over_fp32(engine, step)
    else:
        raise ValueError(
            f'the "zclip" block of the DeepSpeed config: got an engine with a {kind}, expected one of '
            "DeepSpeed's ZeRO, bf16 or fp16 optimizers, or fp32 without ZeRO"
        )
    stage = f"ZeRO {int(engine.zero_optimization_stage())}" if engine.zero_optimization() else "no ZeRO"
    return f"{stage}, {kind}" + (", pipeline" if getattr(engine, "pipeline_parallelism", False) else "")


def before_step(engine: Any) -> None:
    """What DeepSpeed leaves out of a step in fp32 without ZeRO where its own clipping is off."""
    if engine.optimizer is not engine.basic_optimizer or engine.gradient_clipping() > 0.0:
        return
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if scaler is not None:
        scaler.unscale_(engine.optimizer)
    engine.clip_fp32_gradients()


def _take_over_unscale(optimizer: Any, step: Step, *, norm_at: int, on_device: bool) -> None:
    original = optimizer.unscale_and_clip_grads

    def unscale_and_clip_grads(*args: Any, **kwargs: Any) -> Any:
        named = "total_norm" in kwargs
        result = step.judge(kwargs["total_norm"] if named else args[norm_at])
        if step.zclip.config.dry_run:
            return original(*args, **kwargs)
        scale = float(result.scale)
        if scale == 1.0 or result.left_out:
            with _clip_grad(optimizer, 0.0):
                return original(*args, **kwargs)
        total_norm: Any = loss_scale_of(optimizer) * (1.0 / scale - _EPS)
        if on_device:  # a number in all but its type; on the CPU reading it waits for nothing
            total_norm = torch.tensor(total_norm, dtype=torch.float64, device="cpu")
        if named:
            kwargs = {**kwargs, "total_norm": total_norm}
        else:
            args = (*args[:norm_at], total_norm, *args[norm_at + 1 :])
        with _clip_grad(optimizer, 1.0):
            return original(*args, **kwargs)

    optimizer.unscale_and_clip_grads = unscale_and_clip_grads


def _bring_norm_to_host(optimizer: Any) -> None:
    """DeepSpeed looks at the norm on the host, once or once for each group, and so does ZClip: one copy serves all."""
    if hasattr(optimizer, "scaled_global_norm"):
        whole = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda *args, **kwargs: _on_host([whole(*args, **kwargs)])[0]
    elif hasattr(optimizer, "_get_norm_groups"):
        parts = optimizer._get_norm_groups
        optimizer._get_norm_groups = lambda: _on_host(parts())


def _on_host(norms: list[Any]) -> list[Any]:
    if all(isinstance(norm, Tensor) for norm in norms):
        return list(torch.stack([norm.reshape(()) for norm in norms]).cpu().unbind())
    return norms


def _look_at_group_norms(optimizer: Any, step: Step) -> None:
    def remembering(original: Callable[..., Any]) -> Callable[..., Any]:
        def remember(*args: Any, **kwargs: Any) -> Any:
            norm = original(*args, **kwargs)
            step.group_norms.append(norm)
            return norm if isinstance(norm, Tensor) else float(norm)  # its -1 is an int, which can't be combined

        return remember

    for name in ("get_grad_norm_direct", "complete_grad_norm_calculation_for_cpu_offload"):
        setattr(optimizer, name, remembering(getattr(optimizer, name)))


def _take_over_bf16(optimizer: Any, step: Step) -> None:
    grads_for_norm, take_step = optimizer.get_grads_for_norm, optimizer.step

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        found = grads_for_norm(for_clipping=for_clipping)
        if not for_clipping:
            return found
        step.judge(optimizer._global_grad_norm)
        step.scale_(found)
        return []  # nothing is left to clip

    @functools.wraps(take_step)
    def step_with_clip_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _clip_grad(self, 1.0):  # at 0 it doesn't ask for the gradients to clip
            return take_step(*args, **kwargs)

    optimizer.get_grads_for_norm = get_grads_for_norm
    optimizer.step = types.MethodType(step_with_clip_grad, optimizer)


def _leave_out_what_it_asserts(optimizer: Any, step: Step) -> None:
    take_step = optimizer.step

    @functools.wraps(take_step)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return take_step(*args, **kwargs)
        except AssertionError:
            norm = float(self._global_grad_norm)
            if norm > 0:
                raise
            step.judge(norm)
            self.overflow = True
            self.clear_hp_grads()
            return None

    optimizer.step = types.MethodType(guarded, optimizer)


def _take_over_fp32(engine: Any, step: Step) -> None:
    """Without ZeRO in fp32 the gradients are plain: ZClip does all of it, as for any torch optimizer.

    DeepSpeed's own norm leaves out all pipeline stages but the first, and takes the mean over the experts' ranks.
    """
    original, group = engine.clip_fp32_gradients, group_of(engine)
    dry_run = step.zclip.config.dry_run

    def clip_fp32_gradients() -> None:
        parameters = gradients.held_by(engine.optimizer)
        if not dry_run and _has_overflown(engine, group):
            engine.optimizer.overflow = True
        else:
            counted, copies = _split(parameters, bwc_tensor_model_parallel_rank(engine.mpu) == 0)
            result = step.decide(lambda: step.zclip.clip(counted, None))
            engine._global_grad_norm = float(result) if bool(result.is_finite) else math.inf
            step.scale_([p.grad for p in copies if p.grad is not None])
        if dry_run and engine.gradient_clipping() > 0.0:
            original()
        if engine.optimizer.overflow:
            gradients.discard(parameters)

    engine.clip_fp32_gradients = clip_fp32_gradients


def _has_overflown(engine: Any, group: Any) -> bool:
    """Whether the scaler of torch_autocast in fp16 found inf, on any rank: it then lowers its scale by itself."""
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    if scaler is None:
        return False
    found = torch.stack(list(scaler._found_inf_per_device(engine.optimizer).values())).amax().to(engine.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item() > 0)


def _split(parameters: list[Tensor], first_in_tensor_parallel: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Those that this rank counts, and copies of what another pipeline stage or tensor-parallel rank counts."""
    counted: list[Tensor] = []
    copies: list[Tensor] = []
    for p in parameters:
        is_copy = getattr(p, "ds_pipe_replicated", False)
        counts = not is_copy and (first_in_tensor_parallel or is_model_parallel_parameter(p))
        (counted if counts else copies).append(p)
    return counted, copies


def _data_parallel_group(engine: Any) -> Any:
    """The ranks over which a parameter that is no expert's is copied."""
    return getattr(engine, "seq_data_parallel_group", None) or engine.data_parallel_group


def group_of(engine: Any) -> Any:
    """All ranks that train this model; None: all there are.

    Raises:
        ValueError: it can't be known.
    """
    data_parallel, mpu = _data_parallel_group(engine), engine.mpu
    parts = bwc_tensor_model_parallel_world_size(mpu) * bwc_pipeline_parallel_world_size(mpu)
    copies, everyone = dist.get_world_size(data_parallel), dist.get_world_size()
    if parts == 1:
        return data_parallel
    if parts * copies == everyone:
        return None
    raise ValueError(
        f'the "zclip" block of the DeepSpeed config: the model is split over {parts} ranks and copied over {copies}, '
        f"but there are {everyone} in all, and DeepSpeed has no group of those that train this one. Start each model "
        "as a job of its own"
    )


def holders(engine: Any) -> Callable[[Tensor], Any]:
    """Over which ranks a parameter is copied: the data-parallel ones, for an expert those that hold the same expert."""
    data_parallel = _data_parallel_group(engine)

    def shared_by(parameter: Tensor) -> Any:
        if is_moe_param(parameter):
            return groups._get_expert_data_parallel_group(parameter.group_name)  # type: ignore[attr-defined]
        return data_parallel

    return shared_by


def _gate(owner: Any, name: str, step: Step) -> None:
    """Nothing steps where ZClip leaves a step out."""
    original = getattr(owner, name)

    @functools.wraps(original)  # with the marks of learning rate schedulers of torch
    def gated(self: Any, *args: Any, **kwargs: Any) -> Any:
        return None if step.left_out else original(*args, **kwargs)

    # A method, since those schedulers look for the function behind it.
    setattr(owner, name, types.MethodType(gated, owner))


@contextlib.contextmanager
def _clip_grad(optimizer: Any, value: float) -> Iterator[None]:
    """A value that stayed would be saved in checkpoints, and would override the config when they are loaded."""
    users, optimizer.clip_grad = optimizer.clip_grad, value
    try:
        yield
    finally:
        optimizer.clip_grad = users
