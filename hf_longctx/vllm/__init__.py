"""FoX for vLLM, as a plugin that vLLM finds by its entry point `vllm.general_plugins`; see README.md."""


def register() -> None:
    """Make FoX known to vLLM, which calls this in each of its processes, perhaps more than once.

    The model itself is imported only where a FoX is served.
    """
    from vllm import ModelRegistry  # pyright: ignore[reportAttributeAccessIssue] (vLLM is not installed here)
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from ..fox.configuration_fox import FoxConfig
    from .checks import BY_TRANSFORMERS, FoxChecks, NotByTransformers
    from .widths import FoxSizes

    if "FoxForCausalLM" in ModelRegistry.get_supported_archs():
        return
    ModelRegistry.register_model("FoxForCausalLM", "hf_longctx.vllm.model:FoxForCausalLM")
    MODELS_CONFIG_MAP["FoxForCausalLM"] = FoxChecks
    for architecture in BY_TRANSFORMERS:
        MODELS_CONFIG_MAP.setdefault(architecture, NotByTransformers)
    MODEL_ARCH_CONFIG_CONVERTORS[FoxConfig.model_type] = FoxSizes
