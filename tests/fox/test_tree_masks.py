"""Under a mask of four dimensions, each path of a tree is what it would be alone; so are packed documents."""

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
    parts.append(
        logits(
            model,
            TREE[:, 5:],
            attention_mask=mask[:, :, 5:],
            position_ids=positions[:, 5:],
            cache=cache,
        )
    )
    check_logits(torch.cat(parts, dim=1), alone(model))


@both_blocks
def test_documents_and_padding_in_one_mask(variant):
    """Row 0: two documents; row 1: padding on the left and between tokens."""
    model, ids = make(variant), tokens(2, 9)
    visible = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
    visible[0, 0, :4, :4] = visible[0, 0, 4:, 4:] = True
    real = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 1]).bool()
    visible[1, 0] = real
    visible = visible.tril()
    positions = torch.stack([torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]), (real.cumsum(0) - 1).clamp(min=0)])
    got = logits(model, ids, attention_mask=visible, position_ids=positions)
    check_logits(got[:1], torch.cat([logits(model, ids[:1, :4]), logits(model, ids[:1, 4:])], dim=1))
    check_logits(got[1:, real], logits(model, ids[1:, real]))


@both_blocks
def test_gradients_along_a_path(variant):
    model, again, (mask, positions) = make(variant), make(variant), tree_mask()
    model(TREE, attention_mask=mask, position_ids=positions).logits[:, 9:].square().sum().backward()
    again(torch.cat([PREFIX, BRANCHES[2]], dim=1)).logits[:, 5:].square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), again.named_parameters()):
        scale = q[1].grad.abs().max().item()
        torch.testing.assert_close(p.grad, q[1].grad, atol=1e-4 * scale, rtol=1e-3, msg=lambda t, n=name: f"{n}: {t}")
