"""Long-context research in the Hugging Face ecosystem.

`import hf_longctx` makes our models known to transformers' Auto classes; everything else is imported when it is first
used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._registration import register_with_auto_classes


if TYPE_CHECKING:
    from .fox import FoxConfig, FoxForCausalLM, FoxModel, forgetting_attention, forgetting_attention_ref
    from .hmt import HMTConfig, HMTState, HMTWrapper

__version__ = "0.1.0"

_EXPORTS = {
    "FoxConfig": "hf_longctx.fox",
    "FoxForCausalLM": "hf_longctx.fox",
    "FoxModel": "hf_longctx.fox",
    "HMTConfig": "hf_longctx.hmt",
    "HMTState": "hf_longctx.hmt",
    "HMTWrapper": "hf_longctx.hmt",
    "forgetting_attention": "hf_longctx.fox",
    "forgetting_attention_ref": "hf_longctx.fox",
}

__all__ = [
    "FoxConfig",
    "FoxForCausalLM",
    "FoxModel",
    "HMTConfig",
    "HMTState",
    "HMTWrapper",
    "__version__",
    "forgetting_attention",
    "forgetting_attention_ref",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'hf_longctx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


register_with_auto_classes()
