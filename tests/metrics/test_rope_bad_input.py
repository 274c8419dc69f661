"""Mistakes of users of the RoPE bound: each row raises one clear error, or does not change any number."""

import dataclasses
from functools import partial

import pytest
import transformers as tf
from mistakes import harmless, refused

from hf_longctx.metrics import rope_base_bound, rope_decay, rope_report


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama(**settings):
    """Return a config as in a file, without the checks of transformers."""
    config = tf.LlamaConfig(**SIZES, max_position_embeddings=512, rope_parameters=rope())
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


def rope(rope_type="default", **parameters):
    return {"rope_type": rope_type, "rope_theta": 300.0, **parameters}


class Remote(tf.PreTrainedConfig):
    """A config class like those of code on the Hub."""

    model_type = "remote"


def remote(**settings):
    config = Remote(rope_theta=300.0)
    for name, value in {**SIZES, "max_position_embeddings": 512, **settings}.items():
        setattr(config, name, value)
    return config


def json_of(**settings):
    """Return the content of a config.json of an unknown model type."""
    return {"model_type": "new", **SIZES, "max_position_embeddings": 512, "rope_theta": 300.0, **settings}


def report(config, **options):
    return lambda: rope_report(config, minimum_base=False, **options)


def numbers(config):
    """Return all numbers in the report of a config."""
    (group,) = rope_report(config, minimum_base=False).groups
    return [value for value in dataclasses.astuple(group) if isinstance(value, (int, float))]


PARAMETERS = [
    refused(f"{name} RoPE with {parameters}", report(llama(rope_parameters=rope(name, **parameters))), message)
    for name, parameters, message in (
        ("default", {"rope_theta": 0.5}, "base must be a finite number above 1, got 0.5"),
        ("default", {"rope_theta": "10000"}, "base must .* got '10000'"),
        ("default", {"rope_theta": [1e4, 1e6]}, "base must be a finite number above 1, got .10000.0, 1000000.0."),
        ("default", {"partial_rotary_factor": 0.7}, "an even number from 2 to 16, got 0.7 . 16"),
        ("linear", {}, "'linear' are not complete.*'factor'"),
        ("linear", {"factor": 0}, "All numbers must be positive"),
        ("linear", {"factor": 2.0, "zeta": 1.0}, "linear RoPE of llama does not use .*rope_parameters: zeta"),
        ("dynamic", {"factor": 1.0, "alpha": 8.0}, "does not use .*rope_parameters: alpha"),
    )
]
CONFIGS = [
    refused("no context", report(llama(max_position_embeddings=None)), "set max_position_.*Pass context_length"),
    refused("a context that takes days", report(llama(), context_length=10**12), "must be at most 100000000 tokens"),
    refused("no layers", report(Remote(rope_theta=300.0), context_length=9), "must set num_hidden_layers. The bound"),
    *[
        refused(f"{name} = {value!r}", report(json_of(**{name: value})), message)
        for name, value, message in (
            ("sliding_window", 1, "sliding_window must be at least 2, got 1"),
            ("layer_types", ["full_attention"], "layer_types must be a list with the type of each of 2 layers"),
            ("rope_scaling", {"type": "linear", "factor": "4"}, "a value of the wrong type or size"),
            ("rope_scaling", {"type": "ntk", "factor": 4.0}, "rope_type must be one of default, .* got 'ntk'"),
            ("rope_scaling", "yarn", "rope_parameters must be a JSON object, got 'yarn'"),
            ("rope_theta", [1e4], "rope_theta must be one number, or a list with the same number for all layers"),
            ("rope_theta", [1e4, 1e6], "rope_theta must be one number, or a list with the same number for all layers"),
            ("hybrid_layer_pattern", [0, 2], "hybrid_layer_pattern must contain 1 for each layer with a window and 0"),
            ("sliding_window_pattern", "LX", "sliding_window_pattern must contain 1 for each layer with a window"),
            ("use_sliding_window", "false", "use_sliding_window must be true or false, got 'false'"),
            ("sliding_window_layers", 1, "sliding_window_layers must be a list of layer indices, got 1"),
            ("use_rope_layers", [1], "use_rope_layers must contain 0 or 1 for each of 2 layers, got .1."),
            ("compress_ratios", [0], "compress_ratios must be a list with the ratio of each of 2 layers, got .0."),
        )
    ],
    refused(
        "rotated dimensions of another size than the head's",
        report({"model_type": "longcat_flash", "qk_rope_head_dim": 8, "qk_nope_head_dim": 16}),
        "head_dim must be at most the size of a query head, got 64 rotated dimensions in heads of 24",
    ),
    refused("a tokenizer", report(None), "must be a PreTrainedModel, .*or the name of a model, got a NoneType"),
    refused("a new type without RoPE", report({"model_type": "new", **SIZES}), "not know the model type 'new'"),
    harmless("a window of 0, which is none", lambda: (numbers(llama(sliding_window=0)), numbers(llama()))),
    harmless(
        "yarn without a length, which transformers takes from max_position_embeddings",
        lambda: (
            numbers(llama(rope_parameters=rope("yarn", factor=4.0))),
            numbers(llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=512))),
        ),
    ),
    harmless(
        "rotary_pct of remote code",
        lambda: (numbers(remote(rotary_pct=0.75)), numbers(remote(partial_rotary_factor=0.75))),
    ),
]
BOUNDS = [
    refused("an odd head_dim", lambda: rope_decay(1, base=1e4, head_dim=127), "an even positive integer, got 127"),
    *[
        refused(f"frequencies of {options}", partial(rope_decay, 1, **options), "Give either base and head_dim")
        for options in ({"base": 10.0}, {"base": 9.0, "head_dim": 4, "inv_freq": [1.0]})
    ],
    refused("a table of frequencies", lambda: rope_decay(1, inv_freq=[[1.0]]), r"got an array of shape \(1, 1\)"),
    refused("minutes", lambda: rope_base_bound(10**12, 128), "context_length must be at most 100,000,000"),
    refused("a head_dim that no base helps", lambda: rope_base_bound(10, 2), "head_dim must be at least 4, got 2"),
    refused("half a pair at rest", lambda: rope_base_bound(9, 8, non_rotary_dims=3), "an even integer >= 0, got 3"),
]


@pytest.mark.parametrize("mistake", [*PARAMETERS, *CONFIGS, *BOUNDS], ids=str)
def test_mistakes(mistake):
    mistake.check()


def test_a_config_file_that_holds_null_is_named(tmp_path):
    (tmp_path / "config.json").write_text("null")
    with pytest.raises(ValueError, match="the config contains a value of the wrong type"):
        rope_report(str(tmp_path))
