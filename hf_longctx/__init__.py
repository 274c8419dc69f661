"""Long-context research in the Hugging Face ecosystem.

`import hf_longctx` makes our models known to transformers' Auto classes and imports nothing heavy; everything else is
imported when it is first used.
"""

import importlib

from ._registration import register_with_auto_classes


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

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name):
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'hf_longctx' has no attribute {name!r}")


def __dir__():
    return __all__


register_with_auto_classes()
