"""Hierarchical Memory Transformer: memory recall around any causal LM (arXiv 2405.06067)."""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .configuration_hmt import HMTConfig
from .convert import from_official, official_parameters
from .memory_hmt import HMTMemory, HMTState
from .modeling_hmt import HMTOutput, HMTWrapper


AutoConfig.register(HMTConfig.model_type, HMTConfig)
AutoModelForCausalLM.register(HMTConfig, HMTWrapper)
# Trainer shifts the labels of label smoothing for the classes named here, which `register` does not extend
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(HMTConfig.model_type, HMTWrapper.__name__)

# `save_pretrained` puts these files beside the weights, for trust_remote_code where the package is not installed
HMTConfig.register_for_auto_class()
HMTWrapper.register_for_auto_class("AutoModelForCausalLM")

__all__ = [
    "HMTConfig",
    "HMTMemory",
    "HMTOutput",
    "HMTState",
    "HMTWrapper",
    "from_official",
    "official_parameters",
]
