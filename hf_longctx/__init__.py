"""Long-context research in the Hugging Face ecosystem.

`import hf_longctx` registers our models with transformers' Auto classes. Everything else is imported lazily.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ._registration import register_with_auto_classes


if TYPE_CHECKING:
    from .fox import FoxConfig, FoxForCausalLM, FoxModel, forgetting_attention, forgetting_attention_ref
    from .hmt import HMTConfig, HMTState, HMTWrapper

__version__ = "0.1.0"

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
    if name in __all__:
        return getattr(importlib.import_module(f".{'hmt' if name.startswith('HMT') else 'fox'}", __name__), name)
    raise AttributeError(f"module 'hf_longctx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


register_with_auto_classes()
