"""The window of each layer: the report and the masks of tiny models; the fields of unknown model types."""

import pytest
import torch
import transformers as tf
from transformers.masking_utils import eager_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from hf_longctx.metrics import rope_report
from hf_longctx.metrics.rope.config import read_source, with_rope_parameters
from hf_longctx.metrics.rope.layers import layer_groups


TOKENS, WINDOW = 24, 8
TINY = {
    **{"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64},
    **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8},
    **{"num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
    **{"topk_group": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"index_topk": 64, "index_n_heads": 2, "index_head_dim": 8, "mamba_n_heads": 8, "mamba_d_head": 8},
}
SETTINGS = {  # settings of the file, even if the config class of the type does not define them
    "flat": {
        **{"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2},
        **{"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1, 1]},
    },
    "layer types": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
}


@pytest.fixture
def seen(monkeypatch):
    """Return the largest distance from a query to a key, keyed by layer index."""
    found = {}

    def attend(module, query, key, value, attention_mask, **options):
        queries, keys = query.shape[2], key.shape[2]
        distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
        found[module.layer_idx] = int(distance[attention_mask[0, 0] == 0].max())
        return query.new_zeros(len(query), queries, query.shape[1], value.shape[-1]), None

    tf.AttentionInterface.register("spy", attend)
    tf.AttentionMaskInterface.register("spy", eager_mask)
    yield found
    for registry in (tf.AttentionInterface, tf.AttentionMaskInterface):
        del registry._global_mapping["spy"]


def tiny_model(kind, settings):
    """Build a small model. If its sizes do not follow from those of TINY, return None."""
    config_class = CONFIG_MAPPING[kind]
    fields = {*getattr(config_class, "__dataclass_fields__", {}), *getattr(config_class, "attribute_map", {})}
    try:
        config = config_class(**{name: value for name, value in TINY.items() if name in fields}, **settings)
        with torch.device("meta"):
            size = sum(weight.numel() for weight in tf.AutoModel.from_config(config).parameters())
        model = tf.AutoModel.from_config(config, attn_implementation="spy").eval() if size < 1e7 else None
        model(input_ids=torch.arange(3, 3 + TOKENS)[None], use_cache=False)
    except Exception:  # other sizes, other inputs, or another attention interface
        return None
    return model


def reaches(config):
    """Return the windows that the report uses, keyed by layer index."""
    source = read_source(config)
    with_rope_parameters(source)
    groups = layer_groups(source)
    return {i: min(TOKENS - 1, group.reach or TOKENS) for group, at in groups.items() for i in at}


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_windows_are_those_of_the_masks(seen, settings):
    """For every type that can be built: a setting of the file counts if and only if it changes the masks.

    DeepSeek-V4's masks also contain compressed keys.
    """
    checked = []
    for kind in sorted({*CONFIG_MAPPING_NAMES} - {"deepseek_v4"}):
        fields = getattr(CONFIG_MAPPING[kind], "__dataclass_fields__", {}).keys()
        if not fields >= {"vocab_size", "rope_parameters", "num_attention_heads"}:
            continue
        seen.clear()
        model = tiny_model(kind, settings)
        if model is None or not seen:
            continue
        found = reaches(model.config)
        assert {i: found[i] for i in seen} == seen, kind
        checked.append(kind)
    assert {"llama", "mistral", "gemma3_text", "gpt_oss"} <= {*checked} and len(checked) > 60


# --- model types that transformers does not support ---


UNKNOWN = {
    **{"model_type": "new", "hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128},
    **{"num_hidden_layers": 8, "max_position_embeddings": 262144, "rope_theta": 1e6},
}
ALL = [262143] * 8


def spelled(*windowed, reach=127, **fields):
    """A config with a window of 128, and the expected distances: `reach` in some layers, else the whole context."""
    expected = [reach if i in windowed else ALL[i] for i in range(8)]
    return pytest.param({"sliding_window": 128, **fields}, expected, id="-".join(fields))


@pytest.mark.parametrize(
    "fields, expected",
    [
        spelled(1, 2, 3, 5, 6, 7, hybrid_layer_pattern=[0, 1, 1, 1, 0, 1, 1, 1]),
        spelled(0, 1, 2, 4, 5, 6, sliding_window_pattern=4),
        spelled(0, 1, 2, 4, 5, 6, sliding_window_pattern="LLLG"),
        spelled(0, 2, 4, 6, sliding_window_pattern=["local", "global"]),
        spelled(0, 2, 4, 6, sliding_window_pattern=[True, False] * 4),
        spelled(0, 1, 2, 4, 5, 6, layer_switch=4, order_of_interleaved_layers="local_attn_first"),
        spelled(1, 2, 3, 5, 6, 7, global_attn_every_n_layers=4),
        spelled(4, 5, 6, 7, use_sliding_window=True, max_window_layers=4),
        spelled(use_sliding_window=False, max_window_layers=4),
        spelled(use_sliding_window=0, max_window_layers=4),
        spelled(use_sliding_window=False, layer_types=["sliding_attention"] * 8),
        spelled(1, 3, sliding_window_layers=[1, 3]),
        spelled(1, 3, local_layer_ids=[1, 3], sliding_window=None, sliding_window_size=128),
        spelled(1, 2, 3, 4, 5, 6, global_attn_idx=[0, 7]),
        spelled(1, 3, layer_types=["full_attention", "swa"] * 2 + ["global"] * 5),
        spelled(1, 2, 3, 5, 6, 7, sliding_window=[None, 128, 128, 128]),
        spelled(2, 3, swa_layers=[2, 3], sliding_window=None, sliding_window_list=[128, 128]),
        spelled(
            0, 1, reach=63, layer_types=["chunked_attention"] * 2 + ["full_attention"] * 6, attention_chunk_size=64
        ),
        spelled(attention_chunk_size=64, sliding_window=None),
        spelled(sliding_window=-1, layer_types=["full_attention"] * 8),
        spelled(0, 7, compress_ratios=[0, 4, 128, 4, 128, 4, 128, 0, 0]),
    ],
)
def test_layers_with_a_window_in_every_spelling(fields, expected):
    source = read_source({key: value for key, value in {**UNKNOWN, **fields}.items() if value is not None})
    with_rope_parameters(source)
    found = {i: group.reach for group, at in layer_groups(source).items() for i in at}
    assert [ALL[0] if found[i] is None else found[i] for i in range(8)] == expected
    assert not any("we assume" in note or "not read" in note for note in source.notes) or "order" in str(fields)


@pytest.mark.parametrize(
    "fields, note",
    [
        (
            {"sliding_window": 4096},
            "sets sliding_window = 4096, but not the layers that use it; we assume full attention",
        ),
        ({"window_size": 4096, "swa_every": 2}, "sets window_size = 4096, but not the layers that use it"),
        (
            {"layer_types": ["sliding_attention"] * 8},
            "does not set the window of sliding_attention layers; we assume full",
        ),
        ({"sliding_window_stride": 4}, "not read: sliding_window_stride"),
        ({"swa_head_dim": 64}, "not read: swa_head_dim"),
    ],
)
def test_a_window_without_its_layers_is_an_assumption(fields, note):
    """The base is too small for the whole context, and large enough for the window."""
    report = rope_report({**UNKNOWN, **fields}, minimum_base=False)
    assert report.verdict == "violated" and any(note in found for found in report.notes), report.notes


def test_code_that_ignores_a_window_is_named():
    report = rope_report({**UNKNOWN, "model_type": "llama", "sliding_window": 4096}, minimum_base=False)
    assert report.verdict == "violated" and report.passed is False
    assert report.notes == ("the code of llama in transformers ignores sliding_window = 4096",)
    flash = {**UNKNOWN, "model_type": "minimax", "sliding_window": 128, "layer_types": None}
    assert {group.max_distance for group in rope_report(flash, minimum_base=False).groups} == {127}


@pytest.mark.parametrize(
    "fields, without",
    [
        ({"no_rope_layers": [1, 1, 1, 0] * 2}, {3, 7}),
        ({"nope_layers": [3, 7]}, {3, 7}),
        ({"nope_layers": [False, False, False, True] * 2}, {3, 7}),
        ({"use_rope_layers": [1, 1, 1, 0] * 2 + [1]}, {3, 7}),
        ({"no_rope_layer_interval": 4}, {3, 7}),
    ],
    ids=lambda fields: "-".join(map(str, fields)),
)
def test_layers_without_rope_in_every_spelling(fields, without):
    source = read_source({**UNKNOWN, **fields})
    with_rope_parameters(source)
    assert {i for group, at in layer_groups(source).items() for i in at if not group.base} == without
    assert not any("not read" in note for note in source.notes)


def test_layer_types_with_their_own_base_and_scaling():
    """MiMo and Gemma 3 give windowed layers a smaller base; Step 3.5 has a list."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 65536}
    kinds = ["full_attention", "sliding_attention"] * 4
    for fields in (
        {"swa_rope_theta": 1e4, "hybrid_layer_pattern": [0, 1] * 4},
        {"rope_local_base_freq": 1e4, "layer_types": kinds},
        {"rope_theta": [1e6, 1e4] * 4 + [1e6], "layer_types": kinds, "yarn_only_types": ["full_attention"]},
    ):
        report = rope_report({**UNKNOWN, "sliding_window": 128, "rope_scaling": scaling, **fields}, minimum_base=False)
        found = [(group.layer_type, group.base, group.rope_type, group.max_distance) for group in report.groups]
        assert found == [("full_attention", 1e6, "yarn", 262143), ("sliding_attention", 1e4, "default", 127)]
        assert not any("not read" in note for note in report.notes)


V4 = {
    **{"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512},
    **{"qk_rope_head_dim": 64, "num_hidden_layers": 4, "max_position_embeddings": 1048576, "sliding_window": 128},
    **{"rope_theta": 10000, "compress_rope_theta": 160000, "compress_ratios": [0, 128, 4, 128, 0]},
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
}


def test_deepseek_v4_under_another_name():
    """Layers with compressed keys reach the whole context with a scaled base of their own; others do not."""
    known, other = (
        rope_report({**V4, "model_type": kind}, minimum_base=False) for kind in ("deepseek_v4", "deepseek_ref")
    )
    assert other.groups == known.groups and other.verdict == known.verdict == "inconclusive"
    sliding, heavy, sparse = known.groups
    assert (sliding.max_distance, sliding.base, sliding.rope_type) == (127, 10000, "default")
    assert (heavy.max_distance, heavy.base, heavy.rope_type) == (1048575, 160000, "yarn")
    assert (sparse.head_dim, sparse.rotary_dim, sparse.layers, heavy.layers) == (512, 64, 1, 2)


MISTRAL = {"original_max_position_embeddings": 16384, "factor": 16, "alpha": 1, "beta": 4, "apply_scale": False}


@pytest.mark.parametrize(
    "fields, truncate",
    [
        ({"yarn": MISTRAL, "max_position_embeddings": 262144}, True),
        ({"rope_factor": 16, "original_seq_len": 16384, "beta_fast": 4, "beta_slow": 1, "max_seq_len": 262144}, True),
        (
            {"rope_scaling_factor": 16.0, "initial_context_length": 16384, "rope_ntk_alpha": 1, "rope_ntk_beta": 4},
            False,
        ),
    ],
    ids=["Mistral's params.json", "DeepSeek's inference/config.json", "gpt-oss's original/config.json"],
)
def test_yarn_in_files_of_other_formats(fields, truncate):
    sizes = {"dim": 4096, "n_layers": 2, "head_dim": 128, "n_heads": 32, "rope_theta": 1e6}
    same = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 16384, "beta_fast": 4, "beta_slow": 1}
    report = rope_report({**sizes, **fields}, minimum_base=False)
    config = {**UNKNOWN, "model_type": "llama", "num_hidden_layers": 2, "rope_scaling": same | {"truncate": truncate}}
    assert report.groups == rope_report(config, minimum_base=False).groups
    assert not any("not read" in note for note in report.notes)


def test_command_r7b_applies_rope():
    """Its config.json names the position embedding of GPT-J, which is RoPE in interleaved order."""
    published = {"layer_switch": 4, "order_of_interleaved_layers": "local_attn_first", "rotary_pct": 1.0}
    config = {**UNKNOWN, **published, "model_type": "cohere2", "sliding_window": 4096, "sliding_window_pattern": 4}
    report = rope_report({**config, "position_embedding_type": "rope_gptj"}, minimum_base=False)
    assert [group.layers for group in report.groups] == [6, 2] and report.verdict == "holds within windows"
