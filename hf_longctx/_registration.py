"""Make our models known to transformers' Auto classes by name, and import their modules at first use.

The mappings of the Auto classes hold names of classes, and the modules that define them. `register` of the Auto
classes takes classes, whose import takes seconds. So we enter the names, with a module that is imported at first use.
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
# Config and models, by model type, which is also the package. Models are keyed by the names of transformers' mappings.
MODELS = {"fox": ("FoxConfig", HEADS), "hmt": ("HMTConfig", {"MODEL_FOR_CAUSAL_LM": "HMTWrapper"})}


class LazyModule(types.ModuleType):
    """A module of ours that is imported when one of its names is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python reads these of every module
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def register_with_auto_classes() -> None:
    """Enter the names of our classes into the mappings of the Auto classes."""
    for model_type, (config, models) in MODELS.items():
        module = LazyModule(f"{__package__}.{model_type}")
        configuration_auto.CONFIG_MAPPING_NAMES[model_type] = config
        configuration_auto.CONFIG_MAPPING._modules[model_type] = module
        for mapping, name in models.items():
            # Trainer shifts the labels of label smoothing for the causal models that are named here
            getattr(modeling_auto, f"{mapping}_MAPPING_NAMES")[model_type] = name
            lazy_mapping = getattr(modeling_auto, f"{mapping}_MAPPING")
            lazy_mapping._modules[model_type] = module
            lazy_mapping._reverse_config_mapping[config] = model_type
