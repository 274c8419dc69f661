"""How far a language model really remembers.

Names are imported on first use, so that the metric you want is all you load.
"""

import importlib


_HOME = {
    "CurvePoint": "curve",
    "ForgettingCurve": "curve",
    "MemoryLength": "curve",
    "linear_lengths": "curve",
    "log_lengths": "curve",
    "PositionLimitError": "runner",
    "forgetting_curve": "runner",
}

__all__ = sorted(_HOME)


def __getattr__(name):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__():
    return __all__
