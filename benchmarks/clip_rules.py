"""Ways to clip a gradient, ours and its peers', behind one call, for benchmarks that train with each of them.

Peers do what their papers say, no more: a norm that isn't finite breaks AutoClip, one of 0 in its first steps AdaGC.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import zclip_ext

#: Scales the gradients of the model in place. False: this step is to be left out.
Clip = Callable[[nn.Module], bool]


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def build(rules: Sequence[Mapping[str, Any]]) -> Clip:
    """Several rules one after the other, each ``{"rule": name, **options}`` with a name in ``RULES``; none: no clip."""
    clips = [RULES[rule["rule"]](**{name: value for name, value in rule.items() if name != "rule"}) for rule in rules]

    def clip(model: nn.Module) -> bool:
        takes_step = True
        for one in clips:
            takes_step = one(model) and takes_step
        return takes_step

    return clip


def fixed(max_norm: float, from_step: int = 0, until_step: int | None = None) -> Clip:
    """The norm is at most ``max_norm``, in steps from ``from_step`` up to ``until_step``."""
    step = -1

    def clip(model: nn.Module) -> bool:
        nonlocal step
        step += 1
        if from_step <= step and (until_step is None or step < until_step):
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return True

    return clip


def autoclip(percentile: float) -> Clip:
    """The norm is at most a percentile of all norms so far, this step's among them (arXiv 2007.14469)."""
    history: list[float] = []

    def clip(model: nn.Module) -> bool:
        norm = nn.utils.get_total_norm(gradients_of(model))
        history.append(float(norm))
        limit = float(torch.quantile(torch.tensor(history), percentile / 100))
        nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
        return True

    return clip


def adagc(relative: float, beta: float, start: int, absolute: float) -> Clip:
    """Each parameter's norm is at most ``relative`` times the moving mean of its clipped norms (arXiv 2502.11034).

    Up to step ``start`` the whole norm is at most ``absolute``, and the means begin at the least that was seen.
    """
    means: list[torch.Tensor] = []
    step = 0

    def clip(model: nn.Module) -> bool:
        nonlocal step, means
        step += 1
        gradients = gradients_of(model)
        if step <= start:
            nn.utils.clip_grad_norm_(model.parameters(), absolute)
            norms = torch._foreach_norm(gradients)
            means = [torch.minimum(*pair) for pair in zip(means or norms, norms, strict=True)]
            return True
        norms = torch._foreach_norm(gradients)
        scales = [(relative * mean / (norm + 1e-12)).clamp(max=1.0) for mean, norm in zip(means, norms, strict=True)]
        torch._foreach_mul_(gradients, scales)
        means = [
            beta * mean + (1 - beta) * norm * scale for mean, norm, scale in zip(means, norms, scales, strict=True)
        ]
        return True

    return clip


def zclip(**options: Any) -> Clip:
    """Ours, with these options of ``ZClipConfig``."""
    clipper = zclip_ext.ZClip(**options)

    def clip(model: nn.Module) -> bool:
        return not clipper.step(model).left_out

    return clip


def upstream(**options: Any) -> Clip:
    """The authors' package, PyPI zclip."""
    import zclip as package

    clipper = package.ZClip(**options)

    def clip(model: nn.Module) -> bool:
        clipper.step(model)
        return True

    return clip


RULES: dict[str, Callable[..., Clip]] = {
    "fixed": fixed,
    "autoclip": autoclip,
    "adagc": adagc,
    "zclip": zclip,
    "upstream": upstream,
}
