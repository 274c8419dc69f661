"""Streams: any chunking, branching, saving and restoring gives the result of one piece."""

import json
from pathlib import Path

import pytest
import torch
from demo_model import DEMO
from safetensors import safe_open
from safetensors.torch import save_file
from streams import CHUNKS, assert_calls_do_not_matter, saved_and_loaded, stream
from tiny_hmt import ROUNDING, tiny_llama

from hf_longctx.hmt import HMTState, HMTWrapper


SETTINGS = [
    {},
    {"sum_fraction": 0.9},
    {"recall": False},
    {"reread": True},
    {"memory_size": None},
    {"recall_tokens": 4},
    {"neural_cache_weight": 0.2, "recall_tokens": 4},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_streams_do_not_depend_on_the_calls(make_wrapper, tmp_path, settings):
    model = make_wrapper(**settings)
    for seed, gradients in enumerate((False, False, True)):
        with torch.set_grad_enabled(gradients):
            assert_calls_do_not_matter(model, tmp_path, seed)


@pytest.mark.parametrize(
    "settings, chunks",
    [
        ({}, [13, 8, 3, 16, 3]),
        ({}, [16, 16, 8, 3]),
        ({"recall": False, "memory_tokens": 2}, [13, *CHUNKS["one by one"][13:]]),
    ],
    ids=str,
)
def test_paper_mode_streams(make_wrapper, tokens, tmp_path, settings, chunks):
    """The query of a segment is complete after 4 tokens. Padding in the open segment is saved with the state."""
    model, mask = make_wrapper(recall_mode="paper", **settings), torch.ones_like(tokens)
    mask[0, :10] = 0
    whole = model(tokens, attention_mask=mask, use_cache=True)
    logits, state = stream(model, tokens, chunks, mask, lambda state: saved_and_loaded(state, model, tmp_path))
    torch.testing.assert_close(logits, whole.logits, atol=ROUNDING, rtol=0)
    for name, value in whole.state.tensors().items():
        torch.testing.assert_close(state.tensors()[name], value, atol=ROUNDING, rtol=0)


def test_memory_does_not_grow(make_wrapper, tokens):
    model = make_wrapper()
    with torch.no_grad():
        _, state = stream(model, tokens.repeat(1, 8), [43] * 7 + [41])
    assert state.memory["bank"]["embeddings"].shape == (2, 4, 16)
    assert sum(x.numel() for x in state.tensors().values()) < 2 * (4 * 16 + 4 + 3 * 16 + 2 * 3 + 2 * 8 + 1)
    assert state.kv_cache.get_seq_length() <= model.config.positions_per_segment


@torch.no_grad()
def test_rows_that_close_segments_in_turn_take_no_more_columns(make_wrapper, tokens):
    model, mask = make_wrapper(memory_size=None), torch.ones_like(tokens)
    mask[1, :3] = 0
    _, state = stream(model, tokens, CHUNKS["one by one"], mask)
    assert state.memory["bank"]["ends"].shape[1] == 5


@torch.no_grad()
def test_copies_of_a_row_share_its_memory(make_wrapper, tokens):
    """Otherwise, beam search would copy the memories with each token."""
    state = make_wrapper()(tokens, use_cache=True).state
    beams = state.select_rows([1, 1, 1])
    own, bank = (x.memory["bank"]["embeddings"] for x in (state, beams))
    beams.reorder_cache(torch.tensor([2, 0, 0]))
    shared = beams.memory["bank"]["embeddings"]
    assert bank.data_ptr() == shared.data_ptr() and bank.untyped_storage().nbytes() == 4 * 16 * 8
    assert torch.equal(shared, own[[1, 1, 1]]) and torch.equal(beams.open_ids, state.open_ids[[1, 1, 1]])
    beams.reorder_cache(torch.tensor([1, 2]))
    assert beams.memory["bank"]["embeddings"].shape == (2, 4, 16)


def test_a_state_of_another_model_is_refused(make_wrapper, tokens):
    state = make_wrapper()(tokens, use_cache=True).state
    for name, value in {"segment_length": 9, "reread": True, "recall_mode": "paper"}.items():
        with pytest.raises(ValueError, match=rf"from a model with other settings.*'{name}'.*'{name}': {value!r}"):
            make_wrapper(**{name: value})(tokens, state=state)
    wider = HMTWrapper.from_backbone(tiny_llama(head_dim=4), make_wrapper().config)
    narrow = state.map(lambda x: x[..., :4] if x.dtype.is_floating_point else x)
    narrow.signature = {**state.signature, "width": 4}
    with pytest.raises(ValueError, match=r"'width': 4.*'width': 16"):
        wider(tokens, state=narrow)


def test_a_file_of_other_weights_is_refused(make_wrapper, tokens, tmp_path):
    file, model = tmp_path / "state.safetensors", make_wrapper()
    model(tokens, use_cache=True).state.save(file, model)
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    for dtype in (torch.float32, torch.bfloat16):
        HMTState.load(file, HMTWrapper.from_pretrained(tmp_path, dtype=dtype))
    for parameter in (model.memory.wq, model.get_input_embeddings().weight):
        with torch.no_grad():
            parameter *= 1.01
        with pytest.raises(ValueError, match="saved by a different model"):
            HMTState.load(file, model)
    assert HMTState.load(file, None).position == 43


DAMAGE = {
    "hmt_state": [None, "[" * 10**5, "x"],
    "signature": ["3"],
    "weights": [None],
    "unknown": [torch.ones(1)],
    "memory.other.ends": [torch.ones(1)],
    "tail": [None, torch.ones(2, 5, dtype=torch.long)],
    "lengths": [3, [], [43], [43, 44], [3, 3]],
    "retrievers": [["unknown"]],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in DAMAGE.items() for value in values])
def test_a_damaged_file_is_refused(name, value, make_wrapper, tokens, tmp_path):
    file, model = tmp_path / "state.safetensors", make_wrapper(memory_size=2)
    model(tokens, use_cache=True).state.save(file, model)
    with safe_open(file, "pt") as saved:
        metadata, tensors = saved.metadata(), {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
    header = json.loads(metadata["hmt_state"])
    if name in header:
        header[name] = value
    metadata["hmt_state"] = json.dumps(header)
    contents = {k: x for k, x in {**metadata, **tensors, name: value}.items() if isinstance(x, str | torch.Tensor)}
    strings = {k: x for k, x in contents.items() if isinstance(x, str)}
    save_file({k: x for k, x in contents.items() if k not in strings}, file, metadata=strings)
    with pytest.raises(ValueError, match=r"is not a complete file written by HMTState\.save"):
        HMTState.load(file, model)


@torch.no_grad()
def test_states_of_earlier_versions_are_continued():
    model = HMTWrapper.from_pretrained(DEMO.with_name("hmt-demo"))
    ids = 3 + (torch.arange(100) * 7 % 109).view(2, 50)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    state = HMTState.load(Path(__file__).with_name("state_before_pages_went.safetensors"), model)
    assert state.lengths == (41, 36) and "pages" in state.signature
    rest, whole = model(ids[:, 41:], state=state), model(ids, attention_mask=mask)
    torch.testing.assert_close(rest.logits, whole.logits[:, 41:], atol=1e-4, rtol=0)


def test_states_with_settings_that_this_version_does_not_have_are_refused(make_wrapper, tokens, tmp_path):
    file, model = tmp_path / "state.safetensors", make_wrapper()
    state = model(tokens, use_cache=True).state
    state.signature = {**state.signature, "pages": [4, 16]}
    state.save(file, model)
    with pytest.raises(ValueError, match=r"other settings: \{'pages': \[4, 16\]\}.*Start a new state"):
        model(tokens, state=HMTState.load(file, model))


def test_a_memory_can_be_seen(make_wrapper, tokens):
    model = make_wrapper(memory_size=4)
    with torch.no_grad():
        state = model(tokens[:, :40], use_cache=True).state
        assert state.segments() == [[range(8, 16), range(16, 24), range(24, 32), range(32, 40)]] * 2
        out = model(tokens[:, :9], state=state, output_recall=True)
        assert out.recall_ends[0].tolist() == [[16, 24, 32, 40]] * 2
        span, weight = out.recalled(0)[0][0]
        best, strongest = out.recall_scores[0][0].max(0)
        assert span == state.segments()[0][strongest] and weight == best.item()
        assert span.start == 40 - 8 * out.recall_distance[0, 0].item()
        unlimited = make_wrapper(memory_size=None)
        assert unlimited(tokens, use_cache=True).state.segments()[0] == [range(a, a + 8) for a in range(0, 40, 8)]
