"""Check vLLM's options for a FoX in the main process, because errors in worker processes do not reach the user."""

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from . import READ, TESTED, logger, release
from .sums import TOKENS_PER_STATE


# Cache dtypes that store the cumulative sum without additional rounding.
EXACT = ("auto", "bfloat16", "float16", "float32")


def check_cache_dtype(dtype: str) -> None:
    """Raise ValueError for a quantized KV cache."""
    if dtype not in EXACT:
        raise ValueError(
            f"kv_cache_dtype must not be quantized for a FoX, got {dtype!r}. The keys store the cumulative sum of the "
            "gates, which quantization would round. Omit --kv-cache-dtype, or give --kv-cache-dtype bfloat16 if the "
            "checkpoint contains a kv_cache_scheme."
        )


class FoxChecks(VerifyAndUpdateConfig):
    """Checks of the options, which vLLM runs before it starts the workers."""

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
                f"and values, but not the state that a FoX stores for every {TOKENS_PER_STATE} tokens. Omit "
                "both options."
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(
                    f"{name} must be 1 for a FoX, got {getattr(parallel, name)}. The gates are summed over all "
                    "earlier tokens, so each process needs all tokens. Use tensor_parallel_size instead."
                )
        ranks, heads = parallel.tensor_parallel_size, config.num_key_value_heads
        if heads % ranks and ranks % heads:  # vLLM itself checks only the query heads
            raise ValueError(
                f"tensor_parallel_size must divide the {heads} key heads or be a multiple of {heads}, got {ranks}."
            )
        if config.hidden_act != "silu":
            raise ValueError(
                f"hidden_act must be 'silu', the only activation of vLLM's Llama MLP, got {config.hidden_act!r}. "
                "Serve this model with: hf-longctx serve FOLDER."
            )
        check_rope(config, vllm_config.model_config.max_model_len)


def check_rope(config, length: int) -> None:
    """Raise ValueError if RoPE frequencies depend on the sequence length, because vLLM computes them only once."""
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
    """Return a subclass of `checks`, vLLM's checks for a transformers architecture, that rejects FoX models."""

    class NotByTransformers(checks or VerifyAndUpdateConfig):
        @classmethod
        def verify_and_update_model_config(cls, model_config):
            """Raise ValueError for a FoX, because vLLM would run the transformers model without its forget gate."""
            if model_config.hf_config.model_type == "fox":
                raise ValueError(
                    "--model-impl transformers cannot run a FoX, because vLLM's attention would omit the forget gate. "
                    "Omit --model-impl to use hf_longctx.vllm, which supports the architecture FoxForCausalLM."
                )
            super().verify_and_update_model_config(model_config)

    return NotByTransformers
