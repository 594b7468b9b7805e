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
import inspect
import threading
from collections.abc import Callable
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
_enabled = False


def enable() -> None:
    """Lets engines that are built from now on heed the ``zclip`` block of their config. Importing this module does it.

    Calling it again changes nothing. An engine that was built before, with a block in its config, is warned of: it
    trains without ZClip.
    """
    global _enabled
    with _lock:
        was_enabled, _enabled = _enabled, True
        if not getattr(DeepSpeedEngine.__init__, "_zclip_original", None):
            DeepSpeedEngine.__init__ = _hooked(DeepSpeedEngine.__init__)
    if not was_enabled:
        _warn_of_engines_without()


def disable() -> None:
    """Engines that are built from now on are left as they are, whatever their config holds. Those that are keep it."""
    global _enabled
    with _lock:
        _enabled = False
        original = getattr(DeepSpeedEngine.__init__, "_zclip_original", None)
        if original is not None:  # another's hook on top of ours keeps ours, which then does nothing
            DeepSpeedEngine.__init__ = original


def initialize(*args: Any, **kwargs: Any) -> Any:
    """``deepspeed.initialize``, after :func:`enable`: same arguments, same return."""
    enable()
    return deepspeed.initialize(*args, **kwargs)


def _hooked(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not _enabled:
            return original(self, *args, **kwargs)
        arguments = signature.bind(self, *args, **kwargs)
        config = settings.of_engine(arguments.arguments)
        if config is None:
            return original(self, *args, **kwargs)
        settings.check_version(deepspeed.__version__)
        original(*arguments.args, **arguments.kwargs)
        return _engine.install(self, config)

    init._zclip_original = original  # type: ignore[attr-defined]
    return init


def _warn_of_engines_without() -> None:
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), DeepSpeedEngine):
            continue
        written = getattr(getattr(candidate, "_config", None), "_param_dict", None) or {}
        if settings.KEY in written and getattr(candidate, "zclip", None) is None:
            warn(
                'a DeepSpeed engine with a "zclip" block in its config was built before '
                "zclip_ext.integrations.deepspeed was imported: it trains without ZClip. Import it before "
                "deepspeed.initialize"
            )
            return


enable()
