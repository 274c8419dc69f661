"""Extension of the context by a larger RoPE base."""

import sys
from typing import Any

from accelerate import PartialState

from ...metrics.rope.bound import rope_base_bound, rope_context_bound
from .recipe import Recipe, register_recipe


@register_recipe("rope-extend")
class RopeExtend(Recipe):
    """Extend the context with a larger RoPE base, chosen by the bound of Men et al. 2024.

    The values are those of arXiv 2405.14591, section 5 and appendix B.
    """

    defaults = """
learning_rate: 2e-5
lr_scheduler_type: constant_with_warmup
gradient_accumulation_steps: 128
max_steps: 1000
warmup_steps: 0.05
merge: true
"""
    changes_base = True

    def config(self, args, base):
        PartialState().print(extend_rope(base, args), file=sys.stderr)
        return super().config(args, base)

    def load(self, args, config):
        model = super().load(args, config)
        if model.generation_config.max_length is not None:
            # otherwise `generate` would stop at the old context; Llama 2 has such a limit
            model.generation_config.max_length = max(model.generation_config.max_length, args.max_length)
        return model

    def modules_to_save(self, model):
        """Return the norms and the input embeddings, as in arXiv 2309.12307."""
        embeddings = model.get_input_embeddings()
        names = set()
        for name, module in model.named_modules():
            if module is embeddings or "norm" in type(module).__name__.lower():
                names.add(name.rpartition(".")[2])
        return sorted(names)


def extend_rope(config, args: Any) -> str:
    """Extend a config's context to `max_length`, and choose a RoPE base above the bound for this context.

    A longer context in the config is retained. The bound on the base is eq. 18 of arXiv 2405.14591. We write the base
    that was checked, which has three significant digits.

    Returns:
        a one-line description of the change.

    Raises:
        ValueError: the model does not have exactly one unscaled RoPE base, or this base already suffices.
    """
    rope = getattr(config, "rope_parameters", None)
    if not rope or "rope_theta" not in rope or rope.get("rope_type", "default") != "default":
        raise ValueError(f"--recipe rope-extend requires a model with one unscaled RoPE base, got {rope}.")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    claimed, old = config.max_position_embeddings, rope["rope_theta"]
    context = max(args.max_length, claimed)
    reach = rope_context_bound(base=old, head_dim=head_dim)
    # `reach` is a distance between tokens, so the matching context is one token longer.
    if args.max_length <= claimed and (reach is None or reach >= claimed - 1):
        raise ValueError(
            f"--max_length {args.max_length} does not extend the context of {claimed} tokens. The RoPE base {old:g} "
            "already suffices for this context. Give a larger --max_length, or --recipe lora."
        )
    bound = rope_base_bound(context - 1, head_dim)
    rope["rope_theta"] = bound.settled_base or bound.base
    config.max_position_embeddings = context
    return (
        f"RoPE base: {old:g} (reaches {reach} tokens) -> {rope['rope_theta']:g}; {context} tokens need at least "
        f"{bound.base:.0f}"
    )
