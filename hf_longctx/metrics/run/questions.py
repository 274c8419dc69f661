"""Answer questions about prompts of one length in a batch.

Each prompt is read once: its cache serves both the log-probabilities of the correct answer and the response. Prompts
of one length need no padding, so the batch changes the result only by rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from .engine import CACHES, Engine


class Responded(NamedTuple):
    """The response to a question.

    Attributes:
        log_probs: log-probability of each token of the correct answer in nats, (n,) float64.
        best: the most likely id at the position of each of these tokens, (n,) int64.
        reply: response; None if it was not requested.
    """

    log_probs: np.ndarray
    best: np.ndarray
    reply: str | None


def ask(
    engine: Engine,
    generate: Callable[[np.ndarray, int, dict[str, Any]], list[list[int]]],
    prompts: np.ndarray,
    answers: Sequence[np.ndarray],
    replies: Sequence[int],
    thinks: bool,
    tokenizer: Any,
) -> list[Responded]:
    """Score the answers to the first prompts that form a batch, and generate responses.

    If the most likely ids are the answer, the answer is the response, unless the prompts end in a thought.

    Args:
        engine: engine that reuses prefixes.
        generate: function of prompts (B, T), a number of tokens and an option with the cache of all prompt tokens but
            the last. It returns the ids of greedy responses without EOS.
        prompts: ids of the prompts, (R, T) int64.
        answers: ids of the correct answer to each prompt.
        replies: maximum number of tokens in each response; 0 for no response.
        thinks: whether the prompts end in a thought; see `task.Ask`.
        tokenizer: tokenizer that decodes the responses.

    Returns:
        a `Responded` for each prompt of the batch.
    """
    longest = max(map(len, answers))
    batch = engine.questions_per_batch(prompts.shape[1] + max(longest, *replies))
    prompts, answers, replies = prompts[:batch], answers[:batch], replies[:batch]
    cache = DynamicCache(config=engine.config)
    [*engine.read(prompts[:, :-1], cache, 0)]
    log_probs, best = scores(engine, cache, prompts[:, -1:], answers, longest)
    exact = [np.array_equal(row[: len(ids)], ids) for row, ids in zip(best, answers)]
    said = {i: tokenizer.decode(answers[i]) for i, limit in enumerate(replies) if limit and exact[i] and not thinks}
    unknown = [i for i, limit in enumerate(replies) if limit and i not in said]
    if unknown:
        if len(unknown) < len(prompts):
            cache.batch_select_indices(torch.tensor(unknown, device=engine.device))
        prefilled = {name: cache for name in CACHES if name in engine.accepted}
        generated = generate(prompts[unknown], max(replies[i] for i in unknown), prefilled)
        said |= {i: tokenizer.decode(ids[: replies[i]]) for i, ids in zip(unknown, generated)}
    return [Responded(log_probs[i, : len(ids)], best[i, : len(ids)], said.get(i)) for i, ids in enumerate(answers)]


def scores(
    engine: Engine, cache: DynamicCache, last: np.ndarray, answers: Sequence[np.ndarray], longest: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities (nats, float64) of answers, and the most likely ids, (B, longest) each.

    Args:
        engine: engine that reuses prefixes.
        cache: cache of all prompt tokens but the last. It is not changed.
        last: last id of each prompt, (B, 1).
        answers: ids of B answers.
        longest: number of tokens in the longest answer. After shorter answers, the values have no meaning.
    """
    padded = np.zeros((len(answers), longest), dtype=np.int64)  # causality hides padding on the right
    for row, ids in zip(padded, answers):
        row[: len(ids)] = ids
    log_probs = []
    best = []
    at = 0
    for logits in engine.read_after(cache, np.append(last, padded[:, :-1], axis=1), longest, shared=False):
        labels = torch.from_numpy(padded[:, at : at + logits.shape[1]]).to(logits.device)
        log_probs.append(-F.cross_entropy(logits.float().mT, labels, reduction="none").double().cpu().numpy())
        best.append(logits.argmax(-1).cpu().numpy())
        at += logits.shape[1]
    return np.concatenate(log_probs, axis=1), np.concatenate(best, axis=1)
