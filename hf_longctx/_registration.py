"""Registration of our models with transformers' Auto classes, without importing the models.

The Auto classes register classes, and importing ours doubles the time of `import hf_longctx`. We therefore register a
stand-in for each config class. When a stand-in first creates a config, it imports the subpackage of the model. The
subpackage registers the config class, in place of the stand-in, and the model classes.
"""

import importlib
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


CONFIGS = {"fox": "FoxConfig", "hmt": "HMTConfig"}  # a model type is also the name of a subpackage


class StandIn(PreTrainedConfig):
    """A config class that creates configs of the class with the same name in the subpackage `model_type`."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.config_class()(*args, **kwargs)

    @classmethod
    def from_dict(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.config_class().from_dict(*args, **kwargs)

    @classmethod
    def config_class(cls) -> Any:
        return getattr(importlib.import_module(f"{__package__}.{cls.model_type}"), cls.__name__)


def register_with_auto_classes() -> None:
    """Register a stand-in for each of our config classes."""
    for model_type, name in CONFIGS.items():
        AutoConfig.register(model_type, type(name, (StandIn,), {"model_type": model_type}))
