"""Training and fine-tuning in a folder from which a run goes on.

from hf_longctx.training import TrainSettings, train

train(TrainSettings(data="text.txt", tokenizer="model_cards/fox-demo", output="run"))
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .adapters import load_adapter
    from .data import TokenDataset
    from .merge import merge
    from .recipes import FinetuneSettings, TrainSettings
    from .run import dry_run, train
    from .streams import CarriesStates, DocumentStreams
    from .tokenizer import train_tokenizer
    from .trainer import ResumableTrainer

_MODULES = {
    "CarriesStates": "streams",
    "DocumentStreams": "streams",
    "FinetuneSettings": "recipes",
    "ResumableTrainer": "trainer",
    "TokenDataset": "data",
    "TrainSettings": "recipes",
    "dry_run": "run",
    "load_adapter": "adapters",
    "merge": "merge",
    "train": "run",
    "train_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CarriesStates",
    "DocumentStreams",
    "FinetuneSettings",
    "ResumableTrainer",
    "TokenDataset",
    "TrainSettings",
    "dry_run",
    "load_adapter",
    "merge",
    "train",
    "train_tokenizer",
]
