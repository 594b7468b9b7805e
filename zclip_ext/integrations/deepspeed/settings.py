"""What a DeepSpeed config says of ZClip, and what ZClip can't work with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from ...config import ZClipConfig
from ...optimizer import ZClipOptimizer
from ...telemetry import warn

KEY = "zclip"
OLDEST = "0.16.9"
#: From here on DeepSpeed itself tells a norm that isn't finite from others.
REFERENCE = "0.19.8"
_MOMENTUM_ONLY = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")


def of_engine(arguments: dict[str, Any]) -> ZClipConfig | None:
    """The ZClip options of an engine in the making, from the arguments of its ``__init__``; None: it has none.

    A :class:`ZClipOptimizer` among them is replaced by the optimizer inside: ZeRO steps it once for each group, on this
    rank's shards. Without a block its options are the engine's.

    Raises:
        ValueError: the block holds something that is not allowed; the error names the key.
    """
    written = getattr(arguments.get("config_class"), "_param_dict", None)
    config = parse(written[KEY]) if isinstance(written, Mapping) and KEY in written else None
    wrapper = arguments.get("optimizer")
    if isinstance(wrapper, ZClipOptimizer):
        source = "its options" if config is None else f'the "{KEY}" block of the config'
        warn(
            "deepspeed.initialize got a ZClipOptimizer: DeepSpeed gets the optimizer inside it, and ZClip works in the "
            f"engine, by {source}"
        )
        config = config if config is not None else wrapper.zclip.config
        arguments["optimizer"] = wrapper.unwrap()
    return config


def parse(block: Any) -> ZClipConfig | None:
    """The options of a ``zclip`` block; None where it says ``"enabled": false``.

    Raises:
        ValueError: it is no object, or a key is unknown or its value not allowed; the error names the key.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'{KEY}: got {block!r}, expected an object such as {{"enabled": true}}')
    options = dict(block)
    for name, value in options.items():
        if isinstance(value, str) and value.lower() == "auto":
            raise ValueError(f'{KEY}.{name}: got "auto", which nothing here can resolve; write a value or leave it out')
    enabled = options.pop("enabled", True)
    if not isinstance(enabled, bool):
        raise ValueError(f"{KEY}.enabled: got {enabled!r}, allowed is true or false")
    try:
        config = ZClipConfig.from_dict(options)
    except ValueError as error:
        raise ValueError(f"{KEY}: {error}") from None
    return config if enabled else None


def check_version(version: str) -> None:
    """Raises RuntimeError where DeepSpeed is too old; warns where its own check of the norm is wrong."""
    if Version(version) < Version(OLDEST):
        raise RuntimeError(
            f"deepspeed: got version {version}, ZClip needs {OLDEST} or later: the places where it reads the norm and "
            "scales the gradients were never tried on older ones"
        )
    if Version(version) < Version(REFERENCE):
        warn(
            f"DeepSpeed {version} takes a gradient norm that isn't finite for 1.0; ZClip looks at the norms of all "
            f"groups itself and leaves such steps out. From {REFERENCE} on DeepSpeed does so, too"
        )


def check_engine(engine: Any) -> None:
    """Raises where an engine is of a kind that ZClip can't work with.

    Raises:
        ValueError: gives the reason and what to do.
    """
    zero, fp16 = engine.zero_optimization(), engine.fp16_enabled()
    problem = None
    if fp16 and not zero:
        problem = (
            "fp16 without ZeRO: DeepSpeed doesn't scale the loss there, so small gradients are lost before any clip. "
            'Use "zero_optimization": {"stage": 1}, or bf16'
        )
    elif not getattr(engine, "zero_compute_grad_norm", lambda: True)():
        problem = (
            '"compute_grad_norm": false, since it leaves out the gradient norm that a step is judged by. Remove it'
        )
    elif _says(engine, "super_offload"):
        problem = (
            "SuperOffload steps while the backward goes on, before the gradient norm is known. Use "
            '"offload_optimizer": {"device": "cpu"} without "super_offload"'
        )
    elif getattr(engine, "zenflow", False):
        problem = (
            "ZenFlow steps parts of the parameters at different times, so a step has no one gradient norm. Remove "
            '"zenflow"'
        )
    elif type(engine.basic_optimizer).__name__ in _MOMENTUM_ONLY:
        problem = (
            f"{type(engine.basic_optimizer).__name__} averages momentum, not gradients, over the ranks, so they have "
            "no common gradient norm. Use AdamW, Lamb or another optimizer of averaged gradients"
        )
    elif engine.has_moe_layers and type(engine.optimizer).__name__ == "FP16_UnfusedOptimizer":
        problem = (
            "experts (MoE) with bf16 but without ZeRO: DeepSpeed leaves the experts out of the gradient norm there. "
            'Use "zero_optimization": {"stage": 1} or 2'
        )
    if problem is not None:
        raise ValueError(f'the "{KEY}" block of the DeepSpeed config: ZClip can\'t work with {problem}')


def superseded(engine: Any) -> str:
    """What ZClip replaces, in words. A ``gradient_clipping`` that the config holds is warned of: nothing heeds it."""
    limit, written = engine.gradient_clipping(), engine._config._param_dict
    if not limit:
        return "nothing: gradient_clipping is 0"
    if "gradient_clipping" not in written:
        return f"DeepSpeed's default gradient_clipping of {limit:g}"
    if engine.global_rank == 0:
        warn(
            f"gradient_clipping={limit:g} in the DeepSpeed config is superseded by ZClip and limits nothing. For a "
            f'fixed limit on top write "{KEY}": {{"max_grad_norm": {limit:g}}}; else leave it out, or set it to 0 '
            "(Transformers writes it from max_grad_norm of TrainingArguments)"
        )
    return f"gradient_clipping={limit:g}"


def _says(engine: Any, name: str) -> bool:
    return bool(getattr(engine, name, lambda: False)())
