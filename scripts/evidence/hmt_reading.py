"""Losses of a Llama that reads documents in windows, and of HMT with its own or another document's memories."""

import math
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F

from hf_longctx.hmt import HMTWrapper
from scripts.evidence.hmt_training import AS_IT_IS, HMT, autocast
from scripts.prove_hmt import changed_recall


SEGMENTS, SWAPPED = "segments", "with the memories of another text"  # readings of HMT
BINS = 16  # of the positions of a segment


def windows(args, context):
    """Return {reading of a Llama: (positions of a window, stride in tokens)}."""
    length, whole = args.segment_length, min(context, args.text_length)
    return {
        "blocks": (length, length),
        "blocks and what the single-pass mode sees": (length + args.sensory_tokens + 4, length),
        "overlapping blocks": (length, length // 2),
        "whole context": (whole, whole if whole == args.text_length else whole // 2),
    }


def read(model, method, reading, ids, args):
    """Yield the logits of all tokens, (rows, n, V), chunk by chunk."""
    if method in HMT:
        state = None
        for segment in ids.split(args.segment_length, dim=1):
            out = model(input_ids=segment, state=state, use_cache=True)
            state = out.state
            yield out.logits
        return
    size, step = windows(args, model.config.max_position_embeddings)[reading]
    for start in range(0, ids.shape[1], step):
        end = min(start + step, ids.shape[1])
        yield model(input_ids=ids[:, max(0, end - size) : end], logits_to_keep=end - start, use_cache=False).logits


def memories_of_others(model, texts, args):
    """Return another document's memories for each document, offset by half of all documents; (texts, segments, d)."""
    banks = [
        model(input_ids=rows[:, :-1], use_cache=True, logits_to_keep=1).state.memory["bank"]["embeddings"]
        for rows in texts.split(args.rows_at_once)
    ]
    return torch.cat(banks).roll(len(texts) // 2, 0)


def memories_swapped(model, memories):
    """Let each document recall from `memories` (rows, segments, d), as many as it has of its own, while it is read."""

    def control(recall, query, bank, valid, *_):
        return recall(query, memories[:, : bank.shape[1]], valid)

    return changed_recall(model, control, None, None)


@contextmanager
def positions_counted(model):
    """Return a list to which every forward pass of the backbone appends its number of positions."""
    counts, backbone = [], model.backbone if isinstance(model, HMTWrapper) else model
    handle = backbone.model.layers[0].register_forward_pre_hook(lambda _, inputs: counts.append(inputs[0].shape[:2]))
    try:
        yield counts
    finally:
        handle.remove()


@torch.no_grad()
def measure_reading(model, method, reading, texts, args):
    """Return the mean -log p by document, by segment, and by position in a segment.

    Returns:
        "texts": of each text, that of its first segment, and of the first and the second halves of all others.
        "by_segment": of the segments of all texts. "by_position": of `BINS` parts of all segments but the first.
        "positions": how many went through the backbone for each token.
    """
    name, losses, swapped, batch = method.removesuffix(AS_IT_IS), [], nullcontext(), args.rows_at_once
    with autocast(args):
        for _ in read(model, name, reading, texts[:1, : 2 * args.segment_length], args):
            pass  # the first call probes the backbone; it is not counted
        memories = memories_of_others(model, texts, args) if reading == SWAPPED else None
        with positions_counted(model) as positions:
            for i, rows in enumerate(texts.split(batch)):
                if reading == SWAPPED:
                    swapped = memories_swapped(model, memories[i * batch : (i + 1) * batch])
                with swapped:
                    logits = read(model, name, reading, rows[:, :-1], args)
                    losses.append(torch.cat(list(losses_of_logits(logits, rows[:, 1:])), 1))
    by_segment = torch.cat(losses).unflatten(1, (-1, args.segment_length))
    j, later = args.segment_length // 2, by_segment[:, 1:]
    of_texts = [by_segment[:, 0].mean(1), later[..., :j].mean((1, 2)), later[..., j:].mean((1, 2))]
    of_positions = later.mean((0, 1)).unflatten(0, (BINS, -1)).mean(1)
    return {
        "positions": sum(map(math.prod, positions)) / texts[:, 1:].numel(),
        "texts": [[round(x, 4) for x in of_text] for of_text in torch.stack(of_texts, 1).tolist()],
        "by_segment": [round(x, 4) for x in by_segment.mean((0, 2)).tolist()],
        "by_position": [round(x, 4) for x in of_positions.tolist()],
    }


def losses_of_logits(pieces, targets):
    """Yield -log p of the targets (rows, n) for each chunk of logits, in double precision."""
    start = 0
    for logits in pieces:
        end = start + logits.shape[1]
        yield F.cross_entropy(logits.float().mT, targets[:, start:end], reduction="none").double()
        start = end
