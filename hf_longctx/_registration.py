"""Lazy registration of our models with transformers' Auto classes.

`AutoModel.register` requires classes, and importing our classes takes seconds. Instead, we add the names of our
classes to the mappings of the Auto classes. Each name refers to a module that is imported at first use.
"""

import importlib
import types
from typing import Any

from transformers.models.auto import configuration_auto, modeling_auto


HEADS = {
    "MODEL": "FoxModel",
    "MODEL_FOR_CAUSAL_LM": "FoxForCausalLM",
    "MODEL_FOR_QUESTION_ANSWERING": "FoxForQuestionAnswering",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": "FoxForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION": "FoxForTokenClassification",
}
# Config class and model classes by model type. A model type is also the name of a subpackage. The keys of the model
# classes are the names of transformers' mappings.
MODELS = {"fox": ("FoxConfig", HEADS), "hmt": ("HMTConfig", {"MODEL_FOR_CAUSAL_LM": "HMTWrapper"})}


class LazyModule(types.ModuleType):
    """A proxy that imports our module when an attribute is first accessed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python looks up dunder names on every module
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def register_with_auto_classes() -> None:
    """Add the names of our classes to the mappings of the Auto classes."""
    for model_type, (config, models) in MODELS.items():
        module = LazyModule(f"{__package__}.{model_type}")
        configuration_auto.CONFIG_MAPPING_NAMES[model_type] = config
        configuration_auto.CONFIG_MAPPING._modules[model_type] = module
        for mapping, name in models.items():
            # with label smoothing, Trainer shifts labels only for the causal models in this mapping
            getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")[model_type] = name
            lazy_mapping = getattr(modeling_auto, f"{mapping}_MAPPING")
            lazy_mapping._modules[model_type] = module
            lazy_mapping._reverse_config_mapping[config] = model_type
