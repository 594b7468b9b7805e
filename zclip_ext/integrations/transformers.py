"""ZClip in the Trainer of Transformers::

    Trainer(..., args=TrainingArguments(..., max_grad_norm=0.0), callbacks=[ZClipCallback()])

Under DeepSpeed the config does it instead, see :mod:`zclip_ext.integrations.deepspeed`.
"""

from __future__ import annotations

from typing import Any

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError(
        f"zclip_ext.integrations.transformers needs transformers: pip install 'zclip-ext[transformers]' ({error})"
    ) from error

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .. import gradients
from ..clipper import ZClip
from ..config import ZClipConfig
from ..optimizer import ZClipOptimizer
from ..telemetry import warn, warn_of_no_statistics


class ZClipCallback(TrainerCallback, ExportableState):
    """Clips before each optimizer step, on all gradients of a step whatever the accumulation.

    The statistics travel in the Trainer's checkpoints and come back with ``resume_from_checkpoint``. What is logged
    carries the metrics as ``zclip/<key>``; the Trainer's own ``grad_norm`` is the norm before the clip. Reporters that
    stand before this callback have reported already: :meth:`add_to` puts it first.

    Args:
        config: a :class:`ZClipConfig`; or
        options: its fields by name.

    Raises:
        ValueError: at the start of training, where the Trainer runs DeepSpeed, or clips by a :class:`ZClipOptimizer`.
    """

    def __init__(self, config: ZClipConfig | None = None, **options: Any) -> None:
        self.zclip = ZClip(config, **options)

    @classmethod
    def add_to(cls, trainer: Any, config: ZClipConfig | None = None, **options: Any) -> ZClipCallback:
        """Puts a new callback before those that report, so that they see its metrics, and returns it."""
        callback = cls(config, **options)
        trainer.callback_handler.callbacks.insert(0, callback)
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = _inner(kwargs.get("optimizer"))
        if getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None) is not None:
            raise ValueError(
                "ZClipCallback: got a Trainer that runs DeepSpeed, which keeps the gradients to itself. Import "
                'zclip_ext.integrations.deepspeed and put "zclip": {"enabled": true} into the DeepSpeed config instead'
            )
        if isinstance(optimizer, ZClipOptimizer):
            raise ValueError(
                "ZClipCallback: got a ZClipOptimizer beside it, which clips already; leave out one of them"
            )
        if getattr(state, "_zclip", self) is not self:
            raise ValueError("ZClipCallback: got two of them in one Trainer, expected one")
        state._zclip = self
        if args.max_grad_norm and state.is_world_process_zero:
            warn(
                f"max_grad_norm={args.max_grad_norm:g} of TrainingArguments clips before ZClip, which then sees no "
                "norm above it. Set max_grad_norm=0 there; ZClipCallback(max_grad_norm=...) is a fixed limit on top"
            )
        self._start(state)

    def _start(self, state: Any) -> None:
        """Statistics of the checkpoint that is gone on from, else none."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        if isinstance(saved, list):
            raise ValueError(f"ZClipCallback: got {len(saved)} of them in the checkpoint, expected one")
        if saved is not None:
            self.statistics = saved["attributes"]["statistics"]
            return
        if state.global_step and state.is_world_process_zero:
            warn_of_no_statistics()
        self.zclip.reset()

    @torch.no_grad()
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        optimizer = kwargs["optimizer"]
        _unscale(optimizer)
        parameters = gradients.held_by(optimizer)
        if self.zclip.clip(parameters, kwargs.get("model")).left_out:
            gradients.discard(parameters)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:  # evaluation, or the summary at the end
            return
        metrics = {f"zclip/{name}": value for name, value in self.zclip.metrics().items()}
        logs.update(metrics)
        if state.log_history:
            state.log_history[-1].update(metrics)

    @property
    def statistics(self) -> dict[str, Any]:
        """As plain numbers: what checkpoints hold."""
        return self.zclip.state_dict()

    @statistics.setter
    def statistics(self, saved: dict[str, Any]) -> None:
        self.zclip.load_state_dict(saved)

    def state(self) -> dict[str, Any]:
        """What the Trainer saves of this callback."""
        return {"args": self.zclip.config.to_dict(), "attributes": {"statistics": self.statistics}}


def _inner(optimizer: Any) -> Optimizer | None:
    """The optimizer inside Accelerate's."""
    while optimizer is not None and not isinstance(optimizer, ZClipOptimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]


def _unscale(optimizer: Any) -> None:
    """In fp16, where the Trainer hasn't done it: versions before 5 do so only to clip by themselves."""
    scaler, inner = getattr(optimizer, "scaler", None), _inner(optimizer)
    if scaler is not None and scaler._per_optimizer_states[id(inner)]["stage"] is OptState.READY:
        scaler.unscale_(inner)
