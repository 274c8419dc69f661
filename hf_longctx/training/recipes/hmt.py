"""Training of a memory."""

import sys
from pathlib import Path
from typing import Any

from accelerate import PartialState

from ...hmt import HMTConfig, HMTWrapper
from ..loading import load_base, quantization, read_config
from .recipe import Recipe, register_recipe


@register_recipe("hmt")
class HMT(Recipe):
    """Add a memory to a model; to train the memory's recall, run the recipe again on the resulting model.

    The values are those of arXiv 2405.06067, section 4, and its code. The learning rate is that of Llama 2 and Mamba.
    The paper trains Mistral and Yi with 2e-4, and others with 1e-5, in full.
    """

    defaults = """
learning_rate: 1e-4
lr_scheduler_type: constant
lr_decay_every: 100
weight_decay: 0.01
adam_beta2: 0.999
gradient_accumulation_steps: 8
max_steps: 500
lora_target_modules: [q_proj, v_proj]
lora_dropout: 0.1
merge: true
"""
    changes_base = True

    def config(self, args, base):
        """Return the config of an HMT for its next training stage (arXiv 2405.06067, section 4).

        The first stage adds a memory without recall to a backbone. The second stage enables recall in the resulting
        HMT.
        """
        fields = args.config_fields(HMTConfig)
        if base.model_type != "hmt":
            new: dict[str, Any] = {"recall": False, "backbone_name_or_path": args.model}
            memory = HMTConfig(**new | fields)
            if not memory.recall:
                PartialState().print(
                    f"First stage: each segment of {memory.segment_length} tokens receives the memory of the previous one, "
                    "but does not recall earlier segments. For the second stage, repeat the recipe with --model "
                    f"{Path(args.output_dir) / 'model'}.",
                    file=sys.stderr,
                )
            return memory
        for name, value in fields.items():
            if getattr(base, name) != value:
                raise ValueError(
                    f"`{name}` must be {getattr(base, name)!r}, got {value!r}. The first stage of {args.model} used "
                    f"{getattr(base, name)!r}. Remove {name} from --set."
                )
        base.recall = True
        return base

    def load(self, args, config):
        saved = read_config(str(args.model))
        if saved.model_type != "hmt":
            saved.dtype = config.dtype
            return HMTWrapper.from_backbone(load_base(args, saved), config)
        model = HMTWrapper.from_pretrained(args.model, recall=True, dtype=config.dtype, **quantization(args))
        model.memory.float()
        return model

    def modules_to_save(self, model):
        return ["memory"]
