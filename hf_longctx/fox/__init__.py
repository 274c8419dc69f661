"""The Forgetting Transformer (FoX). Importing this package registers it with transformers' Auto classes.

`configuration_fox`, `modeling_fox` and `attention_fox` travel with the weights: `save_pretrained` copies them, so that
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` works where hf-longctx is not installed.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .attention_fox import forgetting_attention, forgetting_attention_ref
from .configuration_fox import FoxConfig
from .convert_fox import from_official
from .modeling_fox import FoxForCausalLM, FoxModel, FoxPreTrainedModel


AutoConfig.register("fox", FoxConfig)
AutoModel.register(FoxConfig, FoxModel)
AutoModelForCausalLM.register(FoxConfig, FoxForCausalLM)
FoxConfig.register_for_auto_class()
FoxModel.register_for_auto_class("AutoModel")
FoxForCausalLM.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "FoxConfig",
    "FoxForCausalLM",
    "FoxModel",
    "FoxPreTrainedModel",
    "forgetting_attention",
    "forgetting_attention_ref",
    "from_official",
]
