"""The FoX model for vLLM: vLLM's Llama with forgetting attention."""

import torch
from vllm.compilation.decorators import support_torch_compile
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from .attention import FoxAttention


class FoxDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config, prefix="", config=None):
        super().__init__(vllm_config, prefix, config, attn_layer_type=FoxAttention)


SIZED_BY_TOKENS = ("input_ids", "positions", "intermediate_tensors", "inputs_embeds")


@support_torch_compile(dynamic_arg_dims={name: {0: "tokens"} for name in SIZED_BY_TOKENS})
class FoxModel(LlamaModel):
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors=None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)


class FoxForCausalLM(LlamaForCausalLM):
    def _init_model(self, vllm_config, prefix="", layer_type=None):
        return FoxModel(vllm_config=vllm_config, prefix=prefix, layer_type=FoxDecoderLayer)
