"""Under a 4D attention mask, each path of a tree is what it would be alone."""

import pytest
import torch
from tiny_fox import both_blocks, check_logits, logits, make, tokens
from transformers import DynamicCache, StaticCache


PREFIX, BRANCHES = tokens(1, 5), [tokens(1, n, seed=n) for n in (3, 1, 4)]
TREE = torch.cat([PREFIX, *BRANCHES], dim=1)  # (1, 13): the branches one after another
VARIANTS = ["llama", "pro with grouped heads and rope", "one gate per key head", "no gate", "window"]


def tree_mask():
    """(1, 1, 13, 13): every branch sees the prefix and itself. The position ids, (1, 13)."""
    branch = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 3, 1, 4]))
    visible = ((branch[:, None] == branch) | (branch == 0)).tril()
    positions = visible.sum(-1) - 1
    return visible[None, None], positions[None]


def alone(model):
    """Logits of the prefix, then of each branch after it."""
    parts = [logits(model, PREFIX)]
    parts += [logits(model, torch.cat([PREFIX, branch], dim=1))[:, 5:] for branch in BRANCHES]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("additive", [False, True], ids=["boolean", "additive"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_path_of_a_tree_is_what_it_is_alone(variant, additive):
    model, (mask, positions) = make(variant), tree_mask()
    if model.config.sliding_window is not None:
        mask = mask & (positions.mT - positions < model.config.sliding_window)
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    check_logits(logits(model, TREE, attention_mask=mask, position_ids=positions), alone(model))


@pytest.mark.parametrize("static", [False, True], ids=["growing cache", "static cache"])
@both_blocks
def test_a_tree_grows_from_a_cache(variant, static):
    model, (mask, positions) = make(variant), tree_mask()
    cache = StaticCache(config=model.config, max_cache_len=16) if static else DynamicCache(config=model.config)
    parts = [logits(model, PREFIX, cache=cache)]
    mask = torch.nn.functional.pad(mask, (0, 3)) if static else mask  # free slots
    branches = dict(attention_mask=mask[:, :, 5:], position_ids=positions[:, 5:])
    parts.append(logits(model, TREE[:, 5:], cache=cache, **branches))
    check_logits(torch.cat(parts, dim=1), alone(model))
