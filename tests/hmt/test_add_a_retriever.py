"""The retriever of CONTRIBUTING.md is a single file; streams, padded rows, generation and checkpoints follow."""

import re
from pathlib import Path

import pytest
import torch
from streams import assert_calls_do_not_matter, assert_close
from tiny_hmt import ROUNDING
from transformers import AutoModelForCausalLM

from hf_longctx.hmt import Retriever, register_retriever
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
    assert (more[0] - more[1])[:, 4:].abs().amax(
        2
    ).min() > 1e-4  # only the tokens after the query attend to the prompt


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_a_row_is_as_alone_in_any_calls(make_added, tmp_path, names):
    with torch.no_grad():
        for seed in (0, 1):
            assert_calls_do_not_matter(make_added(*names, **settings_of(names)), tmp_path, seed)


@pytest.mark.parametrize("names", NAMES, ids=str)
def test_checkpoints_and_beams(make_added, tokens, tmp_path, names):
    model = make_added(*names, **settings_of(names))
    model.save_pretrained(tmp_path / "hmt")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hmt")
    with torch.no_grad():
        assert_close(again(tokens).logits, model(tokens).logits)
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
