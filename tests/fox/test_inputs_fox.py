"""Packed documents equal documents in separate rows, for every format of their boundaries."""

import pytest
import torch
import torch.nn.functional as F
from tiny_fox import both_blocks, check_logits, checkpointed, logits, make, tokens
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    DynamicCache,
    StaticCache,
)

from hf_longctx.fox import backend_fox
from hf_longctx.fox.attention_fox import running_sum


GROUPED = "pro with grouped heads and rope"
LENGTHS = [5, 1, 9]
DOCUMENTS = [tokens(1, n, seed=n) for n in LENGTHS]


def collate(*keep, **options):
    """Collate the documents with transformers' collator. Return the ids, and the entries named in `keep`."""
    batch = DataCollatorWithFlattening(**options)([{"input_ids": document[0]} for document in DOCUMENTS])
    return {name: batch[name] for name in ("input_ids", *keep)}


FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
BORDERS = {
    "position ids": lambda: collate("position_ids"),
    "position ids and a mask of ones": lambda: {
        **collate("position_ids"),
        "attention_mask": torch.ones(1, sum(LENGTHS), dtype=torch.long),
    },
    "position ids from 2": lambda: collate("position_ids", position_ids_start=2),
    "position ids and cu_seq_lens": lambda: collate("position_ids", *FLASH, return_flash_attn_kwargs=True),
    "cu_seq_lens": lambda: collate(*FLASH, return_flash_attn_kwargs=True, return_position_ids=False),
    "seq_idx": lambda: collate("seq_idx", return_seq_idx=True, return_position_ids=False),
}


def alone(model):
    return torch.cat([logits(model, document) for document in DOCUMENTS], dim=1)


PACKED = [("pro with a window", borders, "sdpa") for borders in BORDERS]
PACKED += [(variant, "position ids", "sdpa") for variant in ("llama", GROUPED, "window")]
PACKED += [("llama", "seq_idx", "eager"), ("pro with a window", "position ids", "eager")]


@pytest.mark.parametrize("variant, borders, backend", PACKED)
def test_packed_documents_equal_separate_rows(variant, borders, backend):
    model = make(variant, backend)
    packed = logits(model, **BORDERS[borders]())
    check_logits(packed, alone(model))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_flex_attention_packs_too():
    with torch.compiler.set_stance("force_eager"):  # compiling it takes a minute
        packed = logits(make("pro with a window", "flex_attention"), **BORDERS["cu_seq_lens"]())
    check_logits(packed, alone(make("pro with a window")))


def flash_attention(module, query, key, value, attention_mask, scaling, cu_seq_lens_q, cu_seq_lens_k, **kwargs):
    """Compute what transformers' `flash_attention_forward` computes on a GPU from the boundaries."""
    assert attention_mask is None
    assert torch.equal(cu_seq_lens_q, cu_seq_lens_k) and cu_seq_lens_q.dtype == torch.int32
    lengths = cu_seq_lens_q.diff().tolist()
    assert kwargs["max_length_q"] == kwargs["max_length_k"] == max(lengths)
    flat = [x.transpose(0, 1).flatten(1, 2).split(lengths, dim=1) for x in (query, key, value)]  # (H, n, D') each
    attend = F.scaled_dot_product_attention
    documents = [attend(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in zip(*flat)]
    return torch.cat(documents, dim=1).transpose(0, 1).unflatten(0, (query.shape[0], -1)), None


FLASH_CASES = [(GROUPED, name, 1, "flash_attention_2") for name in BORDERS]
FLASH_CASES += [("llama", "position ids", 2, "flash_attention_2")]
# without flash_attn, transformers uses the Hub's kernel
FLASH_CASES += [(GROUPED, "seq_idx", 2, "kernels-community/flash-attn2")]


@pytest.mark.parametrize("variant, borders, rows, name", FLASH_CASES)
def test_flash_attention_is_told_the_borders(variant, borders, rows, name, monkeypatch):
    batch = BORDERS[borders]()
    if rows == 2:  # the collator makes a single row
        batch = {name: x.repeat(2, 1) for name, x in batch.items()}
    model = make(variant)
    want = alone(model).expand(rows, -1, -1)
    monkeypatch.setattr(backend_fox, "flash_attention_forward", flash_attention)
    monkeypatch.setitem(AttentionInterface._global_mapping, name, flash_attention)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, lambda *args, **kwargs: None)
    model.config._attn_implementation = name
    check_logits(logits(model, **batch), want)


@both_blocks
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_of_packed_documents(variant, checkpointing):
    batch = collate("position_ids", "labels")
    model, separate = make(variant).train(), make(variant).train()
    if checkpointing:
        checkpointed(model)
    count = sum(LENGTHS) - len(LENGTHS)
    loss = model(**batch, num_items_in_batch=count).loss
    loss.backward()
    whole = sum(separate(x, labels=x, num_items_in_batch=count).loss for x in DOCUMENTS if x.shape[1] > 1)
    whole.backward()
    torch.testing.assert_close(loss, whole)
    for (name, p), q in zip(model.named_parameters(), separate.parameters()):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


@both_blocks
def test_positions_that_leap_are_one_document(variant):
    """Some training recipes draw positions from a longer context, for RoPE."""
    model, ids = make(variant), tokens(1, 12)
    positions = torch.cat([torch.arange(6), torch.arange(100, 106)])[None]
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool).tril()
    want = logits(model, ids, position_ids=positions, attention_mask=mask)
    check_logits(logits(model, ids, position_ids=positions, use_cache=False), want)


def test_a_part_of_a_row_in_one_of_several_processes_is_refused(monkeypatch):
    """Under context parallelism, the cumulative sum would restart in each process."""
    model, ids = make("llama"), tokens(1, 12)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    logits(model, ids, position_ids=torch.arange(12)[None])
    cache = DynamicCache(config=model.config)
    for positions in torch.arange(12)[None].split(6, dim=1):  # a prompt in chunks
        logits(model, ids[:, :6], position_ids=positions, cache=cache)
    with pytest.raises(ValueError, match="without a cache, position_ids start at 12 in one of 2 processes"):
        model(ids, position_ids=torch.arange(12, 24)[None])


def test_the_running_sum_keeps_the_resolution_of_a_document():
    lengths = [700, 300] * 100
    log_f = F.logsigmoid(torch.randn(1, 2, sum(lengths), generator=torch.Generator().manual_seed(0)) - 2)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    error = {}
    for name, c in (("row", running_sum(log_f)), ("document", running_sum(log_f, positions))):
        parts = zip(c.double().split(lengths, dim=-1), log_f.double().split(lengths, dim=-1))
        error[name] = max(((c - c[..., :1]) - (x.cumsum(-1) - x[..., :1])).abs().max() for c, x in parts)
    assert error["document"] < 1e-3 < error["row"]


def test_no_cache_comes_back_from_packed_documents():
    assert make("llama")(**BORDERS["position ids"](), use_cache=True).cache is None


# --- trees: with a 4D attention mask, each path has the logits that it has alone ---

PREFIX, BRANCHES = tokens(1, 5), [tokens(1, n, seed=n) for n in (3, 1, 4)]
TREE = torch.cat([PREFIX, *BRANCHES], dim=1)  # (1, 13): the branches one after another


def tree_mask():
    """(1, 1, 13, 13): every branch sees the prefix and itself. The position ids, (1, 13)."""
    branch = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 3, 1, 4]))
    visible = ((branch[:, None] == branch) | (branch == 0)).tril()
    positions = visible.sum(-1) - 1
    return visible[None, None], positions[None]


def alone_in_tree(model):
    """Return the logits of the prefix, then of each branch after it."""
    parts = [logits(model, PREFIX)]
    parts += [logits(model, torch.cat([PREFIX, branch], dim=1))[:, 5:] for branch in BRANCHES]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("variant", ["llama", GROUPED, "one gate per key head", "no gate", "window"])
def test_each_path_of_a_tree_is_what_it_is_alone(variant, additive):
    model, (mask, positions) = make(variant), tree_mask()
    if model.config.sliding_window is not None:
        mask = mask & (positions.mT - positions < model.config.sliding_window)
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    check_logits(logits(model, TREE, attention_mask=mask, position_ids=positions), alone_in_tree(model))


@pytest.mark.parametrize("static", [False, True], ids=["growing cache", "static cache"])
@both_blocks
def test_a_tree_grows_from_a_cache(variant, static):
    model, (mask, positions) = make(variant), tree_mask()
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    parts = [logits(model, PREFIX, cache=cache)]
    mask = F.pad(mask, (0, 3)) if static else mask  # free slots
    branches = dict(attention_mask=mask[:, :, 5:], position_ids=positions[:, 5:])
    parts.append(logits(model, TREE[:, 5:], cache=cache, **branches))
    check_logits(torch.cat(parts, dim=1), alone_in_tree(model))
