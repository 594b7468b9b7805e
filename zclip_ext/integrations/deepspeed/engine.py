"""What ZClip puts around the steps, checkpoints and metrics of a DeepSpeed engine."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from typing import Any

import deepspeed
import torch
from deepspeed.utils import log_dist

from ...clipper import ZClip
from ...config import ZClipConfig
from ...distributed import CHECKED
from ...telemetry import warn_of_no_statistics
from . import paths, settings
from .step import Step

#: Where the statistics stand in the client state of a checkpoint.
CLIENT_STATE = "zclip_ext"


def install(engine: Any, config: ZClipConfig) -> None:
    """Puts ZClip into an engine, as ``engine.zclip``. An engine without an optimizer is left as it is.

    Raises:
        ValueError: a kind of engine that ZClip can't work with; gives the reason and what to do.
    """
    if engine.optimizer is None or type(engine.optimizer).__name__ in ("DummyOptim", "DeepSpeedZeRoOffload"):
        _say("ZClip: the engine has no optimizer, so there is nothing to clip")
        return
    settings.check_engine(engine, deepspeed.__version__)
    zclip = ZClip(config, group=paths.group_of(engine), shared_by=paths.holders(engine))
    step = Step(zclip, engine.optimizer)
    path = paths.install(engine, step, checks_norms=settings.checks_norms(deepspeed.__version__))
    engine.zclip = zclip
    if not config.dry_run:
        settings.warn_of_limit(engine)
    _around_step(engine, step)
    _around_save(engine, zclip)
    _around_load(engine, zclip)
    if config.dry_run:
        _say(f"ZClip only watches ({path}): {zclip!r}")
    else:
        _say(f"ZClip clips ({path}): {zclip!r}; supersedes {settings.superseded(engine)}")


def _say(line: str) -> None:
    log_dist(line, ranks=[0], level=logging.WARNING)  # of what is less DeepSpeed shows nothing


def _around_step(engine: Any, step: Step) -> None:
    original = engine._take_model_step
    taken = 0

    @functools.wraps(original)
    def _take_model_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal taken
        step.begin()
        paths.before_step(engine)
        outcome = original(*args, **kwargs)
        taken += 1
        _give_norm_back(engine)
        _close(engine, step)
        step.end()
        if taken in CHECKED:
            step.zclip.check_consistency()
        if engine.monitor.enabled and engine.global_rank == 0:
            events = step.zclip.metrics().items()
            engine.monitor.write_events([(f"Train/Samples/zclip_{k}", v, engine.global_samples) for k, v in events])
        return outcome

    engine._take_model_step = _take_model_step


def _give_norm_back(engine: Any) -> None:
    """``get_global_grad_norm()`` stays what it is without ZClip: on the device."""
    norm = getattr(engine.optimizer, "_global_grad_norm", None)
    if isinstance(norm, torch.Tensor):
        norm = norm.to(engine.device, non_blocking=True)
        engine.optimizer._global_grad_norm = engine._global_grad_norm = norm


def _close(engine: Any, step: Step) -> None:
    """A step that ended before ZClip was asked."""
    if step.result is not None:
        return
    if engine.optimizer.overflow:
        # What a loss scale that seeks its place runs into is no news of the gradient.
        seeks = engine.fp16_enabled() and engine.dynamic_loss_scale()
        if not seeks and getattr(engine, "torch_autocast_z0_gradscaler", None) is None:
            step.judge(math.nan)
    elif step.zclip.config.dry_run and engine.get_global_grad_norm() is not None:
        step.judge(float(engine.get_global_grad_norm()) * step.loss_scale)
    else:
        step.warn_of_no_question(deepspeed.__version__)


def _around_save(engine: Any, zclip: ZClip) -> None:
    original = engine.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(
        save_dir: Any, tag: Any = None, client_state: dict[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        client_state = {**(client_state or {}), CLIENT_STATE: zclip.state_dict()}
        return original(save_dir, tag, client_state, *args, **kwargs)

    engine.save_checkpoint = save_checkpoint


def _around_load(engine: Any, zclip: ZClip) -> None:
    original = engine.load_checkpoint
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        path, client_state = original(*args, **kwargs)
        arguments = signature.bind(*args, **kwargs)
        arguments.apply_defaults()
        wanted = arguments.arguments
        saved = (client_state or {}).pop(CLIENT_STATE, None)
        if path is None or wanted.get("load_module_only") or not wanted.get("load_optimizer_states", True):
            return path, client_state
        if saved is None:
            if engine.global_rank == 0:
                warn_of_no_statistics()
            zclip.reset()
        else:
            zclip.load_state_dict(saved)
        return path, client_state

    engine.load_checkpoint = load_checkpoint
