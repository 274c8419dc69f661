"""The head size of a FoX in vLLM, which includes extra dimensions for the decay."""

from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from ..fox.attention_fox import GATE_PARTS
from ..fox.configuration_fox import FoxConfig


def gates_per_key(config: FoxConfig) -> int:
    """Return the number of forget gates per key head."""
    if config.forget_gate == "none":
        return 0
    return 1 if config.forget_gate_per_kv_head else config.num_key_value_groups


def vllm_head_size(config: FoxConfig) -> int:
    """Return the smallest head size of vLLM's attention kernels with room for a key and the decay of its gates.

    Raises:
        ValueError: no supported head size is large enough.
    """
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
    else:  # Use FlashAttention's sizes, and Triton's above 256. FlashInfer's next size would nearly double the cache.
        sizes = range(32, 513, 8)
    width = config.head_dim + GATE_PARTS * gates_per_key(config)
    if width > max(sizes):
        raise ValueError(f"head_dim with the decay of the gates must be at most {max(sizes)} for vLLM, got {width}.")
    return min(size for size in sizes if size >= width)


class FoxSizes(ModelArchConfigConvertorBase):
    """Reports the head size to vLLM, because backends such as Triton's preallocate buffers of this size."""

    def get_head_size(self) -> int:
        return vllm_head_size(self.hf_config)
