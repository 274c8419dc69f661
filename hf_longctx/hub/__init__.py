"""Push models and metrics to the Hub, together with the code that they need."""

from .bundle import Bundle, build_bundle
from .card import loading_lines, with_card
from .lint import check, missing_fields
from .metric_space import build_space
from .push import check_destination, pin_base, push, removed_files


__all__ = [
    "Bundle",
    "build_bundle",
    "build_space",
    "check",
    "check_destination",
    "loading_lines",
    "missing_fields",
    "pin_base",
    "push",
    "removed_files",
    "with_card",
]
