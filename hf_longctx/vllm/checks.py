"""Checks of FoX options in the main process, because errors in vLLM's workers do not reach the user."""

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from . import READ, TESTED, logger, release
from .sums import TOKENS_PER_STATE


# Cache dtypes that represent the parts of the cumulative sum exactly.
EXACT = ("auto", "bfloat16", "float16", "float32")


def check_cache_dtype(dtype: str) -> None:
    """Raise ValueError for a quantized KV cache."""
    if dtype not in EXACT:
        raise ValueError(
            f"kv_cache_dtype is {dtype!r}; a FoX stores the cumulative sum of its gates in the keys, which would round it. "
            "Omit --kv-cache-dtype; if the checkpoint sets it by a kv_cache_scheme, give --kv-cache-dtype bfloat16."
        )


class FoxChecks(VerifyAndUpdateConfig):
    """Checks that vLLM runs before starting workers."""

    @staticmethod
    def verify_and_update_config(vllm_config):
        """Raise ValueError for vLLM options that this plugin does not support."""
        config, parallel = vllm_config.model_config.hf_config, vllm_config.parallel_config
        cache = vllm_config.cache_config
        if release() == READ:
            logger.warning(
                "hf-longctx was tested with vLLM %s, and has not run with %s: compare some responses with transformers.",
                *(TESTED, READ),
            )
        check_cache_dtype(cache.cache_dtype)
        if cache.kv_offloading_size is not None or vllm_config.kv_transfer_config is not None:
            raise ValueError(
                "kv_offloading_size or kv_transfer_config is set; vLLM's connectors move a key and a value for each token, "
                f"and the state that a FoX has for {TOKENS_PER_STATE} tokens would stay behind. Omit both."
            )
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name) > 1:
                raise ValueError(
                    f"{name} is {getattr(parallel, name)}; the gates of a FoX are summed over all earlier tokens, so one "
                    f"process has to see them all. Omit {name}; tensor_parallel_size divides the heads."
                )
        ranks, heads = parallel.tensor_parallel_size, config.num_key_value_heads
        if heads % ranks and ranks % heads:  # vLLM checks query heads
            raise ValueError(
                f"tensor_parallel_size is {ranks}; it must divide the {heads} key heads, or be a multiple of their number."
            )
        if config.hidden_act != "silu":
            raise ValueError(
                f"hidden_act is {config.hidden_act!r}; vLLM's Llama MLP, which a FoX shares, supports 'silu' only. "
                "Serve this model with: hf-longctx serve FOLDER."
            )
        check_rope(config, vllm_config.model_config.max_model_len)


def check_rope(config, length: int) -> None:
    """Raise ValueError if RoPE frequencies would depend on the sequence length, because vLLM fixes them."""
    rope = config.rope_parameters or {}
    limits = {
        "dynamic": config.max_position_embeddings,
        "longrope": rope.get("original_max_position_embeddings", config.max_position_embeddings),
    }
    limit = limits.get(rope.get("rope_type", ""), length)
    if length > limit:
        raise ValueError(
            f"max_model_len is {length}, beyond the {limit} positions of a FoX with {rope['rope_type']!r} RoPE; from there on "
            "its frequencies depend on the sequence length, and vLLM fixes them for the engine. Give "
            f"--max-model-len {limit}, or serve it with: hf-longctx serve FOLDER."
        )


def not_by_transformers(checks: Any = None) -> Any:
    """Return a subclass of `checks`, vLLM's checks of an architecture for transformers models, that rejects FoX."""

    class NotByTransformers(checks or VerifyAndUpdateConfig):
        @classmethod
        def verify_and_update_model_config(cls, model_config):
            """Raise ValueError if vLLM would run transformers' FoX, because vLLM's attention omits the gate."""
            if model_config.hf_config.model_type == "fox":
                raise ValueError(
                    "--model-impl transformers cannot run a FoX, because vLLM's attention would omit the forget gate. "
                    "Omit --model-impl: hf_longctx.vllm has the architecture FoxForCausalLM, for causal language models."
                )
            super().verify_and_update_model_config(model_config)

    return NotByTransformers
