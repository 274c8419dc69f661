"""The retriever of CONTRIBUTING.md is a single file; streams, padded rows, generation and checkpoints follow."""

import re
from pathlib import Path

import pytest
import torch
from streams import CHUNKS, stream
from tiny_hmt import ROUNDING
from transformers import AutoModelForCausalLM

from hf_longctx.hmt import HMTState, Retriever, register_retriever
from hf_longctx.hmt.retriever_hmt import RETRIEVERS, remember


GUIDE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILE = re.search(r"^## Add a retriever\n.*?^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[1]


class Seen(Retriever):
    """Make the tokens of remembered segments more likely. Memory: `ids` (B, c, L') and `ends` (B, c)."""

    def empty(self, rows, like):
        ends = torch.zeros(rows, 0, dtype=torch.long, device=like.device)
        return {"ids": ends[..., None].expand(-1, -1, self.config.segment_length), "ends": ends}

    def observe(self, state, segment):
        return remember(state, segment, self.config.memory_size, ids=segment.ids[:, None])

    def mix(self, state, logits, hidden):
        ids = state["ids"].flatten(1)
        there = (state["ends"] > 0).repeat_interleave(self.config.segment_length, 1).to(logits)
        counts = torch.zeros_like(logits[:, 0]).scatter_add(1, ids, there)
        return logits + counts[:, None]


@pytest.fixture
def make_added(monkeypatch, make_wrapper):
    """Wrap a backbone with the retriever of CONTRIBUTING.md, which is forgotten after the test."""
    for name in ("fading", "seen"):
        monkeypatch.setitem(RETRIEVERS, name, None)
    exec(compile(FILE, "fading.py", "exec"), {"__name__": "fading"})
    register_retriever("seen")(Seen)
    return lambda *names, **settings: make_wrapper(retrievers=list(names or ["fading"]), **settings)


NAMES = [("fading",), ("bank", "seen"), ("fading", "neural_cache")]


def settings_of(names):
    return {"neural_cache_weight": 0.2} if "neural_cache" in names else {}


def test_it_gives_the_prompt(make_added, tokens):
    model, ids = make_added(), tokens[:, :24]
    out = model(ids, output_recall=True, use_cache=True)
    first, second, third = out.memories
    torch.testing.assert_close(out.state.memory["fading"]["mean"], first / 8 + second / 4 + third / 2)
    assert out.recall_scores == (None, None, None)
    changed = out.state.map(lambda x: 2 * x if x.is_floating_point() else x)
    more = [model(tokens[:, 24:32], state=state).logits for state in (out.state, changed)]
    torch.testing.assert_close(more[0][:, :4], more[1][:, :4], atol=ROUNDING, rtol=0)
    assert (more[0] - more[1])[:, 4:].abs().amax(2).min() > 1e-4  # only the tokens behind the query see the prompt


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_any_chunking_is_one_piece_and_a_padded_row_as_alone(make_added, tokens, names):
    model, mask = make_added(*names, **settings_of(names)), torch.ones_like(tokens)
    mask[1, :13] = 0
    with torch.no_grad():
        whole = model(tokens, attention_mask=mask, use_cache=True)
        alone = model(tokens[1:, 13:]).logits
        torch.testing.assert_close(whole.logits[1:, 13:], alone, atol=ROUNDING, rtol=0)
        for chunks in CHUNKS.values():
            logits, state = stream(model, tokens, chunks, mask)
            torch.testing.assert_close(logits, whole.logits, atol=ROUNDING, rtol=0)
        for name, value in whole.state.tensors().items():
            if name != "prompt":  # of a row without an open recall it may be anything
                torch.testing.assert_close(state.tensors()[name], value, atol=ROUNDING, rtol=0)
        for row in (0, 1):
            of_row = model(tokens[:1, :9], state=state.select_rows([row])).logits
            both = model(tokens[[0, 0], :9], state=state).logits
            torch.testing.assert_close(of_row, both[row : row + 1], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_states_and_checkpoints(make_added, tokens, tmp_path, names):
    model = make_added(*names, **settings_of(names))
    model.save_pretrained(tmp_path / "hmt")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hmt")
    with torch.no_grad():
        expected = model(tokens).logits
        assert torch.equal(again(tokens).logits, expected)
        state = model(tokens[:, :21], use_cache=True).state
        state.save(tmp_path / "state", model)
        loaded = HMTState.load(tmp_path / "state", again)
        for _ in range(2):  # a call does not change its state
            torch.testing.assert_close(
                again(tokens[:, 21:], state=loaded).logits, expected[:, 21:], atol=ROUNDING, rtol=0
            )
        options = {"max_new_tokens": 20, "num_beams": 2, "do_sample": False, "eos_token_id": None}
        ids = model.generate(tokens[:, :13], **options)
        assert torch.equal(again.generate(tokens[:, :13], use_cache=False, **options), ids)


@pytest.mark.parametrize(
    "names, settings, message",
    [
        (["fadin"], {}, r"`retrievers` must be chosen from .*'fading'.*got \['fadin'\]"),
        (["seen"], {}, "columns of `retrievers` must sum to 1, got"),
        (["bank"], {"recall_tokens": 4}, r"must include \['search'\]"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(make_added, names, settings, message):
    with pytest.raises(ValueError, match=message):
        make_added(*names, **settings)
