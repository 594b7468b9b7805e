"""ZClip in Lightning, by a callback::

    from zclip_ext.integrations.lightning import ZClipCallback

    Trainer(callbacks=[ZClipCallback(z_thresh=2.5)])

It takes the place of the authors' ``zclip.ZClipLightningCallback``, whose arguments it understands.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from .. import gradients
from ..clipper import ZClip
from ..config import ZClipConfig
from ..optimizer import ZClipOptimizer, needs_closure
from ..telemetry import warn, warn_of_no_statistics

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def _import_lightning() -> Any:
    """Of its two names the one that the script uses: a trainer of one takes no callback of the other."""
    reason: ImportError | None = None
    for name in sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = reason or error
    raise ImportError(
        f"zclip_ext.integrations.lightning needs lightning: pip install 'zclip-ext[lightning]' ({reason})"
    ) from reason


_lightning = _import_lightning()
_Callback: Any = _lightning.Callback


class ZClipCallback(_Callback):
    """Clips the gradients of each optimizer before it steps, in automatic and in manual optimization.

    One sample a step of the optimizer, of gradients that are final: accumulated, averaged over the ranks, unscaled.
    Each optimizer has a :class:`zclip_ext.ZClip` of its own, in ``zclips``, in the order of ``trainer.optimizers``.
    Their metrics are logged as ``zclip/<key>`` (``zclip_0/<key>``, ``zclip_1/<key>`` where there are several) at the
    steps at which the trainer logs; their statistics are in its checkpoints. A fit from step 0 starts with fresh ones.

    A step whose loss scale (``precision="16-mixed"``) was too large is left out by the scaler, and is no sample.

    Args:
        config: a :class:`zclip_ext.ZClipConfig`; or
        options: its fields by name, the authors' ``mode`` included.
    """

    def __init__(self, config: ZClipConfig | None = None, **options: Any) -> None:
        self.config = ZClip(config, **options).config
        self.zclips: list[ZClip] = []
        self._has_loaded = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raises ValueError where something else takes the gradients, or clips them as well."""
        if stage != "fit":
            return
        if any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__):
            raise ValueError(
                "strategy: got DeepSpeed, which keeps the gradients to itself, so a callback can't clip them. Take "
                "ZClipCallback out, import zclip_ext.integrations.deepspeed, and put the options into DeepSpeed's "
                'config: DeepSpeedStrategy(config={..., "zclip": {"enabled": true}})'
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        others = [type(other).__name__ for other in callbacks if other is not self and _clips(other)]
        if others:
            raise ValueError(f"callbacks: got {others[0]} beside {type(self).__name__}, allowed is one that clips")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at the optimizers, which are there by now.

        Raises:
            ValueError: one that clips by itself, or that has no one gradient in a step.
        """
        for index, optimizer in enumerate(trainer.optimizers):
            if isinstance(optimizer, ZClipOptimizer):
                raise ValueError(
                    f"optimizers[{index}]: got a ZClipOptimizer beside {type(self).__name__}, and each would clip. "
                    "Take one of them out"
                )
            if needs_closure(optimizer):
                raise ValueError(
                    f"optimizers[{index}]: got {type(optimizer).__name__}, which evaluates its closure several times "
                    "in a step, so a step has no one gradient to clip; expected an optimizer that steps on the "
                    "gradients that are there"
                )
        if trainer.is_global_zero:
            _warn_of_second_clip(trainer, pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settles whose statistics the fit goes on with, now that any checkpoint has been loaded.

        Raises:
            ValueError: the checkpoint is of another number of optimizers.
        """
        count, held = len(trainer.optimizers), len(self.zclips)
        if self._has_loaded and held != count:
            raise ValueError(
                f"checkpoint: got ZClip statistics of {held} optimizer(s), but {type(pl_module).__name__} has {count}"
            )
        resumes = trainer.ckpt_path is not None
        if resumes and not self._has_loaded and trainer.is_global_zero:
            warn_of_no_statistics()
        if not self._has_loaded and (resumes or held != count or trainer.global_step == 0):
            self.zclips = [ZClip(self.config) for _ in range(count)]
        self._has_loaded = False

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Clips; where the step is to be left out the gradients become None, so that it changes nothing.

        Raises:
            NonFiniteGradientError: see :meth:`zclip_ext.ZClip.step`. Nothing was changed.
        """
        index = next(place for place, other in enumerate(trainer.optimizers) if other is optimizer)
        parameters = gradients.held_by(optimizer)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and _has_overflowed(scaler, optimizer):
            return
        zclip = self.zclips[index]
        # The model as the strategy has wrapped it: FSDP keeps in the outermost module how its parameters lie.
        result = zclip.clip(parameters, trainer.model)
        if result.left_out:
            gradients.discard(parameters)
        if trainer._logger_connector.should_update_logs and not trainer.barebones:  # it costs milliseconds
            prefix = "zclip" if len(self.zclips) == 1 else f"zclip_{index}"
            pl_module.log_dict({f"{prefix}/{name}": value for name, value in zclip.metrics().items()})

    def state_dict(self) -> dict[str, Any]:
        """The statistics of each optimizer as plain numbers."""
        return {"optimizers": [zclip.state_dict() for zclip in self.zclips]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave. Nothing is changed where it raises.

        Raises:
            ValueError: a field is missing, unknown or impossible; the error names it.
        """
        saved = state_dict.get("optimizers")
        if not isinstance(saved, list):
            raise ValueError(f"state_dict['optimizers']: got {type(saved).__name__}, expected a list")
        zclips = [ZClip(self.config) for _ in saved]
        for zclip, state in zip(zclips, saved, strict=True):
            zclip.load_state_dict(state)
        self.zclips, self._has_loaded = zclips, True

    def __repr__(self) -> str:
        return repr(ZClip(self.config)).replace("ZClip", type(self).__name__, 1)


#: The name of the authors' callback.
ZClipLightningCallback = ZClipCallback


def _clips(callback: Any) -> bool:
    return isinstance(callback, ZClipCallback) or type(callback).__name__ == "ZClipLightningCallback"


def _warn_of_second_clip(trainer: Trainer, pl_module: LightningModule) -> None:
    """Lightning clips after the callbacks; in manual optimization it refuses to."""
    limit = trainer.gradient_clip_val
    if limit:
        warn(
            f"Trainer(gradient_clip_val={limit!r}): Lightning clips to it what ZClip has clipped already. Leave it "
            "out; for a fixed limit on top, ZClipCallback(max_grad_norm=...)"
        )
    elif (
        pl_module.automatic_optimization
        and type(pl_module).configure_gradient_clipping is not _lightning.LightningModule.configure_gradient_clipping
    ):
        warn(
            f"{type(pl_module).__name__}.configure_gradient_clipping runs after ZClip, and may clip what ZClip has "
            "clipped already. Leave it out"
        )


def _has_overflowed(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether the scaler will leave the step out. Lightning has unscaled the gradients, but not those of an optimizer
    that does so in its step (fused Adam): they are unscaled here, as torch allows.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        scaler.unscale_(optimizer)
    return any(bool(found) for found in scaler._found_inf_per_device(optimizer).values())
