"""Hierarchical Memory Transformer: a wrapper that adds memory recall to any causal LM (arXiv 2405.06067)."""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_hmt import HMTConfig
from .convert import from_official, official_parameters
from .memory_hmt import HMTMemory
from .modeling_hmt import HMTOutput, HMTWrapper
from .retriever_hmt import Retrieved, Retriever, Segment, register_retriever
from .state_hmt import HMTState


AutoConfig.register("hmt", HMTConfig, exist_ok=True)
AutoModelForCausalLM.register(HMTConfig, HMTWrapper, exist_ok=True)
# with label smoothing, Trainer shifts the labels of the models in this dict only
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["hmt"] = "HMTWrapper"
# `save_pretrained` copies the code next to the weights, so that trust_remote_code works without this package
HMTConfig.register_for_auto_class()
HMTWrapper.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "HMTConfig",
    "HMTMemory",
    "HMTOutput",
    "HMTState",
    "HMTWrapper",
    "Retrieved",
    "Retriever",
    "Segment",
    "from_official",
    "official_parameters",
    "register_retriever",
]
