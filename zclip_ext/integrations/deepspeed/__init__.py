"""ZClip in DeepSpeed by its JSON alone::

    import zclip_ext.integrations.deepspeed      # anywhere before deepspeed.initialize

    {"zero_optimization": {"stage": 3}, "zclip": {"enabled": true, "z_thresh": 2.5}}

The block holds the options of :class:`zclip_ext.ZClipConfig`. Importing this module is enough, wherever the config
comes from: a dict, a file, the launcher's argument, Accelerate, Transformers, Lightning. A script that can't be edited
runs through :mod:`zclip_ext.launch`. An engine whose config has no block is left as it is.

``engine.zclip`` is the :class:`zclip_ext.ZClip` of an engine; its ``metrics()`` also go to the engine's monitor.
"""

from __future__ import annotations

import functools
import gc
import threading
from typing import Any

try:
    import deepspeed
    from deepspeed.runtime.engine import DeepSpeedEngine
except ImportError as error:
    raise ImportError(
        f"zclip_ext.integrations.deepspeed needs deepspeed: pip install 'zclip-ext[deepspeed]' ({error})"
    ) from error

from ...telemetry import warn
from . import engine as _engine
from . import settings

__all__ = ["disable", "enable", "initialize"]

_lock = threading.Lock()


def enable() -> None:
    """Lets engines that are built from now on heed the ``zclip`` block of their config. Importing this module does it.

    Calling it again changes nothing. An engine that was built before, with a block in its config, is warned of: it
    trains without ZClip.
    """
    with _lock:
        was_enabled = getattr(DeepSpeedEngine, "_zclip_enabled", False)
        if not hasattr(DeepSpeedEngine, "_zclip_enabled"):
            _hook()
        DeepSpeedEngine._zclip_enabled = True
    if not was_enabled:
        _warn_of_engines_without()


def disable() -> None:
    """Engines that are built from now on are left as they are, whatever their config holds. Those that are keep it."""
    with _lock:
        DeepSpeedEngine._zclip_enabled = False


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, after :func:`enable`: same arguments, same return."""
    enable()
    return deepspeed.initialize(*args, **kwargs)


def _hook() -> None:
    """Once, and for good: taking it out again would take out what others have put on top of it."""
    original = DeepSpeedEngine.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not DeepSpeedEngine._zclip_enabled:
            original(self, *args, **kwargs)
            return
        config, args, kwargs = settings.of_engine(args, kwargs)
        if config is not None:
            settings.check_version(deepspeed.__version__)
        original(self, *args, **kwargs)
        settings.check_optimizer(self)
        if config is not None:
            _engine.install(self, config)

    init._zclip_original = original  # type: ignore[attr-defined]
    DeepSpeedEngine.__init__ = init


def _warn_of_engines_without() -> None:
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), DeepSpeedEngine) or getattr(candidate, "zclip", None) is not None:
            continue
        written = getattr(getattr(candidate, "_config", None), "_param_dict", None) or {}
        if candidate.optimizer is not None and settings.is_on(written):
            warn(
                'a DeepSpeed engine with a "zclip" block in its config was built before '
                "zclip_ext.integrations.deepspeed was imported: it trains without ZClip. Import it before "
                "deepspeed.initialize"
            )
            return


enable()
