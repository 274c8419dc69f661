"""What users of the RoPE bound get wrong: each row is refused with one clear error, or changes no number."""

import dataclasses

import pytest
import torch
import transformers as tf
from mistakes import harmless, refused

from hf_longctx.metrics.evaluate_modules import check_bases, check_model
from hf_longctx.metrics.rope.measure import rope_report


SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
SCALED = {
    **{"factor": 4.0, "original_max_position_embeddings": 128, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
}
NAN, INF = float("nan"), float("inf")


def llama(**settings):
    """A configuration as a file may hold it, past the checks of transformers."""
    config = tf.LlamaConfig(**SIZES, max_position_embeddings=512, rope_parameters=rope())
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config


def rope(rope_type="default", **parameters):
    return {"rope_type": rope_type, "rope_theta": 300.0, **parameters}


def without(name, parameters):
    return {key: value for key, value in parameters.items() if key != name}


class Remote(tf.PreTrainedConfig):
    """As code on the Hub writes it."""

    model_type = "remote"


def remote(**settings):
    config = Remote(rope_theta=300.0)
    for name, value in {**SIZES, "max_position_embeddings": 512, **settings}.items():
        setattr(config, name, value)
    return config


def report(config, **options):
    return lambda: rope_report(config, minimum_base=False, **options)


def numbers(config, **options):
    """All that the report of a configuration says in numbers."""
    (group,) = rope_report(config, minimum_base=False, **options).groups
    return [value for value in dataclasses.astuple(group) if isinstance(value, (int, float))]


BASES = [
    refused(f"base {base!r}", report(llama(rope_parameters=rope(rope_theta=base))), says)
    for base, says in {
        -5.0: "base is -5.0; RoPE needs a finite base above 1",
        0: "base is 0;",
        1.0: "base is 1.0;",
        NAN: "base is nan;",
        INF: "base is inf;",
        "10000": "base is '10000'",
        None: "names no base: rope_theta is missing",
    }.items()
]
ROTATING = [
    refused(f"partial_rotary_factor {share!r}", report(llama(rope_parameters=rope(partial_rotary_factor=share))), says)
    for share, says in {
        0: "partial_rotary_factor is 0 and head_dim 16; their product must be an even number",
        -0.5: "partial_rotary_factor is -0.5",
        1.5: "partial_rotary_factor is 1.5",
        0.7: "partial_rotary_factor is 0.7",
        "half": "partial_rotary_factor is 'half'",
        NAN: "partial_rotary_factor is nan",
    }.items()
] + [
    refused(f"head_dim {size!r}", report(llama(head_dim=size)), f"head_dim.* {size!r}")
    for size in (0, -16, 15, 16.0, "16")
]
SCALING = [
    refused(
        f"{kind} of factor {factor!r}", report(llama(rope_parameters=rope(kind, **{**SCALED, "factor": factor}))), says
    )
    for kind in ("linear", "yarn", "dynamic", "longrope", "llama3", "proportional")
    for factor, says in {
        0: "factor is 0 in",
        -2.0: "factor is -2.0 in",
        "4": "factor is '4' in",
        NAN: "is nan",
    }.items()
] + [
    harmless(
        "yarn of no length, which transformers takes from max_position_embeddings",
        lambda: (
            numbers(llama(rope_parameters=rope("yarn", factor=4.0))),
            numbers(llama(rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=512))),
        ),
    ),
    refused(
        "yarn of length 0",
        report(llama(rope_parameters=rope("yarn", **SCALED | {"original_max_position_embeddings": 0}))),
        "'yarn'",
    ),
    refused(
        "yarn of a length in words",
        report(llama(rope_parameters=rope("yarn", **SCALED | {"original_max_position_embeddings": "128"}))),
        "wrong type",
    ),
    refused(
        "linear without factor", report(llama(rope_parameters=rope("linear"))), "'linear' are not complete.*'factor'"
    ),
    refused(
        "llama3 without low_freq_factor",
        report(llama(rope_parameters=rope("llama3", **without("low_freq_factor", SCALED)))),
        "not complete.*low_freq_factor",
    ),
    refused(
        "longrope of two factors",
        report(llama(rope_parameters=rope("longrope", **SCALED | {"long_factor": [1.0, 2.0]}))),
        "wrong type or length",
    ),
    refused(
        "longrope of a factor 0",
        report(llama(rope_parameters=rope("longrope", **SCALED | {"long_factor": [0.0] * 8}))),
        "its numbers must be positive",
    ),
    refused(
        "a type of another case",
        report(llama(rope_parameters=rope("Yarn"))),
        "'Yarn' is not supported; supported are default, .*yarn",
    ),
    refused("an unknown type", report(llama(rope_parameters=rope("axial"))), "'axial' is not supported"),
    refused("a list of types", report(llama(rope_parameters=rope(["yarn"]))), r"\['yarn'\] is not supported"),
    refused("a number as type", report(llama(rope_parameters=rope(3))), "rope type 3 is not supported"),
    refused(
        "a word as parameters",
        report(llama(rope_parameters="yarn")),
        "rope_parameters is 'yarn'; it must be a dictionary",
    ),
    refused(
        "a list of parameters", report(llama(rope_parameters=[rope()])), "must be a dictionary, or one per layer type"
    ),
    refused("no parameters", report(llama(rope_parameters={})), "no rotary position embedding"),
    refused(
        "empty parameters of a layer type",
        report(llama(rope_parameters={"full_attention": {}})),
        "rope_theta is missing",
    ),
]
LENGTHS = [
    refused(f"max_position_embeddings {length!r}", report(llama(max_position_embeddings=length)), says)
    for length, says in {
        0: "max_position_embeddings is 0 in LlamaConfig; it must be a positive integer",
        512.0: "max_position_embeddings is 512.0",
        "512": "max_position_embeddings is '512'",
        None: "no max_position_embeddings.*pass context_length",
        1: "is 1 .max_position_embeddings.; it must be an integer from 2",
        10**12: "is 1000000000000 .*to 100000000",
    }.items()
] + [
    refused(
        f"context_length {length!r}",
        report(llama(), context_length=length),
        "is .*given.; it must be an integer from 2",
    )
    for length in (0, 1, -8, 10.5, "512", NAN, True, 10**12)
]
LAYERS = [
    refused("no layers", report(llama(num_hidden_layers=0)), "num_hidden_layers is 0"),
    refused("layers in words", report(llama(num_hidden_layers="2")), "num_hidden_layers is '2'"),
    refused(
        "layers that are missing",
        report(Remote(rope_theta=300.0), context_length=9),
        "no num_hidden_layers.*no default",
    ),
    refused("no heads", report(remote(num_attention_heads=0)), "num_attention_heads is 0 in Remote"),
    refused("heads that are missing", report(remote(num_attention_heads=None)), "Remote has no num_attention_heads"),
    refused(
        "layer_types that are one word", report(llama(layer_types="full_attention")), "must be a list with one name"
    ),
    refused("layer_types of numbers", report(llama(layer_types=[0, 1])), r"layer_types is \[0, 1\]"),
    refused("a negative window", report(llama(sliding_window=-4)), "sliding_window is -4; it must be an integer, 2"),
    refused("a window of one token", report(llama(sliding_window=1)), "sliding_window is 1"),
    refused("a window in words", report(llama(sliding_window="8")), "sliding_window is '8'"),
    harmless("a window of 0, which is none", lambda: (numbers(llama(sliding_window=0)), numbers(llama()))),
    harmless("unknown names of layers", lambda: (numbers(llama(layer_types=["dense"] * 2)), numbers(llama()))),
    *[
        harmless(
            f"{name} of remote code",
            lambda name=name: (numbers(remote(**{name: 0.75})), numbers(remote(partial_rotary_factor=0.75))),
        )
        for name in ("rotary_pct", "rope_pct", "rotary_emb_fraction")
    ],
    harmless(
        "a factor where nothing is scaled",
        lambda: (numbers(llama(rope_parameters=rope(factor=4.0))), numbers(llama())),
    ),
]
SUBJECTS = [
    refused(
        "the name of a model",
        lambda: rope_report("someone/model"),
        "got a str; it needs a .*AutoConfig.from_pretrained",
    ),
    refused("no model", lambda: rope_report(None), "got a NoneType"),
    refused("a dictionary", lambda: rope_report({"rope_theta": 1e4}), "got a dict"),
    refused("the class of a config", lambda: rope_report(tf.LlamaConfig), "got a type"),
    refused("a module without config", lambda: rope_report(torch.nn.Linear(2, 2)), "got a Linear"),
    refused("a folder that is not there", lambda: check_model("/nowhere/model"), "/nowhere/model"),
    refused("a number as model", lambda: check_model(3), "got a int"),
]
PAIRS = [
    refused(
        f"a context of {length!r}", lambda length=length: check_bases([1e4], [length], 128), "a context of .* tokens"
    )
    for length in (0, 1, -5, "8", 8.5)
] + [
    refused("more bases than contexts", lambda: check_bases([1e4, 1e4], [8], 128), "got 2 bases for 1 contexts"),
    refused("no bases", lambda: check_bases([], [], 128), "got 0 bases"),
    refused("an odd head_dim", lambda: check_bases([1e4], [8], 127), "head_dim is 127; it must be an even positive"),
    refused("a head_dim in words", lambda: check_bases([1e4], [8], "128"), "head_dim is '128'"),
    refused(
        "a head_dim that no base helps", lambda: check_bases([1e4], [8], 2), "head_dim is 2; its one frequency is 1"
    ),
    refused("a base of NaN", lambda: check_bases([NAN], [8], 128), "base is nan"),
    harmless(
        "a base in words",
        lambda: (check_bases(["1e4"], [9], 8)["context_bounds"], check_bases([1e4], [9], 8)["context_bounds"]),
    ),
]


@pytest.mark.parametrize("mistake", [*BASES, *ROTATING, *SCALING, *LENGTHS, *LAYERS, *SUBJECTS, *PAIRS], ids=str)
def test_mistakes(mistake, record_property):
    record_property("mistake", mistake.check())
