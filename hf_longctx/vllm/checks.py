"""Check in vLLM's main process that the options are supported for a FoX, and report the head size to vLLM.

We check options in the main process, because errors in worker processes do not reach the user.
"""

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from ..fox.attention_fox import GATE_PARTS
from ..fox.configuration_fox import FoxConfig
from . import READ, TESTED, logger, release


# Cache dtypes that store the cumulative sum without additional rounding.
EXACT = ("auto", "bfloat16", "float16", "float32")


def check_cache_dtype(dtype: str) -> None:
    """Raise ValueError for a quantized KV cache."""
    if dtype not in EXACT:
        raise ValueError(
            f"kv_cache_dtype must not be quantized for a FoX, got {dtype!r}. The keys store the cumulative sum of the "
            "gates, and quantization would round this sum. If the checkpoint contains a kv_cache_scheme, give "
            "--kv-cache-dtype bfloat16. Otherwise, omit --kv-cache-dtype."
        )


class FoxChecks(VerifyAndUpdateConfig):
    """Checks of the options. vLLM runs them before it starts the workers."""

    @staticmethod
    def verify_and_update_config(vllm_config):
        """Raise ValueError for vLLM options that this plugin does not support."""
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        cache = vllm_config.cache_config
        if release() == READ:
            logger.warning(
                "hf-longctx was tested with vLLM %s, but not with %s. Compare some responses with transformers.",
                *(TESTED, READ),
            )
        check_cache_dtype(cache.cache_dtype)
        if cache.kv_offloading_size is not None or vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "kv_offloading_size and kv_transfer_config are not supported for a FoX. vLLM's connectors move keys "
                "and values, but not the state of a FoX. Omit both options."
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(
                    f"{name} must be 1 for a FoX, got {getattr(parallel, name)}. The gates are summed over all "
                    "earlier tokens, so each process needs all tokens. Use tensor_parallel_size instead."
                )
        check_rope(config, vllm_config.model_config.max_model_len)


def check_rope(config, length: int) -> None:
    """Raise ValueError if RoPE frequencies depend on the sequence length. vLLM computes the frequencies only once."""
    rope = config.rope_parameters or {}
    limits = {
        "dynamic": config.max_position_embeddings,
        "longrope": rope.get("original_max_position_embeddings", config.max_position_embeddings),
    }
    limit = limits.get(rope.get("rope_type", ""), length)
    if length > limit:
        raise ValueError(
            f"max_model_len must be at most {limit} for a FoX with {rope['rope_type']!r} RoPE, got {length}. Beyond "
            "this length, the RoPE frequencies depend on the sequence length, but vLLM computes them only once. Give "
            f"--max-model-len {limit}, or serve the model with: hf-longctx serve FOLDER."
        )


def not_by_transformers(checks: Any = None) -> Any:
    """Return a subclass of `checks` that rejects FoX models.

    Args:
        checks: class with vLLM's own checks for an architecture of transformers. Default: a class without checks.
    """

    class NotByTransformers(checks or VerifyAndUpdateConfig):
        @classmethod
        def verify_and_update_model_config(cls, model_config):
            """Raise ValueError for a FoX, because vLLM would run the transformers model without the forget gate."""
            if model_config.hf_config.model_type == "fox":
                raise ValueError(
                    "--model-impl transformers cannot run a FoX, because vLLM's attention would omit the forget gate. "
                    "Omit --model-impl. vLLM then uses hf_longctx.vllm for the architecture FoxForCausalLM."
                )
            super().verify_and_update_model_config(model_config)

    return NotByTransformers


def gates_per_key(config: FoxConfig) -> int:
    """Return the number of forget gates per key head. Without gates, return 0."""
    return 0 if config.forget_gate == "none" else config.gates_per_key


def vllm_head_size(config: FoxConfig) -> int:
    """Return the smallest head size that vLLM's attention kernels support and that fits a key and its decay.

    Raises:
        ValueError: no supported head size is large enough.
    """
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        sizes = CPUAttentionBackend.get_supported_head_sizes()
    else:
        # FlashAttention supports these sizes up to 256, and the Triton backend supports the larger ones. The next size
        # of FlashInfer would nearly double the cache.
        sizes = range(32, 513, 8)
    width = config.head_dim + GATE_PARTS * gates_per_key(config)
    if width > max(sizes):
        raise ValueError(
            f"head_dim plus the dimensions for the decay must be at most {max(sizes)} for vLLM, got {width}."
        )
    return min(size for size in sizes if size >= width)


class FoxSizes(ModelArchConfigConvertorBase):
    """Reports the head size to vLLM. Some backends, such as the Triton backend, preallocate buffers of this size."""

    def get_head_size(self) -> int:
        return vllm_head_size(self.hf_config)
