"""Any torch optimizer with ZClip in its step."""

from __future__ import annotations

import contextlib
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import checkpoint, gradients, rule
from .clipper import ZClip
from .config import ZClipConfig
from .distributed import SharedBy
from .telemetry import warn_of_no_statistics

_PREFIX = "zclip_"
_UNFLAGGED = contextlib.nullcontext()  # one for all: a step of a small model is short


class ZClipOptimizer(Optimizer):
    """Wraps an optimizer so that each step clips the gradients of its parameters first::

        opt = ZClipOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-3))

    It is a ``torch.optim.Optimizer`` for all that a run does with one: LR schedulers, ``GradScaler``, closures, hooks,
    checkpoints. ``param_groups``, ``state`` and ``defaults`` are the inner optimizer's own. A step that ZClip leaves
    out (not finite, or a spike with ``on_spike="skip"``) does not reach the inner optimizer, and
    :attr:`last_step_skipped` says so; a scheduler may step all the same.

    The statistics are saved as plain numbers under ``zclip_*`` keys of ``param_groups[0]``, which every kind of
    checkpoint keeps. A checkpoint of the inner optimizer alone can be loaded, with fresh statistics; one of this
    wrapper can be loaded into the inner optimizer alone, which ignores the keys. (``torch.distributed.checkpoint.load``
    asks for each key of the live optimizer: to load one of the inner optimizer alone, hand it
    ``planner=DefaultLoadPlanner(allow_partial_load=True)``.)

    Args:
        inner: the optimizer that does the step. One that evaluates a closure several times (LBFGS) is refused.
        model: the module whose parameters the optimizer holds: needed for FSDP1, else for names in errors.
        config: a :class:`ZClipConfig`; or
        group, shared_by: which ranks train the model and hold the same parameters, see :class:`ZClip`.
        options: the config's fields by name.
    """

    # GradScaler asks these of the optimizer it is handed. True, as fused Adam has it, would send scaled gradients here.
    _step_supports_amp_scaling = False
    _step_supports_amp_closure = False

    def __init__(
        self,
        inner: Optimizer,
        *,
        model: nn.Module | None = None,
        config: ZClipConfig | None = None,
        group: Any = None,
        shared_by: SharedBy = None,
        **options: Any,
    ) -> None:
        # Not Optimizer.__init__: it would make groups of its own. What else it sets are the hooks.
        if not isinstance(inner, Optimizer):
            raise TypeError(f"inner: got {type(inner).__name__}, expected a torch.optim.Optimizer")
        if isinstance(inner, ZClipOptimizer):
            raise TypeError("inner: got a ZClipOptimizer, which clips already; expected the optimizer inside it")
        if needs_closure(inner):
            raise TypeError(
                f"inner: {type(inner).__name__} evaluates its closure several times in a step, so a step has no one "
                "gradient to clip; expected an optimizer that steps on the gradients that are there"
            )
        self.inner = inner
        self.model = model
        self.zclip = ZClip(config, group=group, shared_by=shared_by, **options)
        self._optimizer_step_pre_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._optimizer_step_post_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self._publish()

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last :meth:`step` was left out. Waits for the device where that decided it by itself."""
        last = self.zclip.last
        return last is not None and (last.left_out or (last.found_inf is not None and bool(last.found_inf)))

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the closure where there is one, clips, and steps the inner optimizer unless the step is left out.

        Args:
            args, kwargs: the closure (None or left out: none), first or by name; what follows goes to the inner step.

        Returns:
            What the closure returned, else None.

        Raises:
            NonFiniteGradientError: see :meth:`ZClip.step`. The inner optimizer has not stepped.
        """
        arguments: tuple[Any, ...] = (self, *args)
        for hook in self._optimizer_step_pre_hooks.values():
            arguments, kwargs = hook(self, arguments, kwargs) or (arguments, kwargs)
        closure, rest = kwargs.get("closure"), arguments[1:]
        if rest:
            closure, rest = rest[0], rest[1:]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        on_device = heeds_found_inf(self.inner)
        result = self.zclip.clip(gradients.held_by(self.inner), self.model, on_device=on_device)
        if not result.left_out:
            named = {name: value for name, value in kwargs.items() if name != "closure"}
            with _UNFLAGGED if result.found_inf is None else _flagged(self.inner, result.found_inf):
                self.inner.step(*((None, *rest) if rest else ()), **named)
        for hook in self._optimizer_step_post_hooks.values():
            hook(self, arguments, kwargs)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, with the statistics under ``zclip_*`` keys of its first group."""
        self._publish()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave, or a state of the inner optimizer alone, with fresh statistics.

        Raises:
            ValueError: it doesn't fit; nothing was changed.
        """
        groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
        if not groups:
            raise ValueError("state_dict: got no 'param_groups', expected the state of an optimizer")
        saved = {
            key.removeprefix(_PREFIX): value
            for key, value in groups[0].items()
            if isinstance(key, str) and key.startswith(_PREFIX)
        }
        config = self.zclip.config
        numbers = checkpoint.load(saved, config) if saved else rule.new_state(config)
        if not saved:
            warn_of_no_statistics()
        self.inner.load_state_dict(state_dict)
        self.zclip.start_from(numbers)
        self._publish()

    def unwrap(self) -> Optimizer:
        """The inner optimizer, without the statistics in its first group: for a trainer that clips by other means."""
        self._withdraw()
        return self.inner

    def _publish(self) -> None:
        """Puts the statistics where the inner optimizer's checkpoints take them along."""
        self._withdraw()
        state = self.zclip.state_dict()
        self.inner.param_groups[0].update({f"{_PREFIX}{name}": value for name, value in state.items()})

    def _withdraw(self) -> None:
        group = self.inner.param_groups[0]
        for key in [key for key in group if isinstance(key, str) and key.startswith(_PREFIX)]:
            del group[key]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self.inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.inner.defaults = defaults

    # Hooks on the state belong to the object whose state it is.
    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        return self.inner.register_load_state_dict_post_hook(hook, prepend)

    def __getattr__(self, name: str) -> Any:
        # What an inner optimizer has beyond torch's own. Private names are not its to give: unpickling asks for them
        # before there is an inner one, and torch for marks that are true of the inner one only.
        if name.startswith("_") or "inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("inner", "model", "zclip")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    def __repr__(self) -> str:
        return f"ZClipOptimizer({type(self.inner).__name__}, {self.zclip!r})"


def heeds_found_inf(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves a step out where its attribute ``found_inf`` is 1; the same on all ranks.

    Those with ``fused=True`` do, as ``GradScaler`` asks of them. But where fused SGD leaves out the step that makes its
    momentum, it makes it of what memory holds (torch 2.13).
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # What it was made with may have been loaded or added over.
    return all(group.get("fused", True) and not group.get("momentum", 0.0) for group in optimizer.param_groups)


@contextlib.contextmanager
def _flagged(optimizer: Any, found_inf: torch.Tensor) -> Iterator[None]:
    """For the length of a step."""
    optimizer.found_inf = found_inf
    try:
        yield
    finally:
        del optimizer.found_inf


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer evaluates a closure several times in a step, as LBFGS does."""
    parameter = inspect.signature(optimizer.step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
