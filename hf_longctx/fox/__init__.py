"""The Forgetting Transformer (FoX).

`save_pretrained` copies the files `*_fox.py` next to the weights. A folder can therefore be loaded without hf-longctx:
`AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`.
"""

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import modeling_fox
from .configuration_fox import FoxConfig
from .convert import from_fla, from_llama, from_official, to_fla, to_official
from .convert_folder import convert_folder
from .modeling_fox import *  # noqa: F403
from .operator import forgetting_attention, forgetting_attention_ref
from .plot import HeadMap, head_maps
from .pruning import PrunedCache


transformers.AutoConfig.register("fox", FoxConfig, exist_ok=True)
FoxConfig.register_for_auto_class()
for auto_class, name in modeling_fox.AUTO_MAP.items():
    model_class = getattr(modeling_fox, name.removeprefix("modeling_fox."))
    getattr(transformers, auto_class).register(FoxConfig, model_class, exist_ok=True)
    model_class.register_for_auto_class(auto_class)
# with label smoothing, Trainer shifts the labels of the models in this dict only
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["fox"] = "FoxForCausalLM"

__all__ = [
    "FoxConfig",
    "HeadMap",
    "PrunedCache",
    "convert_folder",
    "forgetting_attention",
    "forgetting_attention_ref",
    "from_fla",
    "from_llama",
    "from_official",
    "head_maps",
    "to_fla",
    "to_official",
]
__all__ += modeling_fox.__all__
