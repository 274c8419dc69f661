"""Pretraining and fine-tuning in a folder from which a run resumes.

from hf_longctx.training import PretrainConfig, train

train(PretrainConfig(data="text.txt", tokenizer="model_cards/fox-demo", output_dir="run"))
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .adapters import load_adapter
    from .config import FinetuneConfig, PretrainConfig
    from .data import TokenDataset
    from .run import merge, train
    from .tokenizer import train_tokenizer
    from .trainer import LongContextTrainer

_MODULES = {
    "FinetuneConfig": "config",
    "LongContextTrainer": "trainer",
    "PretrainConfig": "config",
    "TokenDataset": "data",
    "load_adapter": "adapters",
    "merge": "run",
    "train": "run",
    "train_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FinetuneConfig",
    "LongContextTrainer",
    "PretrainConfig",
    "TokenDataset",
    "load_adapter",
    "merge",
    "train",
    "train_tokenizer",
]
