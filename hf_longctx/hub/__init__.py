"""Pushing models, metrics and kernels to the Hub, of files that are known, with the code that they need."""

from .bundle import Bundle, build_bundle
from .card import fill, loading_lines, with_card
from .check import check_pushed
from .kernel import build_kernel
from .lint import gaps, problems
from .metric import build_space
from .push import pin_base, push
from .space import build_explorer


__all__ = [
    "Bundle",
    "build_bundle",
    "build_explorer",
    "build_kernel",
    "build_space",
    "check_pushed",
    "fill",
    "gaps",
    "loading_lines",
    "pin_base",
    "problems",
    "push",
    "with_card",
]
