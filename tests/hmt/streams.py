"""Reading a text in chunks, for the tests."""

import torch


CHUNKS = {"one by one": [1] * 43, "ragged": [5, 3, 1, 14, 2, 11, 7], "at j": [4] * 10 + [3], "segments": [8] * 5 + [3]}


def stream(model, ids, chunks, mask=None, between=lambda state: state):
    """Logits and last state of `ids` read in `chunks`; `between` changes the state after each chunk."""
    logits, state, start = [], None, 0
    for n in chunks:
        part = slice(start, start + n)
        out = model(ids[:, part], attention_mask=None if mask is None else mask[:, part], state=state, use_cache=True)
        logits.append(out.logits)
        state, start = between(out.state), start + n
    assert (state.position, state.segment) == (start, start // model.config.segment_length)
    return torch.cat(logits, 1), state
