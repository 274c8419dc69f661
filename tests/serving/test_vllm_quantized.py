"""Quantized checkpoints: large matrices are int8 in vLLM, gates and token shifts are what the checkpoint has."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from served_fox import difference, engine, generate, prompts, save_fox
from torch import nn


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
INT8 = dict(num_bits=8, type="int", symmetric=True)
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": INT8 | dict(strategy="channel", dynamic=False),
            "input_activations": INT8 | dict(strategy="token", dynamic=True),
        }
    },
}


def rounded(x):
    """int8 values and scales of the rows of a matrix."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round().clamp(-128, 127), scale


def quantize(model, folder):
    """Write the linear layers of the folder as int8, and give the model their values; its inputs are rounded too."""
    weights = load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            values, scale = rounded(module.weight.data)
            module.weight.data = values * scale
            weights |= {f"{name}.weight": values.to(torch.int8), f"{name}.weight_scale": scale}
            module.register_forward_pre_hook(lambda module, inputs: torch.mul(*rounded(inputs[0])))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SCHEME}))


def dtypes_and_methods(model):
    """Return the dtypes of parameters and the quantization methods of linear layers of a model in vLLM."""
    methods = {name: type(getattr(module, "quant_method", None)).__name__ for name, module in model.named_modules()}
    return {name: parameter.dtype for name, parameter in model.named_parameters()}, methods


def test_int8_weights(tmp_path):
    exact = save_fox("pro, grouped heads, yarn", tmp_path)
    model = save_fox("pro, grouped heads, yarn", tmp_path)
    quantize(model, tmp_path)
    with engine(tmp_path, block_size=32) as llm:
        ((dtypes, methods),) = llm.apply_model(dtypes_and_methods)
        outputs = generate(llm, prompts(20, 150, 200), prompt_logprobs=0)
    layer = "model.layers.0.self_attn"
    for name in ("f_proj.weight", "f_proj.bias", "k_shift_proj.weight", "v_shift_proj.weight"):
        assert dtypes[f"{layer}.{name}"] == torch.float32
    for name in ("qkv_proj", "o_proj", "g_proj"):
        assert methods[f"{layer}.{name}"] == "CompressedTensorsLinearMethod"
    # an activation in the middle between two integers may be rounded to either
    assert difference(model, outputs)[1] < 0.2 * difference(exact, outputs)[1]
