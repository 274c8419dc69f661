"""The FoX model for vLLM: vLLM's Llama with forgetting attention."""

from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from .attention import FoxAttention


class FoxDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config, prefix="", config=None):
        super().__init__(vllm_config, prefix, config, attn_layer_type=FoxAttention)


class FoxForCausalLM(LlamaForCausalLM):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=FoxDecoderLayer)
