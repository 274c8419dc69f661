"""Continue the training of a model."""

from .recipe import Recipe, register_recipe


@register_recipe("lora")
class Lora(Recipe):
    """Continue the training of any causal language model on new data.

    The values are ours. The schedule and the betas are those of FoX (arXiv 2503.02130, appendix B.1).
    """

    defaults = """
gradient_accumulation_steps: 8
max_steps: 500
warmup_steps: 0.05
"""
