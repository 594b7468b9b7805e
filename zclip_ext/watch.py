"""What the host does about decisions: leaves steps out, warns, raises.

On the CPU at once. Of a device it asks one number a step, or nothing where the optimizer leaves steps out by itself.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from . import cuda, ops, rule, telemetry
from .config import ZClipConfig
from .distributed import is_first
from .result import ClipResult

#: How often the host looks at what it didn't ask for: then it sees the state of the look before.
LOOK_EVERY = 100


def host_waits_for(device: torch.device) -> bool:
    """Whether reading a number from a device waits for all that it has to do."""
    return device.type != "cpu"


class Watch:
    """Follows the steps of one state.

    Args:
        config: of the ZClip.
        state: what it starts from, by name.
    """

    def __init__(self, config: ZClipConfig, state: dict[str, float]) -> None:
        self._caps = telemetry.CapWatch(
            None if config.dry_run else config.max_grad_norm, state["steps"], state["capped"]
        )
        self._config = config
        self._leaves_out = config.may_leave_out
        self._steps = state["steps"]  # the state's, known without asking the device
        self._told = state["skipped"]  # how many of the steps left out the user knows of
        self._late = LateNumbers()

    def before(self, state: Tensor, device: torch.device, *, on_device: bool) -> Tensor | None:
        """Before a step is decided: the flag that tells the device whether to leave it out, None where the host reads.

        Raises:
            RuntimeError: the step is captured into a CUDA graph and can't be.
        """
        if not host_waits_for(device):
            return None
        config = self._config
        on_device = on_device and config.on_nonfinite != "raise"
        if cuda.is_capturing():
            if self._leaves_out and not on_device:
                raise RuntimeError(
                    "ZClip would have to tell the host whether to leave the step out, which a CUDA graph can't. Put an "
                    "optimizer with fused=True and capturable=True into ZClipOptimizer (SGD: without momentum), with "
                    "another on_nonfinite than 'raise'; or choose on_nonfinite='pass' and on_spike='clip'"
                )
            if ops.backend(device) != "compiled":
                raise RuntimeError(
                    "a CUDA graph can't hold a step of ZClip in pure torch: it takes the compiled kernels"
                )
            if state.device != device:
                raise RuntimeError("take a step with ZClip before you capture one: its state is not on the device yet")
        if self._leaves_out and on_device:
            return torch.empty((), dtype=torch.float32, device=device)
        return None

    def after(self, result: ClipResult, state: Tensor, group: Any) -> None:
        """After it is decided, before a gradient is touched: sets ``left_out``, warns and raises.

        Args:
            group: the ranks that decide alike, of which the first warns.
        """
        self._steps += 1
        waits = host_waits_for(state.device)
        if self._leaves_out and result.found_inf is None:
            verdict = result.verdict.item()
            if verdict != rule.STEP:
                self._leave_out(result, rule.fields(state.tolist()), group, stop=verdict == rule.RAISE_ERROR)
        if not waits:
            if self._caps.is_due(self._steps):
                self._caps.look(rule.fields(state.tolist()))
        # Depends on the number of steps alone: all ranks raise at the same.
        elif self._steps % LOOK_EVERY == 0 and not cuda.is_capturing():
            self._look_back(state, group)

    def tell(self, state: dict[str, float], group: Any) -> None:
        """Warns of what a state shows and nobody has been told of."""
        self._caps.look(state)
        before, self._told = self._told, max(self._told, state["skipped"])
        if self._leaves_out and before < self._told and is_first(group):
            telemetry.warn_of_late_skips(int(before), int(self._told))

    def _leave_out(self, result: ClipResult, state: dict[str, float], group: Any, *, stop: bool) -> None:
        result.left_out = True
        self._told = state["skipped"]
        if stop:
            self._raise(state)
        if is_first(group):
            telemetry.warn_of_skip(state["last_grad_norm"], int(state["skipped"]), bool(result.is_spike))

    def _look_back(self, state: Tensor, group: Any) -> None:
        numbers = self._late.look(state)
        if numbers is None:
            return
        then = rule.fields(numbers)
        self.tell(then, group)
        limit = self._config.max_consecutive_skips
        if not self._leaves_out or limit is None or then["consecutive_skips"] <= limit:
            return
        now = rule.fields(state.tolist())  # worth a wait: a run that has recovered goes on
        if now["consecutive_skips"] > limit:
            self._raise(now)

    def _raise(self, state: dict[str, float]) -> NoReturn:
        raise telemetry.NonFiniteGradientError(
            f"the gradient holds inf or NaN (norm {state['last_grad_norm']}) at step {state['steps']:.0f}, steps left "
            f"out in a row: {state['consecutive_skips']:.0f}; on_nonfinite={self._config.on_nonfinite!r}, "
            f"max_consecutive_skips={self._config.max_consecutive_skips}"
        )


class LateNumbers:
    """Numbers that a device changes step by step, as they were at an earlier look: the host doesn't wait for them."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def look(self, numbers: Tensor) -> list[float] | None:
        """The numbers at the last look, None at the first; a copy of those of now sets out.

        The last one has arrived long since where many steps lie between two looks.
        """
        before = None
        if self._copy is None:
            self._copy = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=numbers.is_cuda)
        else:
            if self._arrived is not None:
                self._arrived.synchronize()
            before = self._copy.tolist()
        self._copy.copy_(numbers, non_blocking=numbers.is_cuda)
        self._arrived = torch.cuda.current_stream(numbers.device).record_event() if numbers.is_cuda else None
        return before

    def __reduce__(self) -> Any:
        return LateNumbers, ()  # a copy of a run has looked at nothing yet
