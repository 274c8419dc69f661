"""Run a model over multi-needle and variable tracking."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from ..checks import check_kind, check_lengths, check_token_ids, tokenizer_name, whole_number
from ..retrieval.haystack import ends_sentence
from ..retrieval.measure import check_replies, encoder
from ..retrieval.wording import chat_frame
from ..run.distributed import Run, labels, run_distributed
from ..run.journal import content_hash
from ..run.reader import Reader, check_positions, reader_for, special_ids
from ..run.scoring import REPLY_MARGIN
from .result import (
    NOISE,
    MultiNeedle,
    SeveralAnswer,
    SeveralPoint,
    SeveralRetrieval,
    VariableTracking,
    draw_needles,
    draw_variables,
    hide,
)


def several_facts(
    model: nn.Module | Reader,
    tokenizer: Any,
    tokens: Sequence[int] | np.ndarray | None = None,
    *,
    lengths: Sequence[int],
    needles: int | None = None,
    chains: int = 1,
    hops: int = 4,
    repeats: int = 10,
    chat_template: bool = False,
    seed: int = 0,
    bos_token_id: int | None = None,
    corpus_name: str | None = None,
    train_length: int | None = None,
    run: Run | None = None,
) -> SeveralRetrieval:
    """Measure how many of several facts in a long text a model names: multi-needle or variable tracking.

    Other arguments and errors are those of `needle_in_a_haystack`. The model has to reply.

    Args:
        tokens: the text to hide the facts in, ids without special tokens; None for a few sentences over and over, as
            RULER has it for variables.
        lengths: of prompt and reply together, in tokens, strictly ascending.
        needles: how many numbers to hide, 2 or more; None for variables. RULER hides 4.
        chains, hops: how many chains of variables there are, and assignments from one variable to the next in each.
        repeats: prompts of each length, each with facts, places and a beginning in `tokens` of its own.
        seed: of Python's `random.Random`, which draws all these.

    Returns:
        `MultiNeedle` or `VariableTracking`, with one point per length.
    """
    reader, lengths = reader_for(model), check_lengths(lengths)
    repeats, seed = whole_number("repeats", repeats, 1), whole_number("seed", seed)
    task: dict[str, Any] = {"chains": whole_number("chains", chains, 1), "hops": whole_number("hops", hops, 1)}
    result_class, draw = VariableTracking, draw_variables
    if needles is not None:
        task, result_class, draw = {"needles": whole_number("needles", needles, 2)}, MultiNeedle, draw_needles
    check_kind(bool, chat_template=chat_template)
    check_replies(reader, "give a model that has one, as only replies are counted")
    name_of_tokenizer = tokenizer_name(tokenizer)
    names = labels("five sentences over and over" if tokens is None else corpus_name, train_length)
    bos, _ = special_ids(reader, bos_token_id, None)
    encode, frame = encoder(tokenizer), chat_frame(tokenizer) if chat_template else None
    source = check_token_ids(encode(NOISE) if tokens is None else tokens, "tokens", reader.vocab_size)
    corpus = np.resize(source, lengths[-1]) if tokens is None else source
    sentence_ends: dict[int, bool] = {}  # of the ids met so far

    def prompt(length: int, repeat: int):
        """Return ids, what the reply should name, its tokens, and how many ids precede each statement."""
        rng = random.Random(f"{seed} {length} {repeat}")
        asked = draw(rng, **task)
        depths = sorted(rng.random() for _ in asked.statements)
        before = [bos, *encode(asked.intro)] if frame is None else encode(frame.head + asked.intro)
        after = asked.question + (f" Answer: {asked.begin}" if frame is None else frame.tail + asked.begin)
        pieces = [np.array(ids) for ids in (before, *(encode(f"\n{s}\n") for s in asked.statements), encode(after))]
        reply = 2 * len(encode(", ".join(asked.answers))) + REPLY_MARGIN
        taken = reply + sum(map(len, pieces))
        room = length - taken
        if room < 1:
            raise ValueError(
                f"length {length} is too short: question, facts and reply take {taken} tokens with this tokenizer. Start "
                "at several times that."
            )
        if len(corpus) < room:
            raise ValueError(f"the text has {len(corpus)} tokens, and {room} are needed at length {length}.")
        begin = 0 if tokens is None else rng.randint(0, len(corpus) - room)
        haystack = corpus[begin : begin + room]
        for i in set(haystack.tolist()) - sentence_ends.keys():
            sentence_ends[i] = ends_sentence(tokenizer.decode([i]))
        ends = np.array([sentence_ends[i] for i in haystack.tolist()])
        text, positions = hide(haystack, ends, pieces[1:-1], depths)
        ids = check_token_ids(np.concatenate([pieces[0], text, pieces[-1]]), "the prompt", reader.vocab_size)
        return ids, asked.answers, reply, [len(pieces[0]) + position for position in positions]

    trial, *_ = (prompt(length, repeat)[0] for length in lengths for repeat in range(repeats))  # all fit
    check_positions(reader, lengths[-1], "the longest length")
    settings = (
        reader.settings()
        | task
        | {
            "seed": seed,
            "repeats": repeats,
            "bos_token_id": bos,
            "tokenizer": name_of_tokenizer,
            "corpus_tokens": len(source),
            "corpus_sha256": content_hash(source),
        }
        | ({"chat_template": True} if chat_template else {})
    )

    def measure(length: int) -> list[dict[str, Any]]:
        answers = []
        for repeat in range(repeats):
            ids, expected, most, positions = prompt(length, repeat)
            reply = reader.reply(ids, most, tokenizer)
            found = [fact.lower() in reply.lower() for fact in expected]
            answers.append({"reply": reply, "found": found, "positions": positions})
        return answers

    def result(entries: dict[int, Any]) -> SeveralRetrieval:
        measured = [(n, entries[n]) for n in lengths if n in entries]
        points = [SeveralPoint(n, [SeveralAnswer(**answer) for answer in answers]) for n, answers in measured]
        return result_class(points, settings | {"lengths": lengths} | names)

    return run_distributed(
        reader,
        result_class.title,
        lambda worker: worker.measure({n: n for n in lengths}, measure, lambda n: f"{n:,} tokens"),
        result,
        depends_on={"metric": result_class.kind, **settings},
        trial=trial,
        run=run,
    )
