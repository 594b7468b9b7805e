"""The record of one step."""

from __future__ import annotations

from torch import Tensor

from . import rule

_INDEX = {name: index for index, name in enumerate(rule.RECORD_FIELDS)}


class ClipResult:
    """What one step decided. The same fields on every path, as 0-dim tensors where the gradients are: float64 numbers
    and bool flags. Reading one as a number waits for the device; ``float(result)`` is ``grad_norm``.
    """

    __slots__ = ("found_inf", "left_out", "record")

    def __init__(self, record: Tensor, found_inf: Tensor | None = None) -> None:
        self.record = record
        #: Where the host isn't told whether the step is left out: the flag that an optimizer on the device heeds,
        #: float32, shape (), 1.0 where it must not step, else 0.0. None elsewhere.
        self.found_inf = found_inf
        #: True where the optimizer must not step; known on the host, unlike :attr:`skipped`. Never True in a dry run,
        #: nor where there is a :attr:`found_inf`.
        self.left_out = False

    def _field(self, name: str) -> Tensor:
        return self.record[_INDEX[name]]

    @property
    def grad_norm(self) -> Tensor:
        """L2 norm of the whole gradient before clipping; inf or NaN where an element is; 0 without gradients."""
        return self._field("grad_norm")

    @property
    def clipped_norm(self) -> Tensor:
        """L2 norm after clipping."""
        return self._field("grad_norm") * self._field("scale")

    @property
    def threshold(self) -> Tensor:
        """What a spike is scaled down to; inf where the step is none."""
        return self._field("threshold")

    @property
    def spike_level(self) -> Tensor:
        """The norm above which this step counts as a spike; inf during warm-up and where there is no sample."""
        return self._field("spike_level")

    @property
    def z_score(self) -> Tensor:
        """How many spreads the norm lies above the mean; 0 during warm-up and where there is no sample."""
        return self._field("z_score")

    @property
    def scale(self) -> Tensor:
        """What the gradients were multiplied by, in (0, 1]; exactly 1.0 where they were not touched."""
        return self._field("scale")

    @property
    def is_spike(self) -> Tensor:
        """Whether the z-score is above ``z_thresh``."""
        return self._field("is_spike") != 0

    @property
    def is_finite(self) -> Tensor:
        """Whether no element of the gradient is inf or NaN."""
        return self._field("is_finite") != 0

    @property
    def skipped(self) -> Tensor:
        """Whether the step is to be left out: by ``on_nonfinite`` or ``on_spike``."""
        return self.verdict != rule.STEP

    @property
    def verdict(self) -> Tensor:
        """What becomes of the step, as in :mod:`zclip_ext.rule`: 0 it runs, 1 it is left out, 2 an error is raised."""
        return self._field("verdict")

    @property
    def elevated_run(self) -> Tensor:
        """How many steps in a row, up to this one, had a z-score above 1."""
        return self._field("elevated_run")

    def __float__(self) -> float:
        return float(self.grad_norm)

    def item(self) -> float:
        return float(self)

    def __round__(self, digits: int | None = None) -> float:
        return round(float(self), digits)

    def __lt__(self, other: float) -> bool:
        return float(self) < other

    def __le__(self, other: float) -> bool:
        return float(self) <= other

    def __gt__(self, other: float) -> bool:
        return float(self) > other

    def __ge__(self, other: float) -> bool:
        return float(self) >= other

    def __format__(self, spec: str) -> str:
        return format(float(self), spec) if spec else str(self)

    def __repr__(self) -> str:
        values = zip(rule.RECORD_FIELDS, self.record.tolist(), strict=True)
        return f"ClipResult({', '.join(f'{name}={value:g}' for name, value in values)})"
