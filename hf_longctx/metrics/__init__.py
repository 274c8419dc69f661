"""Measure how far back a language model really remembers.

`__init__.pyi` lists the public names. They are imported on first use. No module has the same name as a public
function, because importing the module would overwrite the function.
"""

import ast
import importlib
from pathlib import Path


_IMPORTS = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
_HOME = {alias.name: line.module for line in _IMPORTS if isinstance(line, ast.ImportFrom) for alias in line.names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
