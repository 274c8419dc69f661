"""Reading sequences in several calls, for the tests."""

import copy
import random

import torch
from tiny_hmt import ROUNDING, VOCAB

from hf_longctx.hmt import HMTState


CHUNKS = {"one by one": [1] * 43, "ragged": [5, 3, 1, 14, 2, 11, 7], "at j": [4] * 10 + [3], "segments": [8] * 5 + [3]}


LENGTHS = (43, 30, 3)


def padded(tokens, left=True):
    """Return three rows of `LENGTHS` tokens and their mask, (3, 43)."""
    ids, mask = torch.cat([tokens, tokens[:1].flip(1)]), torch.zeros(3, 43, dtype=torch.long)
    for row, n in zip(mask, LENGTHS):
        row[43 - n if left else 0 : 43 if left else n] = 1
    return ids, mask


def stream(model, ids, chunks, mask=None, between=lambda state: state):
    """Read `ids` in `chunks`. Return the logits and the last state. `between` changes the state after each chunk."""
    logits, state, start = [], None, 0
    for n in chunks:
        part = slice(start, start + n)
        out = model(ids[:, part], attention_mask=None if mask is None else mask[:, part], state=state, use_cache=True)
        logits.append(out.logits)
        state, start = between(out.state), start + n
    assert (state.position, state.segment) == (start, start // model.config.segment_length)
    return torch.cat(logits, 1), state


def saved_and_loaded(state, model, folder):
    state.save(folder / "state.safetensors", model)
    return HMTState.load(folder / "state.safetensors", model)


def assert_close(actual, expected):
    """Compare up to rounding. Kernels round differently if weights start at other addresses, as in a loaded model."""
    torch.testing.assert_close(actual, expected, atol=ROUNDING, rtol=0)


def assert_calls_do_not_matter(model, folder, seed=0, assert_same=assert_close):
    """Read two rows in random calls, and compare the logits with those of each row alone in one call.

    A call has any number of tokens of a row, next to padding on either side. With an odd seed, most calls have equal
    numbers. Between two calls, the state is saved, copied or reordered, and continued with other tokens.
    """
    generator, texts, logits, state = random.Random(seed), [[], []], [[], []], None
    torch.manual_seed(seed)
    for _ in range(14):
        counts = [generator.choice((0, 1, 4, 8, 11)) for _ in range(2)]
        counts[generator.randrange(2)] += not any(counts)
        counts = generator.choice(([1, 1], [1, 1], counts[:1] * 2 if seed % 2 and counts[0] else counts))
        ids = torch.randint(3, VOCAB, (2, max(counts) + generator.randrange(2)))
        mask = torch.zeros_like(ids)
        for row, count in zip(mask, counts):
            begin = generator.choice((0, len(row) - count))
            row[begin : begin + count] = 1
        out = model(ids, attention_mask=mask, state=state, use_cache=True)
        for row in range(2):
            texts[row] = [*texts[row], ids[row, mask[row] == 1]]
            logits[row] = [*logits[row], out.logits[row, mask[row] == 1]]
            assert not out.logits[row, mask[row] == 0].any()
        state = out.state
        if generator.random() < 0.5:
            model(torch.randint(3, VOCAB, (2, 1)), state=state)  # a call does not change its state
        change = generator.choice(("copy", "save", "select", "reorder", "reorder", "reorder"))
        if change == "copy":
            state = copy.deepcopy(state.detach())
        elif change == "save":
            state = saved_and_loaded(state, model, folder)
        elif change == "select":
            texts, logits, state = texts[1:] * 2, logits[1:] * 2, state.select_rows([1, 1])
        elif change == "reorder":
            order = generator.choice(([1, 0], [1, 0], [1, 1]))
            texts, logits = [texts[i] for i in order], [logits[i] for i in order]
            state.reorder_cache(torch.tensor(order))
    for text, found in zip(texts, logits):
        text = torch.cat(text)
        if len(text):
            assert_same(torch.cat(found), model(text[None]).logits[0])
