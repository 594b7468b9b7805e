"""Adaptive gradient clipping (ZClip, arXiv 2504.02507) for real pre-training runs."""

from ._version import __version__
from .clipper import ZClip
from .config import ZClipConfig
from .ops import backend
from .optimizer import ZClipOptimizer
from .replay import replay
from .result import ClipResult
from .telemetry import NonFiniteGradientError, ZClipWarning

__all__ = [
    "ClipResult",
    "NonFiniteGradientError",
    "ZClip",
    "ZClipConfig",
    "ZClipOptimizer",
    "ZClipWarning",
    "__version__",
    "backend",
    "replay",
]
