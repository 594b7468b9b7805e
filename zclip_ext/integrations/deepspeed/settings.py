"""What a DeepSpeed config says of ZClip, and what ZClip can't work with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from ...config import ZClipConfig
from ...distributed import is_first
from ...optimizer import ZClipOptimizer
from ...telemetry import warn

KEY = "zclip"
OLDEST = "0.16.9"
#: From here on DeepSpeed itself tells a norm that isn't finite from others.
REFERENCE = "0.19.8"
_MOMENTUM_ONLY = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")


def of_engine(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[ZClipConfig | None, tuple[Any, ...], dict[str, Any]]:
    """The ZClip options of an engine in the making, from the arguments of its ``__init__``; None: it has none.

    A :class:`ZClipOptimizer` among the arguments is replaced by the optimizer inside: ZeRO steps it once for each
    group, on this rank's shards. Without a block its options are the engine's.

    Returns:
        The options, and the arguments to go on with.

    Raises:
        ValueError: the block holds something that is not allowed; the error names the key.
    """
    given = [*args, *kwargs.values()]
    written = next((one._param_dict for one in given if hasattr(one, "_param_dict")), None) or {}
    config = parse(written[KEY]) if KEY in written else None
    for wrapper in (one for one in given if isinstance(one, ZClipOptimizer)):
        if KEY not in written:
            config = wrapper.zclip.config
        if is_first():
            source = f'the "{KEY}" block of the config' if KEY in written else "its options"
            warn(
                "deepspeed.initialize got a ZClipOptimizer: DeepSpeed gets the optimizer inside it, and what ZClip "
                f"does in the engine is told by {source}"
            )
        inner = wrapper.unwrap()
        args = tuple(inner if one is wrapper else one for one in args)
        kwargs = {name: inner if one is wrapper else one for name, one in kwargs.items()}
    return config, args, kwargs


def is_on(written: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed config asks for ZClip."""
    try:
        return KEY in written and parse(written[KEY]) is not None
    except ValueError:
        return True


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


def checks_norms(version: str) -> bool:
    """Whether a version of DeepSpeed tells a norm that isn't finite from others."""
    return Version(version) >= Version(REFERENCE)


def check_version(version: str) -> None:
    """Raises RuntimeError where DeepSpeed is too old; warns where its own check of the norm is wrong."""
    if Version(version) < Version(OLDEST):
        raise RuntimeError(
            f"deepspeed: got version {version}, ZClip needs {OLDEST} or later: the places where it reads the norm and "
            "scales the gradients were never tried on older ones"
        )
    if not checks_norms(version) and is_first():
        warn(
            f"DeepSpeed {version} takes a gradient norm that isn't finite for 1.0; ZClip looks at the norms of all "
            f"groups itself and leaves such steps out. From {REFERENCE} on DeepSpeed does so, too"
        )


def check_optimizer(engine: Any) -> None:
    """Raises ValueError where a wrapper came in by a way on which it can't be unwrapped."""
    if isinstance(getattr(engine, "basic_optimizer", None), ZClipOptimizer):
        raise ValueError(
            "optimizer: got a function that makes a ZClipOptimizer, expected one that makes the optimizer inside it: "
            f'DeepSpeed steps it once for each group, on this rank\'s shards. Put "{KEY}" into the DeepSpeed config'
        )


def check_engine(engine: Any, version: str) -> None:
    """Raises where an engine is of a kind that ZClip can't work with.

    Args:
        version: of DeepSpeed.

    Raises:
        ValueError: gives the reason and what to do.
    """
    zero, fp16 = engine.zero_optimization(), engine.fp16_enabled()
    optimizer, basic = type(engine.optimizer).__name__, type(engine.basic_optimizer).__name__
    of_experts = ("FP16_UnfusedOptimizer",) if checks_norms(version) else ("FP16_UnfusedOptimizer", "FP16_Optimizer")
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
    elif getattr(engine, "super_offload", lambda: False)():
        problem = (
            "SuperOffload steps while the backward goes on, before the gradient norm is known. Use "
            '"offload_optimizer": {"device": "cpu"} without "super_offload"'
        )
    elif getattr(engine, "zenflow", False):
        problem = (
            "ZenFlow steps parts of the parameters at different times, so a step has no one gradient norm. Remove "
            '"zenflow"'
        )
    elif basic in _MOMENTUM_ONLY:
        problem = (
            f"{basic} averages momentum, not gradients, over the ranks, so they have no common gradient norm. Use "
            "AdamW, Lamb or another optimizer of averaged gradients"
        )
    elif basic == "MuonWithAuxAdam" and optimizer.startswith("DeepSpeedZeroOptimizer"):
        problem = (
            "Muon on ZeRO: DeepSpeed takes the norm there after the update was made orthogonal, which hides every "
            'spike. Use bf16 on ZeRO 1 with "data_types": {"grad_accum_dtype": "fp32"}'
        )
    elif engine.has_moe_layers and optimizer in of_experts:
        problem = (
            "experts (MoE) with bf16 but without ZeRO: DeepSpeed leaves the experts out of the gradient norm there. "
            'Use "zero_optimization": {"stage": 1} or 2'
        )
    if problem is not None:
        raise ValueError(f'the "{KEY}" block of the DeepSpeed config: ZClip can\'t work with {problem}')


def superseded(engine: Any) -> str:
    """What ZClip replaces, in words."""
    limit = engine.gradient_clipping()
    if not limit:
        return "nothing: gradient_clipping is 0"
    is_default = "gradient_clipping" not in engine._config._param_dict
    return f"DeepSpeed's default gradient_clipping of {limit:g}" if is_default else f"gradient_clipping={limit:g}"


def warn_of_limit(engine: Any) -> None:
    """Of a ``gradient_clipping`` that the config holds, and that nothing heeds."""
    limit = engine.gradient_clipping()
    if limit and "gradient_clipping" in engine._config._param_dict and is_first():
        warn(
            f"gradient_clipping={limit:g} in the DeepSpeed config is superseded by ZClip and limits nothing. For a "
            f'fixed limit on top write "{KEY}": {{"max_grad_norm": {limit:g}}}; else leave it out, or set it to 0 '
            "(Transformers writes it from max_grad_norm of TrainingArguments)"
        )
