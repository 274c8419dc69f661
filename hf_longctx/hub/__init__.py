"""Pushing models, metrics and kernels to the Hub, of files that are known, with the code that they need."""

from .bundle import Bundle, build_bundle
from .check import check_pushed
from .kernel import build_kernel
from .metric import build_space
from .push import loading_lines, push
from .space import build_explorer


__all__ = [
    "Bundle",
    "build_bundle",
    "build_explorer",
    "build_kernel",
    "build_space",
    "check_pushed",
    "loading_lines",
    "push",
]
