"""A plugin that adds FoX to vLLM through the entry point `vllm.general_plugins`; see README.md."""

import logging


TESTED, READ = "0.32", "0.33"  # vLLM versions; with the second, we tested only the Python code
logger = logging.getLogger("vllm.hf_longctx")  # a child of vLLM's logger, so that vLLM prints its messages


def release() -> str:
    """Return the major and minor version of vLLM, such as 0.32."""
    from vllm import __version__

    return ".".join(__version__.split(".")[:2])


def register() -> None:
    """Register FoX with vLLM.

    vLLM calls this function for every served model, in each of its processes, and possibly several times. An exception
    would stop vLLM, so we log exceptions as warnings. vLLM imports the model class only if it serves a FoX.
    """
    try:
        _register()
    except Exception as error:
        logger.warning(
            "hf-longctx failed to load, so FoX models cannot be served. hf-longctx requires vLLM %s or %s. The "
            "dependencies of hf-longctx must also be installed. Error: %s. Other models are not affected.",
            *(TESTED, READ, error),
        )


def _register():
    if release() not in (TESTED, READ):
        raise ImportError(f"the installed version is vLLM {release()}")
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    from ..fox.configuration_fox import FoxConfig
    from .checks import FoxChecks, FoxSizes, not_by_transformers

    known = ModelRegistry.get_supported_archs()
    if "FoxForCausalLM" in known:
        return
    ModelRegistry.register_model("FoxForCausalLM", "hf_longctx.vllm.model:FoxForCausalLM")
    MODELS_CONFIG_MAP["FoxForCausalLM"] = FoxChecks
    for architecture in known:
        if architecture.startswith("Transformers"):  # architectures that run transformers models
            MODELS_CONFIG_MAP[architecture] = not_by_transformers(MODELS_CONFIG_MAP.get(architecture))
    MODEL_ARCH_CONFIG_CONVERTORS[FoxConfig.model_type] = FoxSizes
