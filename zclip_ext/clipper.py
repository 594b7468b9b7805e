"""The pipeline of a step: gradients, sum of squares, decision, scale. The one place that shows the whole of it."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint, cuda, gradients, ops, rule, telemetry, watch
from .config import ZClipConfig
from .distributed import Ranks, Share, SharedBy
from .result import ClipResult


class ZClip:
    """Adaptive gradient clipping (ZClip, arXiv 2504.02507). Call :meth:`step` between backward and optimizer step::

        zclip = ZClip(z_thresh=2.5)
        loss.backward()
        zclip.step(model)
        optimizer.step()

    :class:`zclip_ext.ZClipOptimizer` does that by itself and keeps the statistics in the optimizer's state.

    On many ranks each adds what it holds, and all get the same norm and decide the same. Where the parameters lie is
    read from them: DTensor (FSDP2, tensor parallel), FSDP1 (which needs the module), replicas (DDP).

    Args:
        config: a :class:`ZClipConfig`; or
        group: process group of all ranks that train the model. None: the default group.
        shared_by: over which ranks copies or shards of the same parameter are spread, where that isn't all of
            ``group``: a process group (in a pipeline: the ranks of this stage), or a function of a parameter that
            returns its group, or None for one that this rank alone holds (an expert). The first steps check it on the
            parameters' values.
        options: the config's fields by name, the authors' ``mode`` included.
    """

    def __init__(
        self,
        config: ZClipConfig | None = None,
        *,
        group: Any = None,
        shared_by: SharedBy = None,
        **options: Any,
    ) -> None:
        if config is not None and not isinstance(config, ZClipConfig):
            raise TypeError(f"config: got {type(config).__name__}, expected a ZClipConfig or options by name")
        if config is not None and options:
            raise TypeError(f"options: got {', '.join(options)} beside a config; give one or the other")
        self.config = config if config is not None else ZClipConfig.from_dict(options)
        self._ranks = Ranks(group, shared_by)
        self._numbers = torch.tensor(rule.config_numbers(self.config), dtype=torch.float64, device="cpu")
        self._warned: set[str] = set()
        self._seen: tuple[Any, ...] | None = None
        self._hooked_versions: int | None = None
        self.start_from(rule.new_state(self.config))

    def start_from(self, numbers: list[float]) -> None:
        """Takes a whole state, as :mod:`zclip_ext.checkpoint` loads it.

        Into the memory that it has: a CUDA graph may write there.
        """
        state = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        before = getattr(self, "_state", state)
        self._state = before.copy_(state) if before.shape == state.shape else state
        self._watch = watch.Watch(self.config, self._fields())
        self.last: ClipResult | None = None

    def step(self, model: gradients.Target) -> ClipResult:
        """Measures the gradients, updates the statistics and, where the norm is an outlier, scales the gradients down.

        Call it once for each step of the optimizer, with all gradients final: after the last backward of an
        accumulation, after unscaling. Where the step is to be left out, all gradients become None, so that
        ``optimizer.step()`` changes nothing.

        Args:
            model: a module, or its parameters. A list spares a walk over the module.

        Raises:
            NonFiniteGradientError: by ``on_nonfinite="raise"``, or past ``max_consecutive_skips``. Nothing was changed.
            TypeError: something else than parameters, or a gradient of an unsupported kind; names it.
        """
        parameters = gradients.parameters_of(model)
        self._check_called_once(_first_with_gradient(parameters))
        result = self.clip(parameters, model if isinstance(model, nn.Module) else None)
        if result.left_out:
            gradients.discard(parameters)
        self._remember(_first_with_gradient(parameters))
        return result

    @torch._disable_dynamo  # type: ignore[attr-defined,untyped-decorator]
    @torch.no_grad()
    def clip(self, parameters: list[Tensor], model: nn.Module | None = None, *, on_device: bool = False) -> ClipResult:
        """:meth:`step` for adapters, which see to it themselves that nothing steps where ``left_out`` is set.

        Args:
            parameters: tensors that may have a ``.grad``.
            model: for FSDP1, and for the names in errors.
            on_device: the caller can leave a step out on the device, by the result's ``found_inf`` where there is one.
                Then the host reads nothing; it warns and raises up to 200 steps late.
        """
        parameters = parameters if isinstance(parameters, list) else list(parameters)
        try:
            shares = self._ranks.shares(parameters, model)
        except (AttributeError, TypeError):
            gradients.check_kinds(parameters)
            raise
        sums = self._ranks.total(self._measure(shares, parameters, model))
        if not any(len(share.grads) for share in shares):
            self._without_gradients(parameters, sums)
        if on_device and watch.host_waits_for(sums.device):
            # A flag on one kind of device, for parameters on another, would have to be waited for.
            on_device = len(set().union(*(ops.kinds_of_device(share.grads) for share in shares))) <= 1
        result = self._decide(sums, on_device=on_device)
        if not self.config.dry_run:
            for share in shares:
                ops.scale_(share.grads, result.scale)
        return result

    def _measure(self, shares: list[Share], parameters: list[Tensor], model: nn.Module | None) -> Tensor:
        """This rank's part of the sum of squares, and its count of elements that are not finite."""
        device = gradients.device_of(parameters)
        parts = []
        for share in shares:
            try:
                part = ops.local_sumsq(share.grads, device)
            except ops.UnsupportedGradientError as error:
                name = gradients.name_of(gradients.owner(share.parameters, error.index), parameters, model)
                raise TypeError(f"gradient of {name}: {error.problem}") from None
            if share.copies != 1:
                part[0] /= torch.full_like(part[0], share.copies)  # CUDA multiplies where it is to divide by a number
            parts.append(part)
        return functools.reduce(torch.add, parts) if parts else torch.zeros(2, dtype=torch.float64, device=device)

    def check_consistency(self) -> None:
        """Proves, with one collective, that all ranks have the same state, bit for bit. All ranks must call it.

        Raises:
            RuntimeError: they don't, on all ranks alike; names the ranks that differ and the field in which they do.
        """
        names = (*rule.CONFIG_FIELDS, *rule.STATE_FIELDS)
        self._ranks.check_equal(torch.cat([self._numbers, self._state]), names)

    def decide(self, grad_norm: float | Tensor) -> ClipResult:
        """The rule alone, for a caller that has the global norm already and scales the gradients itself.

        Args:
            grad_norm: L2 norm of the whole gradient, a number or a tensor of shape (). One that is not finite, or less
                than 0, counts as a gradient that is not finite.

        Returns:
            What :meth:`step` returns: multiply the gradients by ``scale`` unless ``left_out`` is set.

        Raises:
            NonFiniteGradientError: as :meth:`step` does.
            ValueError: a tensor of several numbers.
        """
        norm = torch.as_tensor(grad_norm, dtype=torch.float64).detach()
        if norm.numel() != 1:
            raise ValueError(f"grad_norm: got a tensor of shape {tuple(norm.shape)}, expected one number")
        norm = norm.reshape(())
        return self._decide(torch.stack([norm * norm, (~(norm.isfinite() & (norm >= 0))).to(torch.float64)]))

    def _decide(self, sums: Tensor, *, on_device: bool = False) -> ClipResult:
        found_inf = self._watch.before(self._state, sums.device, on_device=on_device)
        self._state, self._numbers = self._state.to(sums.device), self._numbers.to(sums.device)
        self.last = result = ClipResult(ops.decide_(sums, self._state, self._numbers, found_inf), found_inf)
        self._watch.after(result, self._state, self._ranks.group)
        return result

    def metrics(self) -> dict[str, float]:
        """The state of the run as plain numbers, by one copy from the device.

        ``grad_norm``, ``clipped_norm``, ``threshold`` (inf where the step is no spike), ``z_score`` and ``scale`` are
        the last step's; ``mean`` and ``std`` the moving statistics (``log_space``: the geometric mean, and the std of
        log norms); ``quantile`` the running quantile that limits the next step (0 before the first sample, and without
        ``clip_quantile``); ``steps`` all calls, ``samples`` those with a finite, non-zero norm; ``spikes`` and
        ``capped`` count samples above the z-score and samples that ``max_grad_norm`` limited, ``clipped`` all that were
        scaled down, ``clip_rate`` and ``cap_rate`` are the share of spikes and of capped steps in the samples;
        ``rebaselined`` counts shifts; ``skipped`` the steps that were left out, ``consecutive_skips`` those in a row up
        to now; ``nonfinite`` and ``zero_norm`` the steps that were no samples; ``elevated_run`` how many steps in a row
        had a z-score above 1.
        """
        state = self._fields()
        self._watch.tell(state, self._ranks.group)
        return telemetry.metrics(state, self.config)

    def state_dict(self) -> dict[str, Any]:
        """Statistics and counters as plain numbers; see :mod:`zclip_ext.checkpoint`."""
        return checkpoint.save(self._state.tolist(), self.config)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave. Nothing is changed where it raises.

        Raises:
            ValueError: a field is missing, unknown or impossible; the error names it.
        """
        self.start_from(checkpoint.load(state_dict, self.config))

    def reset(self) -> None:
        """Forgets all statistics and counters; the next step is the first of a warm-up."""
        self.start_from(rule.new_state(self.config))

    def __repr__(self) -> str:
        default = ZClipConfig().to_dict()
        changed = [f"{name}={value!r}" for name, value in self.config.to_dict().items() if value != default[name]]
        return f"ZClip({', '.join(changed)})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None}

    def _fields(self) -> dict[str, float]:
        return rule.fields(self._state.tolist())

    def _without_gradients(self, parameters: list[Tensor], sums: Tensor) -> None:
        # Other ranks may have some. A CUDA graph can't say.
        if cuda.is_capturing() or bool(sums[0] != 0):
            return
        gradients.check_without_gradients(parameters)
        before, self._hooked_versions = self._hooked_versions, gradients.hooked_versions(parameters)
        if before is not None and before != self._hooked_versions:
            raise RuntimeError(
                "parameters change, but have no gradients when ZClip is called, and have post-accumulate-grad hooks: "
                "an optimizer that steps inside backward() frees each gradient before the norm of all is known, and "
                "can't be clipped. Let it step after backward()"
            )
        if parameters:
            self._warn_once("no gradient: was ZClip called before backward(), or after zero_grad()?")

    def _check_called_once(self, parameter: Tensor | None) -> None:
        """The same gradient on unchanged weights: a call for each micro-batch, with partial sums as samples."""
        if self._seen is None or parameter is None:
            return
        before, grad, version = self._seen
        if before() is parameter and grad() is parameter.grad and version == parameter._version:
            self._warn_once(
                "ZClip.step seems to have been called twice before the optimizer stepped. Call it once, after the last "
                "backward of the step: micro-batches that are clipped one by one bend the gradient and spoil the "
                "statistics"
            )

    def _remember(self, parameter: Tensor | None) -> None:
        self._seen = None
        if parameter is not None and parameter.grad is not None:
            self._seen = (weakref.ref(parameter), weakref.ref(parameter.grad), parameter._version)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            telemetry.warn(message)


def _first_with_gradient(parameters: list[Tensor]) -> Tensor | None:
    return next((parameter for parameter in parameters if getattr(parameter, "grad", None) is not None), None)
