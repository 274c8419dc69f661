"""All that the plugin takes from vLLM, by the place where 0.32 and 0.33 have it: what a release moves is mended here.

A name is imported when it is asked for, because vLLM registers plugins in processes that serve other models.
"""

import importlib


TESTED, READ = "0.32", "0.33"
PLACES = {
    "AttentionBackend": "vllm.v1.attention.backend",
    "AttentionCGSupport": "vllm.v1.attention.backend",
    "AttentionLayerBase": "vllm.model_executor.layers.attention_layer_base",
    "AttentionMetadataBuilder": "vllm.v1.attention.backend",
    "Attention": "vllm.model_executor.layers.attention",
    "CPUAttentionBackend": "vllm.v1.attention.backends.cpu_attn",
    "ColumnParallelLinear": "vllm.model_executor.layers.linear",
    "FullAttentionSpec": "vllm.v1.kv_cache_interface",
    "LayerNameType": "vllm.utils.torch_utils",
    "LlamaDecoderLayer": "vllm.model_executor.models.llama",
    "LlamaForCausalLM": "vllm.model_executor.models.llama",
    "LlamaModel": "vllm.model_executor.models.llama",
    "MODELS_CONFIG_MAP": "vllm.model_executor.models.config",
    "MODEL_ARCH_CONFIG_CONVERTORS": "vllm.transformers_utils.model_arch_config_convertor",
    "ModelArchConfigConvertorBase": "vllm.transformers_utils.model_arch_config_convertor",
    "ModelRegistry": "vllm",
    "MultipleOf": "vllm.v1.attention.backend",
    "QKVParallelLinear": "vllm.model_executor.layers.linear",
    "RowParallelLinear": "vllm.model_executor.layers.linear",
    "SlidingWindowSpec": "vllm.v1.kv_cache_interface",
    "VerifyAndUpdateConfig": "vllm.model_executor.models.config",
    "_encode_layer_name": "vllm.utils.torch_utils",
    "_resolve_layer_name": "vllm.utils.torch_utils",
    "current_platform": "vllm.platforms",
    "direct_register_custom_op": "vllm.utils.torch_utils",
    "eager_break_during_capture": "vllm.compilation.breakable_cudagraph",
    "get_current_vllm_config": "vllm.config",
    "get_forward_context": "vllm.forward_context",
    "get_rope": "vllm.model_executor.layers.rotary_embedding",
    "get_tensor_model_parallel_rank": "vllm.distributed",
    "get_tensor_model_parallel_world_size": "vllm.distributed",
    "support_torch_compile": "vllm.compilation.decorators",
}


def __getattr__(name):
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(PLACES[name]), name)
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{PLACES[name]} has no {name} ({error})") from error


def check_release() -> str:
    """Return the release of vLLM; raise ImportError if this plugin knows neither it nor its names."""
    found = ".".join(importlib.import_module("vllm").__version__.split(".")[:2])
    if found not in (TESTED, READ):
        raise ImportError(f"this is vLLM {found}")
    return found
