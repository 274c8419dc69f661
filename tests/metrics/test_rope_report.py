"""The report against the golden settings, against transformers' own rotary modules, and against what models do."""

import importlib
import json
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as tf

from hf_longctx.metrics import (
    read_result,
    rope_base_bound,
    rope_context_bound,
    rope_decay,
    rope_inv_freq,
    rope_report,
)


TINY = {
    **{"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512},
    **{"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "num_hidden_layers": 2,
}
ROPES = {
    "default": {},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 128},
    "longrope": {
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 128,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"partial_rotary_factor": 0.75, "factor": 2.0},
}


def rope(name, theta=300.0):
    return {"rope_type": name, "rope_theta": theta, **ROPES[name]}


def llama(rope_parameters=None, **kwargs):
    return tf.LlamaConfig(**{**TINY, **kwargs}, rope_parameters=rope_parameters or rope("default"))


def only(report):
    (group,) = report.groups
    return group


# --- what is computed ---


def test_golden_models(golden):
    for row in json.loads((golden / "rope_bounds.json").read_text())["models"]["rows"]:
        config = llama(
            dict(row["rope_parameters"]), head_dim=row["head_dim"], max_position_embeddings=row["claimed_context"]
        )
        if row["rotary_dim"] + row["non_rotary_dims"] != row["head_dim"]:  # DeepSeek: the rope part of a wider head
            config.qk_head_dim = row["rotary_dim"] + row["non_rotary_dims"]
        group = only(rope_report(config, minimum_base=False))
        assert group.rotary_dim == row["rotary_dim"], row["name"]
        assert group.rotary_only_bound == row["L_theta_rotary_only"], row["name"]
        assert group.context_bound == row["L_theta_with_non_rotary"], row["name"]
        assert group.max_distance == row["claimed_context"] - 1
        if not row["non_rotary_dims"]:
            # some sit so near to 0 that the float32 of transformers' yarn decides: one in 108, one in 17 248
            assert group.negative_distances == pytest.approx(row["n_negative_below_claimed"], abs=1), row["name"]
            assert group.verdict == ("violated" if row["n_negative_below_claimed"] else "holds"), row["name"]


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_the_model_computes_with(name):
    """Glm takes a partial rotary factor for every type; its buffer after a forward at full length is the truth."""
    parameters = {"partial_rotary_factor": 1.0, **rope(name)}
    factor = parameters["partial_rotary_factor"]  # older versions of transformers take it from the argument
    config = tf.GlmConfig(**TINY, head_dim=16, partial_rotary_factor=factor, rope_parameters=parameters)
    model = tf.GlmModel(config)
    model.rotary_emb(torch.zeros(1), torch.arange(512)[None])
    held = model.rotary_emb.inv_freq.double().numpy()
    # frequencies of dynamic scaling at first are those without it
    report = rope_report(model, context_length=512 if name == "dynamic" else None, minimum_base=False)
    group = only(report)
    assert group.rope_type == ("default" if name == "partial" else name)
    assert group.rotary_dim == 2 * np.count_nonzero(held)
    assert group.context_bound == rope_context_bound(inv_freq=np.append(held, np.zeros(8 - len(held))))
    assert group.rotary_only_bound == rope_context_bound(inv_freq=held[held > 0])
    assert bool(report.notes) == (name in ("dynamic", "longrope"))


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_dependent_types_follow_the_context(name):
    config = llama(rope(name), max_position_embeddings=128)
    bounds = [only(rope_report(config, context_length=n, minimum_base=False)).context_bound for n in (100, 2000)]
    assert bounds[0] < bounds[1]


def test_minimum_base_is_eq_18():
    report, bound = rope_report(llama()), rope_base_bound(511, 16)
    group = only(report)
    assert (group.minimum_base, group.settled_base) == (bound.base, bound.settled_base)
    words = " ".join(str(report).split())
    assert f"minimum base {bound.base:g} all bases from {bound.settled_base:g}, up to {16 * bound.base:.2g}" in words
    partial = only(rope_report(llama({**rope("default"), "partial_rotary_factor": 0.75})))
    assert partial.minimum_base == rope_base_bound(511, 12, non_rotary_dims=4).base
    good = only(rope_report(llama({"rope_type": "default", "rope_theta": group.minimum_base})))
    assert (group.verdict, good.verdict) == ("violated", "holds")


@pytest.mark.parametrize(
    "config, reason",
    [
        (tf.GlmConfig(**TINY, head_dim=16, rope_parameters=rope("partial")), "inconclusive: half of the head or more"),
        (tf.GlmConfig(**TINY, head_dim=16, rope_parameters=rope("proportional")), "exponents of its own"),
        (llama(max_position_embeddings=2_000_000), "the search takes minutes beyond 1048576 tokens"),
    ],
    ids=["half at rest", "proportional", "long"],
)
def test_minimum_base_is_left_out_where_it_says_nothing(config, reason):
    before = config.to_json_string()
    report = rope_report(config)
    assert only(report).minimum_base is None and reason in str(report)
    assert config.to_json_string() == before


# --- what is read ---


def test_layer_types_have_their_own_base_and_reach():
    config = tf.Gemma3TextConfig(
        **{**TINY, "num_hidden_layers": 3},
        head_dim=16,
        sliding_window=32,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={"sliding_attention": rope("default", 50.0), "full_attention": rope("linear", 900.0)},
    )
    sliding, full = rope_report(config, minimum_base=False).groups
    found = (sliding.layer_type, sliding.layers, sliding.base, sliding.max_distance)
    assert found == ("sliding_attention", 2, 50.0, 31)
    assert (full.layer_type, full.layers, full.base, full.max_distance) == ("full_attention", 1, 900.0, 511)
    assert sliding.context_bound == rope_context_bound(base=50.0, head_dim=16)
    assert full.context_bound == rope_context_bound(inv_freq=rope_inv_freq(900.0, 16) / 4)
    whole = tf.Gemma3Config(text_config=config.to_dict(), vision_config={"num_hidden_layers": 1})
    assert rope_report(whole, minimum_base=False).groups == (sliding, full)


def test_layers_of_their_own_size():
    """Gemma 4's full attention has wider heads and turns a quarter of them."""
    sliding, full = rope_report(tf.Gemma4TextConfig(), minimum_base=False).groups
    assert (sliding.head_dim, sliding.rotary_dim, full.head_dim, full.rotary_dim) == (256, 256, 512, 128)
    assert (sliding.max_distance, full.max_distance) == (511, 131071)


def test_base_fixed_in_code():
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

    config = tf.GPTJConfig(n_embd=64, n_layer=1, n_head=2, rotary_dim=24, n_positions=512)
    report = rope_report(config, minimum_base=False)
    group = only(report)
    assert (group.head_dim, group.rotary_dim, group.base) == (32, 24, 10_000.0)
    assert "code" in report.notes[0]
    sines = create_sinusoidal_positions(2, 24)[1, :12]
    np.testing.assert_allclose(sines, np.sin(rope_inv_freq(group.base, group.rotary_dim)), rtol=1e-6)


@pytest.mark.parametrize(
    "name, kwargs",
    [
        ("Exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
        ("SmolLM3", {"no_rope_layers": [1, 0]}),
        (
            "Afmoe",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_dense_layers": 2},
        ),
    ],
)
def test_layers_without_rope_are_those_that_do_not_rotate(name, kwargs):
    model = getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**TINY, **kwargs)).eval()
    module = importlib.import_module(type(model).__module__)
    with mock.patch.object(module, "apply_rotary_pos_emb", wraps=module.apply_rotary_pos_emb) as rotate:
        model(input_ids=torch.arange(3, 9)[None])
    groups = rope_report(model, minimum_base=False).groups
    assert sum(group.layers for group in groups if group.rope_type) == rotate.call_count
    assert sum(group.layers for group in groups) == 2


def test_a_model_without_rope_says_so():
    with pytest.raises(ValueError, match=r"does not describe a rotary .*none of its layers"):
        rope_report(tf.SmolLM3Config(**TINY, no_rope_layers=[0, 0]))


# --- results and errors ---


def test_report_reads_well():
    report = rope_report(llama({**rope("default"), "partial_rotary_factor": 0.75}))
    plain = json.loads(report.to_json())
    assert plain == {"metric": "rope", "format": 1} | report.to_dict()
    assert plain["holds"] is False and plain["verdict"] == plain["groups"][0]["verdict"] == "violated"
    words = str(report)
    for part in (
        "LlamaConfig at 512 tokens (max_position_embeddings)",
        "2 full_attention: violated: B_m < 0 at",
        *("RoPE default, base 300", "dimensions that rotate 12 of 16"),
        *(f"B_m >= 0 found up to m = {report.groups[0].context_bound} (", report.caveat),
    ):
        assert " ".join(part.split()) in " ".join(words.split())
    assert max(map(len, words.splitlines())) < 120


# --- verdicts ---


def test_the_worst_group_decides():
    """A group that the bound cannot test hides neither a violation nor the lack of a test."""
    sliding, full = {"rope_type": "default", "rope_theta": 500.0}, rope("partial")
    sizes = dict(TINY, head_dim=16, layer_types=["sliding_attention", "full_attention"])
    for window, verdict, holds in ((32, "inconclusive", None), (512, "violated", False)):
        ropes = {"sliding_attention": sliding, "full_attention": full}
        report = rope_report(tf.Gemma3TextConfig(**sizes, sliding_window=window, rope_parameters=ropes))
        assert (report.verdict, report.passed) == (verdict, holds)
        assert report.summary().startswith(f"{verdict} at 512 tokens") and str(report).count(": holds") == (
            window == 32
        )
        assert report.groups[0].verdict == ("holds" if window == 32 else "violated")


MISTRAL = dict(head_dim=128, max_position_embeddings=32768, sliding_window=None)


def test_a_violation_is_reported_with_the_number_of_distances():
    config = tf.MistralConfig(**{**TINY, **MISTRAL}, rope_parameters=rope("default", 1e6))
    decay = rope_decay(range(32768), base=1e6, head_dim=128)
    (negative,) = (np.flatnonzero(decay < 0).tolist(),)
    report = rope_report(config, minimum_base=False)
    group = only(report)
    assert (group.context_bound + 1, group.last_negative) == (negative[0], negative[-1]) == (27115, 28316)
    assert (group.negative_distances, group.lowest_decay) == (len(negative), round(float(decay.min()), 3))
    words = "B_m < 0 at 4 of 32768 distances (0.012 %), between 27115 and 28316"
    assert words in str(report) and words in report.summary()
    config.max_position_embeddings = 27116
    assert "1 of 27116 distances (0.0037 %), at 27115" in str(rope_report(config, minimum_base=False))


# --- what is assumed ---


def test_linear_scaling_that_is_in_the_length_already():
    """The global layers of Gemma 3 have this scaling."""
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    ropes = {"sliding_attention": rope("default", 1e4), "full_attention": full}
    sizes = {**TINY, "max_position_embeddings": 131072, "layer_types": ["sliding_attention", "full_attention"]}
    report = rope_report(tf.Gemma3TextConfig(**sizes, rope_parameters=ropes), minimum_base=False)
    assert report.claimed_context == 131072 and not any("linear" in note for note in report.notes)


def test_a_bound_within_windows_is_no_pass_over_the_context():
    """Llama 4 and Command R7B rotate in windows only."""
    sizes = {**TINY, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    report = rope_report(tf.Cohere2Config(**sizes, rope_parameters=rope("default", 1e4)), minimum_base=False)
    assert [group.verdict for group in report.groups] == ["holds", "no RoPE"]
    assert report.verdict == report.to_dict()["verdict"] == "holds within windows" and report.holds
    assert report.summary().startswith("holds within windows at 512 tokens")


def test_missing_entry_for_a_layer_type():
    config = tf.Gemma3TextConfig(**TINY, layer_types=["sliding_attention", "full_attention"])
    del config.rope_parameters["full_attention"]
    with pytest.raises(ValueError, match="'full_attention'"):
        rope_report(config)


# --- figures ---


def test_bound_and_claim_are_marked(words, tmp_path):
    """The figure of a saved report marks both, too."""
    rope_report(llama(), minimum_base=False).save(tmp_path / "rope.json")
    violated = read_result(tmp_path / "rope.json")
    figure = words(violated.plot, train_length=256, title="My bound")
    bound = f"{violated.groups[0].context_bound + 1:,}"
    expected = (bound, "needed up to 511", "training: 256", "violated: B_m", "claimed context: 512 tokens", "My bound")
    assert all(text in figure for text in expected) and "dimensions that do not rotate" not in figure
    figure = words(rope_report(llama(rope("partial")), minimum_base=False).plot)
    assert "inconclusive: half of the head" in figure and "0 without the 8 dimensions that do not rotate" in figure


@pytest.mark.parametrize("base, scale", [(50.0, "log"), (1e9, "linear")])
def test_a_bound_far_below_the_claim_is_seen(figures, base, scale):
    """On a linear axis, the bound would be in the first pixels."""
    rope_report(llama(rope("default", base), max_position_embeddings=5000), minimum_base=False).plot("unused")
    assert figures[0].axes[0].get_xscale() == scale


@pytest.mark.usefixtures("figures")
def test_every_distance_is_in_the_picture():
    """A single negative distance between two drawn points is seen."""
    from hf_longctx.metrics.rope.plot import decay_range

    group = only(rope_report(llama(rope("default", 1e4), max_position_embeddings=4096), minimum_base=False))
    decay = rope_decay(range(4000), base=1e4, head_dim=16)
    at, lowest, highest = decay_range(group, np.array([0, 7, 100, 4000]))
    assert at.tolist() == [0, 7, 100]
    np.testing.assert_allclose(lowest, [decay[:7].min(), decay[7:100].min(), decay[100:].min()], atol=1e-9)
    np.testing.assert_allclose(highest, [decay[:7].max(), decay[7:100].max(), decay[100:].max()], atol=1e-9)
