"""Pretraining and fine-tuning. A stopped run resumes from its output folder.

from hf_longctx.training import PretrainConfig, train

train(PretrainConfig(data="text.txt", tokenizer="model_cards/fox-demo", output_dir="run"))
"""

from .adapters import load_adapter
from .config import FinetuneConfig, PretrainConfig
from .data import TokenDataset
from .run import train
from .trainer import LongContextTrainer


__all__ = [
    "FinetuneConfig",
    "LongContextTrainer",
    "PretrainConfig",
    "TokenDataset",
    "load_adapter",
    "train",
]
