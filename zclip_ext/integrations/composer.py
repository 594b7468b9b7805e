"""ZClip in MosaicML Composer, as an algorithm of its Trainer::

    from zclip_ext.integrations.composer import ZClip

    trainer = Trainer(..., algorithms=[ZClip(z_thresh=2.5)])

In llm-foundry by its YAML alone: ``algorithms: {zclip: {z_thresh: 2.5}}``.
"""

from __future__ import annotations

from typing import Any

try:
    from composer.algorithms import GradientClipping
    from composer.algorithms.sam.sam import SAMOptimizer
    from composer.core import Algorithm, Event, State
    from composer.loggers import Logger
    from composer.utils import dist
except ImportError as error:
    raise ImportError(
        f"zclip_ext.integrations.composer needs Composer: pip install 'zclip-ext[composer]' ({error})"
    ) from error

import torch

from .. import clipper, gradients
from ..config import ZClipConfig
from ..optimizer import ZClipOptimizer
from ..telemetry import warn, warn_of_no_statistics

__all__ = ["ZClip"]

# Where the statistics stand in the state of the algorithm.
_STATE = "zclip_ext"


class ZClip(Algorithm):
    """Clips the gradients of each batch by :class:`zclip_ext.ZClip`.

    It runs on ``Event.AFTER_TRAIN_BATCH``: on the gradients of all microbatches, unscaled, right before the optimizer
    steps. A batch is one sample, also where it is run twice (SAM, another microbatch size after an out-of-memory
    error). Where a step is to be left out, neither weights nor the optimizer's moments change; schedulers and the
    trainer's clock go on. The statistics are saved and loaded with the trainer's checkpoints. All of
    :meth:`zclip_ext.ZClip.metrics` is logged, as ``zclip/grad_norm`` and so on.

    Use it in place of :class:`composer.algorithms.GradientClipping`; ``max_grad_norm`` is its ``clipping_threshold``.

    Args:
        config: a :class:`zclip_ext.ZClipConfig`; or
        options: what :class:`zclip_ext.ZClip` takes by name.

    Attributes:
        zclip: the :class:`zclip_ext.ZClip` at work.
    """

    def __init__(self, config: ZClipConfig | None = None, **options: Any) -> None:
        self.zclip = clipper.ZClip(config, **options)
        # The statistics before the batch at hand, once it has been a sample.
        self._before: dict[str, Any] | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.BATCH_START, Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Called by the trainer.

        Raises:
            ValueError: at ``Event.INIT``, where something else runs ZClip, too.
            NonFiniteGradientError: see :meth:`zclip_ext.ZClip.step`. The optimizer has not stepped.
        """
        if event == Event.INIT:
            _check(state)
        elif event == Event.BATCH_START:
            self._before = None
            _forget_climb(state.optimizers[0])
        elif _is_at_foot(state.optimizers[0]):
            if not self.zclip.config.dry_run and self.zclip.config.on_nonfinite != "pass":
                _make_finite(state.optimizers[0])
        else:
            _climb_down(state.optimizers[0])
            self._clip(state, logger)

    def _clip(self, state: State, logger: Logger) -> None:
        if self._before is None:
            self._before = self.zclip.state_dict()
        else:  # this batch was a sample already, and is run again
            self.zclip.load_state_dict(self._before)
        # Not the model's parameters: those that no optimizer has are never zeroed, so their gradients grow.
        parameters = gradients.held_by(state.optimizers[0])
        result = self.zclip.clip(parameters, state.model)
        if result.left_out:  # the optimizer is in its step already: without gradients it changes nothing
            gradients.discard(parameters)
        logger.log_metrics({f"zclip/{name}": value for name, value in self.zclip.metrics().items()})

    def state_dict(self) -> dict[str, Any]:
        """Composer's own, with the statistics as plain numbers."""
        return {**super().state_dict(), _STATE: self.zclip.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave.

        Raises:
            ValueError: it doesn't fit; nothing was changed.
        """
        if _STATE in state:
            self.zclip.load_state_dict(state[_STATE])
        else:
            warn_of_no_statistics()
            self.zclip.reset()
        self._before = None

    def __repr__(self) -> str:
        return repr(self.zclip)


def _check(state: State) -> None:
    """That nothing else in the run clips by ZClip, or spoils what ZClip sees."""
    count = sum(isinstance(algorithm, ZClip) for algorithm in state.algorithms)
    if count > 1:
        raise ValueError(
            f"algorithms: got {count} of ZClip, allowed is one: each would clip, and checkpoints keep them under "
            "one name"
        )
    if any(isinstance(optimizer, ZClipOptimizer) for optimizer in state.optimizers):
        raise ValueError(
            "algorithms: got ZClip beside a ZClipOptimizer, which clips as well; allowed is one of them. Hand the "
            "optimizer inside it to the Trainer, or leave the algorithm out"
        )
    kinds = [type(algorithm) for algorithm in state.algorithms if isinstance(algorithm, (ZClip, GradientClipping))]
    if len(kinds) > 1 and dist.get_global_rank() == 0:
        instead = "leave GradientClipping out; ZClip(max_grad_norm=...) is its clipping_threshold"
        if issubclass(kinds[-1], GradientClipping):
            warn(
                "algorithms=[ZClip, GradientClipping]: Composer runs them in reverse after a batch, so ZClip sees "
                f"norms that are clipped already, and no spike. Put ZClip last, or better, {instead}"
            )
        else:
            warn(
                "algorithms=[GradientClipping, ZClip]: both clip, ZClip first; its metrics don't know of the second. "
                f"Better {instead}"
            )


# SAM runs a batch twice in a step: at the weights, then at weights that are moved by e(w), uphill along that gradient.
# The gradient at the second place is the one it steps with, so that is ZClip's sample; of the first only the direction
# counts, and it differs by rank. SAM moves back only weights that have a gradient, and ranks are compared by their
# weights, so ZClip moves them back before it clips.


def _is_at_foot(optimizer: torch.optim.Optimizer) -> bool:
    """Whether SAM will climb along the gradients that are there."""
    climbs = isinstance(optimizer, SAMOptimizer) and (optimizer.global_step + 1) % optimizer.interval == 0
    return climbs and not any("e_w" in optimizer.state.get(parameter, {}) for parameter in gradients.held_by(optimizer))


def _make_finite(optimizer: torch.optim.Optimizer) -> None:
    """So that a climb can't carry NaN into the weights."""
    for parameter in gradients.held_by(optimizer):
        if parameter.grad is not None:
            parameter.grad.nan_to_num_(0.0, 0.0, 0.0)


def _climb_down(optimizer: torch.optim.Optimizer) -> None:
    if isinstance(optimizer, SAMOptimizer):
        optimizer.sub_e_w()
        _forget_climb(optimizer)


def _forget_climb(optimizer: torch.optim.Optimizer) -> None:
    """SAM leaves its e(w) behind; what is there from now on tells that the weights are moved."""
    if isinstance(optimizer, SAMOptimizer):
        for parameter in gradients.held_by(optimizer):
            optimizer.state.get(parameter, {}).pop("e_w", None)
