"""From what a user hands in to the gradients of a step, and names for errors about them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from .telemetry import warn

Target: TypeAlias = nn.Module | Tensor | Iterable[Tensor]


def parameters_of(target: Target) -> list[Tensor]:
    """The parameters of a module, or a list of what was handed in, read once.

    Raises:
        TypeError: ``target`` is neither a module nor parameters.
    """
    if isinstance(target, nn.Module):
        return list(target.parameters())
    if isinstance(target, Tensor):
        return [target]
    try:
        parameters = list(target)
    except TypeError:
        expected = "expected a torch.nn.Module or an iterable of its parameters"
        raise TypeError(f"model: got {type(target).__name__}, {expected}") from None
    if not parameters:
        warn("ZClip was handed no parameters: an empty list, or a generator that was read before")
    return parameters


def held_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of an optimizer. To be read at each step: groups are added and replaced while a run goes on."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def is_dtensor(tensor: Tensor) -> bool:
    """Without importing torch.distributed.tensor, which takes a while, where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def check_kinds(parameters: list[Tensor]) -> None:
    """For the error of a list that can't be read.

    Raises:
        TypeError: something in it is no tensor; names it.
    """
    for index, parameter in enumerate(parameters):
        if not isinstance(parameter, Tensor):
            raise TypeError(f"parameters[{index}]: got {type(parameter).__name__}, expected a torch.nn.Parameter")


def owner(parameters: list[Tensor], index: int) -> Tensor:
    """The parameter that the gradient at ``index`` among those that are there belongs to."""
    return [parameter for parameter in parameters if parameter.grad is not None][index]


def name_of(parameter: Tensor, parameters: list[Tensor], model: nn.Module | None) -> str:
    """How an error calls a parameter: by its name where the model is known, else by its place and shape."""
    if model is not None:
        for name, candidate in model.named_parameters():
            if candidate is parameter:
                return f"parameter {name!r}"
    index = next(i for i, candidate in enumerate(parameters) if candidate is parameter)
    return f"parameter {index} (shape {tuple(parameter.shape)})"


def check_without_gradients(parameters: list[Tensor]) -> None:
    """Tells a step without any gradient from a mistake.

    Raises:
        ValueError: gradients were handed in place of parameters.
    """
    for index, parameter in enumerate(parameters):
        if not parameter.requires_grad and not isinstance(parameter, nn.Parameter):
            raise ValueError(
                f"parameters[{index}]: got a tensor without requires_grad and without .grad; hand in the parameters, "
                "not their gradients"
            )


def hooked_versions(parameters: list[Tensor]) -> int | None:
    """How often parameters with post-accumulate-grad hooks were written to; None where there are none.

    Such a hook may only look at the gradient. One that steps an optimizer inside backward and frees the gradient shows
    in the parameters.
    """
    hooked = [parameter for parameter in parameters if getattr(parameter, "_post_accumulate_grad_hooks", None)]
    return sum(parameter._version for parameter in hooked) if hooked else None


def discard(parameters: Iterable[Tensor]) -> None:
    """Drops all gradients, so that an optimizer that steps next changes neither weights nor moments."""
    for parameter in parameters:
        parameter.grad = None


def device_of(parameters: list[Tensor]) -> torch.device:
    """Where the norm of the gradients is wanted: beside the first of them, else beside the first parameter."""
    with_gradient = (parameter.grad.device for parameter in parameters if parameter.grad is not None)
    return next(with_gradient, parameters[0].device if parameters else torch.device("cpu"))
