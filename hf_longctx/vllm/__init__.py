"""FoX for vLLM, as a plugin that vLLM finds by its entry point `vllm.general_plugins`; see README.md."""

import logging

from .compat import READ, TESTED, check_release


logger = logging.getLogger("vllm.hf_longctx")  # shown as vLLM's own


def register() -> None:
    """Make FoX known to vLLM, which calls this in each of its processes, perhaps more than once.

    vLLM does so for whatever model it serves, and an error would end it, so what keeps a FoX from being served is a
    warning. The model itself is imported only where a FoX is served.
    """
    try:
        _register()
    except Exception as error:
        logger.warning(
            "hf-longctx cannot serve a FoX here: it needs vLLM %s or %s with all that it takes from there, and its own "
            "dependencies, but found: %s. Other models are not concerned.",
            *(TESTED, READ, error),
        )


def _register():
    check_release()
    from ..fox.configuration_fox import FoxConfig
    from .checks import FoxChecks, not_by_transformers
    from .compat import MODEL_ARCH_CONFIG_CONVERTORS, MODELS_CONFIG_MAP, ModelRegistry
    from .widths import FoxSizes

    known = ModelRegistry.get_supported_archs()
    if "FoxForCausalLM" in known:
        return
    ModelRegistry.register_model("FoxForCausalLM", "hf_longctx.vllm.model:FoxForCausalLM")
    MODELS_CONFIG_MAP["FoxForCausalLM"] = FoxChecks
    for architecture in known:
        if architecture.startswith("Transformers"):  # these run models of transformers
            MODELS_CONFIG_MAP[architecture] = not_by_transformers(MODELS_CONFIG_MAP.get(architecture))
    MODEL_ARCH_CONFIG_CONVERTORS[FoxConfig.model_type] = FoxSizes
