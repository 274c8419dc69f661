"""Pushing a model to the Hub in one commit, of files that are known, with the code that it needs."""

from .bundle import Bundle, build_bundle
from .check import check_pushed
from .push import loading_lines, push


__all__ = ["Bundle", "build_bundle", "check_pushed", "loading_lines", "push"]
