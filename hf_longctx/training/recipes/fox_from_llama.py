"""Conversion of a Llama to a FoX."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...fox.configuration_fox import FoxConfig
from ...fox.convert import read_llama_config
from ...fox.modeling_fox import FoxForCausalLM, FoxForgetGate, decay_time_bias
from ..trainer import GATE
from .recipe import Recipe, register_recipe


@register_recipe("fox-from-llama")
class FoxFromLlama(Recipe):
    """Convert a Llama, Mistral, Qwen2 or Qwen3 to a Forgetting Transformer and train its gates.

    The values are ours. Gates start almost open, where Adam's epsilon swallows their gradient, so their learning rate
    is larger.
    """

    defaults = """
gradient_accumulation_steps: 8
max_steps: 500
warmup_steps: 0.05
gate_lr_ratio: 100
merge: true
"""
    options = ("decay_time",)
    changes_base = True

    def config(self, args, base):
        values, quantized = base.to_dict(), getattr(base, "quantization_config", None)
        # the default decay time depends on the claimed context, which `set` may change
        values |= {name: value for name, value in args.config_fields(FoxConfig).items() if name in values}
        config = super().config(args, read_llama_config(values | {"quantization_config": None}, args.decay_time))
        if quantized is not None:
            config.quantization_config = quantized
        return config

    def load(self, args, config):
        with gates_may_be_missing():
            model = super().load(args, config)
        open_gates(model)
        return model

    def modules_to_save(self, model):
        return ["f_proj"]


@contextmanager
def gates_may_be_missing() -> Iterator[None]:
    """Make transformers load a FoX without gates. It then does not report them as missing weights."""
    FoxForCausalLM._keys_to_ignore_on_load_missing = [GATE.pattern]
    try:
        yield
    finally:
        del FoxForCausalLM._keys_to_ignore_on_load_missing


@torch.no_grad()
def open_gates(model: Any) -> None:
    """Initialize the forget gates as `from_llama` does. The gates are float32, whatever the model's dtype."""
    times = model.config.decay_time_min, model.config.decay_time_max
    for module in model.modules():
        if isinstance(module, FoxForgetGate):
            module.float()
            module.weight.zero_()
            module.bias.copy_(decay_time_bias(len(module.bias), *times))
