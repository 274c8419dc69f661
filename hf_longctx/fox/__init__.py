"""The Forgetting Transformer (FoX). Importing this package registers it with transformers' Auto classes.

`save_pretrained` copies the files `*_fox.py` next to the weights. A folder can therefore be loaded without hf-longctx:
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.
"""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .attention_fox import forgetting_attention_ref
from .configuration_fox import FoxConfig
from .convert import from_fla, from_llama, from_official, to_fla, to_official
from .convert_folder import convert_folder
from .modeling_fox import (
    FoxForCausalLM,
    FoxForQuestionAnswering,
    FoxForSequenceClassification,
    FoxForTokenClassification,
    FoxModel,
    FoxPreTrainedModel,
)
from .operator import forgetting_attention
from .plot import HeadMap, head_maps
from .pruned_cache import PrunedCache


AutoConfig.register("fox", FoxConfig)
FoxConfig.register_for_auto_class()
for auto_class, model_class in {
    AutoModel: FoxModel,
    AutoModelForCausalLM: FoxForCausalLM,
    AutoModelForQuestionAnswering: FoxForQuestionAnswering,
    AutoModelForSequenceClassification: FoxForSequenceClassification,
    AutoModelForTokenClassification: FoxForTokenClassification,
}.items():
    auto_class.register(FoxConfig, model_class)
    model_class.register_for_auto_class(auto_class.__name__)
# Trainer shifts the labels of label smoothing for the classes named here, which `register` does not extend
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(FoxConfig.model_type, FoxForCausalLM.__name__)

__all__ = [
    "FoxConfig",
    "FoxForCausalLM",
    "FoxForQuestionAnswering",
    "FoxForSequenceClassification",
    "FoxForTokenClassification",
    "FoxModel",
    "FoxPreTrainedModel",
    "HeadMap",
    "PrunedCache",
    "convert_folder",
    "forgetting_attention",
    "forgetting_attention_ref",
    "from_fla",
    "from_llama",
    "from_official",
    "head_maps",
    "to_fla",
    "to_official",
]
