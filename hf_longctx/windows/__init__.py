"""Windows per key head: a smaller key/value cache for pretrained models of transformers."""

from .groups import HeadGroup, LayerWindows, group_heads, kept_keys
from .head_windows import HeadWindows
from .layers import attention_layers


__all__ = ["HeadGroup", "HeadWindows", "LayerWindows", "attention_layers", "group_heads", "kept_keys"]
