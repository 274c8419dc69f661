"""Pushing models, metrics and kernels to the Hub, of files that are known, with the code that they need."""

from .bundle import Bundle, build_bundle
from .check import check_pushed
from .kernel import build_kernel
from .metric import build_space
from .push import loading_lines, push


__all__ = ["Bundle", "build_bundle", "build_kernel", "build_space", "check_pushed", "loading_lines", "push"]
