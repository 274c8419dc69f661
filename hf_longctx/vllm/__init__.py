"""FoX for vLLM: a plugin that vLLM finds by its entry point `vllm.general_plugins`; see README.md."""

import logging


TESTED, READ = "0.32", "0.33"  # READ: reviewed but never run
logger = logging.getLogger("vllm.hf_longctx")  # a child of vLLM's logger, so its messages are shown


def release() -> str:
    """Return the release of vLLM, such as 0.32."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def register() -> None:
    """Register FoX with vLLM, which calls this in each of its processes, possibly more than once.

    vLLM calls it for every served model and would exit on an error, so errors become warnings. The model is imported
    only if a FoX is served.
    """
    try:
        _register()
    except Exception as error:
        logger.warning(
            "hf-longctx cannot serve a FoX here: it needs vLLM %s or %s and its own dependencies, but found: %s. Other models "
            "are not affected.",
            *(TESTED, READ, error),
        )


def _register():
    if release() not in (TESTED, READ):
        raise ImportError(f"this is vLLM {release()}")
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from ..fox.configuration_fox import FoxConfig
    from .checks import FoxChecks, not_by_transformers
    from .widths import FoxSizes

    known = ModelRegistry.get_supported_archs()
    if "FoxForCausalLM" in known:
        return
    ModelRegistry.register_model("FoxForCausalLM", "hf_longctx.vllm.model:FoxForCausalLM")
    MODELS_CONFIG_MAP["FoxForCausalLM"] = FoxChecks
    for architecture in known:
        if architecture.startswith("Transformers"):  # these run transformers models
            MODELS_CONFIG_MAP[architecture] = not_by_transformers(MODELS_CONFIG_MAP.get(architecture))
    MODEL_ARCH_CONFIG_CONVERTORS[FoxConfig.model_type] = FoxSizes
