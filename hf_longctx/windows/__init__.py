"""Windows per key head: a smaller key/value cache for pretrained models of transformers."""

from .head_windows import HeadWindows


__all__ = ["HeadWindows"]
