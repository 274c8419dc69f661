"""Runs a model over per-token loss, needles and line retrieval, by the same engine and journal as the forgetting curve."""

from __future__ import annotations

import operator
import os
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ..curve.counts import engine_for
from ..curve.measure import (
    exchange,
    identity,
    model_settings,
    on_cpu,
    place_of,
    position_limit,
    progress_bar,
    special_ids,
    versions,
    vocabulary_size,
)
from ..curve.result import check_ids, check_lengths
from ..loss.result import PositionLoss, window_starts
from ..run.engine import Engine, claimed_context, evaluating
from ..run.journal import Journal, content_hash
from ..run.served import EndpointModel
from .answers import Answer, Answers, holds_number, holds_text
from .haystack import (
    ANSWER,
    DEPTHS,
    NeedleCell,
    NeedleGrid,
    draw_begins,
    ends_sentence,
    haystack_length,
    hide_needle,
    insertion_point,
    needle_pieces,
    split_encoding,
)
from .lines import LineRetrieval, LinesPoint, draw_record


MORE = 16  # tokens that a reply may have beyond the answer


def position_loss(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    context_length: int,
    sequences: int | None = None,
    starts: Sequence[int] | None = None,
    bos_token_id: int | None = None,
    journal: str | os.PathLike | None = None,
    tokens_per_pass: int | None = None,
    tokenizer=None,
    progress: bool = False,
) -> PositionLoss:
    """Measure the loss of each token of a text, given those before it (Lin et al. 2025, section 4.2).

    A sequence of T tokens is read as `[bos]` and all of them but the last. Logits are made in parts, never (T, V).
    Where torch.distributed is initialized, every process measures a share of the sequences, and all return the result.

    Args:
        model: a causal language model, which runs in its own dtype, on its own device, in eval mode; or an
            `EndpointModel`.
        tokens: the corpus, a flat sequence of ids, encoded without special tokens.
        context_length: T, tokens per sequence.
        sequences: how many stretches of the corpus are read, evenly spaced. Default: as many as fit side by side, but
            at most 32.
        starts: where the sequences start in the corpus, in place of `sequences`: the beginnings of documents, say.
        bos_token_id: defaults to that of the model's configuration, or its EOS.
        journal: file that keeps every finished sequence; a run that was killed goes on from there.
        tokens_per_pass: bound of the tokens in a forward pass; see `engine.Engine`.
        tokenizer: name it, or give it, to have its name in the settings.
        progress: show a progress bar.

    Returns:
        `PositionLoss`.

    Raises:
        ValueError: an argument does not fit, the model's positions do not reach; raised before the model runs. Or the
            journal is of another run, or a loss is not finite.
        RuntimeError: memory runs out even in the smallest passes.

    An exception that leaves this function while measuring has an attribute `result`: the `PositionLoss` over the
    sequences measured until then, or None.
    """
    vocab_size = vocabulary_size(model)
    corpus = check_ids(on_cpu(tokens), "tokens", vocab_size)
    bos, _ = special_ids(model, bos_token_id, None, vocab_size)
    if starts is None:
        starts = window_starts(len(corpus), context_length, sequences)
    elif sequences is not None:
        raise ValueError("give sequences or starts, not both: starts says how many there are.")
    starts = sorted({int(start) for start in starts})
    if not starts or starts[0] < 0 or starts[-1] + context_length > len(corpus) or context_length < 1:
        raise ValueError(
            f"starts must lie between 0 and {len(corpus) - context_length}, so that {context_length} tokens follow each "
            f"in a corpus of {len(corpus)}; got {starts}."
        )
    check_positions(model, context_length, "context_length")
    settings = model_settings(model) | {
        "tokenizer": getattr(tokenizer, "name_or_path", tokenizer),
        "bos_token_id": bos,
        "context_length": context_length,
        "starts": starts,
        "corpus_tokens": len(corpus),
        "corpus_sha256": content_hash(corpus),
    }

    def texts(start):
        targets = corpus[start : start + context_length]
        return np.concatenate([[bos], targets[:-1]]), targets

    @cache
    def engine():
        return engine_for(model, texts(starts[0])[0], tokens_per_pass)

    def measure(start):
        return token_losses(engine(), *texts(start), f"sequence from {start}").tolist()

    def result(losses):
        return PositionLoss(np.mean(list(losses.values()), axis=0), len(losses), settings | {"versions": versions()})

    return run_parts(
        model, "position_loss", settings, starts, lambda _: context_length, measure, result, journal, progress
    )


def needle_in_a_haystack(
    model: nn.Module,
    tokenizer,
    tokens: Sequence[int],
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    mode: str = "standard",
    repeats: int = 1,
    seed: int = 0,
    bos_token_id: int | None = None,
    generate: bool = True,
    journal: str | os.PathLike | None = None,
    tokens_per_pass: int | None = None,
    progress: bool = False,
) -> NeedleGrid:
    """Measure whether a model finds one sentence in a long text (Lin et al. 2025, section 4.3 and appendix B.3).

    Where torch.distributed is initialized, every process measures a share of the cells, and all return the result.

    Args:
        model: as for `position_loss`.
        tokenizer: that of the model.
        tokens: the text of the haystacks, a flat sequence of ids, encoded without special tokens.
        lengths: of prompt and answer together, BOS included, in tokens, strictly ascending.
        depths: where the needle goes, from 0, the beginning, to 1, the end.
        mode: "standard", or "easy" with the question in the needle.
        repeats: haystacks per length; all depths have the same ones.
        seed: of Python's `random.Random`, which draws where the haystacks start in `tokens`.
        bos_token_id: defaults to that of the model's configuration, or its EOS.
        generate: let the model reply, by its `generate`, greedily. Where it gives the answer token for token anyway,
            that is the reply. Without replies a cell's `match_rate` equals its `exact_rate`.
        journal: file that keeps every finished cell; a run that was killed goes on from there.
        tokens_per_pass: bound of the tokens in a forward pass; see `engine.Engine`.
        progress: show a progress bar.

    Returns:
        `NeedleGrid` with one cell per length and depth.

    Raises:
        ValueError: an argument does not fit, the model's positions do not reach; raised before the model runs. Or the
            journal is of another run, or a logit is NaN.
        RuntimeError: memory runs out even in the smallest passes.

    An exception that leaves this function while measuring has an attribute `result`: the `NeedleGrid` until
    then, or None.
    """
    lengths = check_lengths(lengths)
    depths = sorted({float(depth) for depth in depths})
    if not depths or depths[0] < 0 or depths[-1] > 1:
        raise ValueError(f"depths must be one or more numbers from 0 to 1, got {depths}.")
    check_questions(model, repeats, generate)
    vocab_size = vocabulary_size(model)
    corpus = check_ids(on_cpu(tokens), "tokens", vocab_size)
    bos, _ = special_ids(model, bos_token_id, None, vocab_size)
    encode = encoder(tokenizer)
    pieces = needle_pieces(encode, bos, mode)
    for name, ids in zip(pieces._fields, pieces):
        check_ids(ids, f"the {name} as the tokenizer encodes it", vocab_size)
    begins = {n: draw_begins(len(corpus), haystack_length(n, pieces), repeats, seed) for n in lengths}
    check_positions(model, lengths[-1], "the longest length", MORE * generate)
    settings = model_settings(model) | {
        "mode": mode,
        "seed": seed,
        "repeats": repeats,
        "generate": generate,
        "bos_token_id": bos,
        "tokenizer": getattr(tokenizer, "name_or_path", type(tokenizer).__name__),
        "pieces_sha256": content_hash(np.concatenate(pieces)),
        "corpus_tokens": len(corpus),
        "corpus_sha256": content_hash(corpus),
    }
    sentence_ends = {}  # by id, as far as ids occur

    def ask(length, depth, begin):
        haystack = corpus[begin : begin + haystack_length(length, pieces)]
        for i in set(haystack.tolist()) - sentence_ends.keys():
            sentence_ends[i] = ends_sentence(tokenizer.decode([i]))
        at = insertion_point(np.array([sentence_ends[i] for i in haystack.tolist()]), depth)
        return hide_needle(haystack, at, pieces), len(pieces.bos) + at

    @cache
    def engine():
        return engine_for(model, ask(lengths[0], 0, begins[lengths[0]][0])[0], tokens_per_pass)

    def measure(cell):
        length, depth = cell
        positions, answers = [], []
        for begin in begins[length]:
            prompt, position = ask(length, depth, begin)
            where = f"length {length}, depth {depth}, haystack from {begin}"
            matches = partial(holds_text, expected=ANSWER)
            answers.append(answer_of(engine(), tokenizer, prompt, pieces.answer, matches, generate, where))
            positions.append(position)
        return {"positions": positions, "answers": Answers(answers).to_list()}

    def result(done):
        cells = [
            NeedleCell(Answers.from_list(found["answers"]).answers, *cell, found["positions"])
            for cell, found in done.items()
        ]
        return NeedleGrid(cells, settings | {"versions": versions()})

    grid = [(length, depth) for length in lengths for depth in depths]
    return run_parts(model, "needle", settings, grid, lambda cell: cell[0], measure, result, journal, progress)


def line_retrieval(
    model: nn.Module,
    tokenizer,
    *,
    lines: Sequence[int],
    repeats: int = 10,
    seed: int = 0,
    bos_token_id: int | None = None,
    generate: bool = True,
    journal: str | os.PathLike | None = None,
    tokens_per_pass: int | None = None,
    progress: bool = False,
) -> LineRetrieval:
    """Measure whether a model finds one of many lines, `line <name>: REGISTER_CONTENT is <number>`, by its name.

    Args:
        model: as for `position_loss`.
        tokenizer: that of the model.
        lines: numbers of lines in a record.
        repeats: records for each of them, each with one question.
        seed: of Python's `random.Random`, which makes up the records.
        bos_token_id, generate, journal, tokens_per_pass, progress: as for `needle_in_a_haystack`.

    Returns:
        `LineRetrieval` with one point per number of lines.

    Raises:
        ValueError: an argument does not fit, the model's positions do not reach; raised before the model runs. Or the
            journal is of another run, or a logit is NaN.
        RuntimeError: memory runs out even in the smallest passes.

    An exception that leaves this function while measuring has an attribute `result`: the `LineRetrieval` until
    then, or None.
    """
    lines = sorted({operator.index(n) for n in lines})
    if not lines:
        raise ValueError("lines is empty; give one or more numbers of lines.")
    check_questions(model, repeats, generate)
    vocab_size = vocabulary_size(model)
    bos, _ = special_ids(model, bos_token_id, None, vocab_size)
    encode = encoder(tokenizer)

    def ask(n, repeat):
        record = draw_record(n, seed, repeat)
        prompt, answer = split_encoding(encode, record.text + record.question, record.answer)
        prompt = check_ids([bos, *prompt], "the record as the tokenizer encodes it", vocab_size)
        answer = check_ids(answer, "the answer as the tokenizer encodes it", vocab_size)
        if len(set(prompt[1:].tolist())) < 2:
            raise ValueError(
                "the tokenizer turns a record of lines into one id over and over: it does not know this language. Give "
                "the tokenizer of the model."
            )
        return record, prompt, answer

    tokens = [sum(map(len, ask(n, repeat)[1:])) for n in (lines[0], lines[-1]) for repeat in range(repeats)]
    longest = max(tokens)
    check_positions(model, longest, f"a record of {lines[-1]} lines", MORE * generate)
    settings = model_settings(model) | {
        "seed": seed,
        "repeats": repeats,
        "generate": generate,
        "bos_token_id": bos,
        "tokenizer": getattr(tokenizer, "name_or_path", type(tokenizer).__name__),
        "record_sha256": content_hash(ask(lines[0], 0)[1]),
    }

    @cache
    def engine():
        return engine_for(model, ask(lines[0], 0)[1], tokens_per_pass)

    def measure(n):
        tokens, asked_lines, answers = [], [], []
        for repeat in range(repeats):
            record, prompt, answer = ask(n, repeat)
            matches = partial(holds_number, expected=record.number)
            answers.append(
                answer_of(engine(), tokenizer, prompt, answer, matches, generate, f"{n} lines, repeat {repeat}")
            )
            tokens.append(len(prompt) + len(answer))
            asked_lines.append(record.asked_line)
        return {"tokens": tokens, "asked_lines": asked_lines, "answers": Answers(answers).to_list()}

    def result(done):
        points = [
            LinesPoint(Answers.from_list(found["answers"]).answers, n, found["tokens"], found["asked_lines"])
            for n, found in done.items()
        ]
        return LineRetrieval(points, settings | {"versions": versions()})

    return run_parts(model, "line_retrieval", settings, lines, lambda n: n, measure, result, journal, progress)


def run_parts(
    model: nn.Module,
    metric: str,
    settings: dict,
    parts: Sequence,
    cost: Callable,
    measure: Callable,
    result: Callable[[dict], Any],
    journal: str | os.PathLike | None,
    progress: bool,
):
    """Measure what the journal does not have, every process its share, and make the result of it.

    Args:
        settings: all that the parts depend on.
        parts: keys for the journal.
        cost: what share of the progress bar a part takes.
        measure: what a part gives, as JSON values, in eval and inference mode.
        result: made of what the parts gave, `{part: values}`, in order.

    An exception gets `result` of what had been measured as an attribute, or None.
    """
    rank, processes = place_of(model)
    depends_on = {"metric": metric, **settings}
    if journal is not None:
        depends_on |= identity(model)
    if processes > 1:
        depends_on |= {"process": rank, "processes": processes}
        journal = f"{journal}.{rank}" if journal is not None and rank else journal
    entries, failure, mine = {}, None, parts[rank::processes]
    total, show = sum(map(cost, mine)), progress and rank == 0
    with Journal(journal, depends_on) as book, progress_bar(total, show, metric.replace("_", " ")) as bar:
        entries = book.done
        try:
            with evaluating(model):
                for part in mine:
                    if part not in book.done:
                        book.append(part, measure(part))
                    bar.update(cost(part))
        except BaseException as error:
            failure = error
    if processes > 1 and not isinstance(failure, KeyboardInterrupt):
        entries, failure = exchange(entries, failure, processes)
    done = {part: entries[part] for part in parts if part in entries}
    found = result(done) if done else None
    if failure is None:
        return found
    failure.result = found
    if hasattr(failure, "add_note"):  # Python 3.11
        failure.add_note(f"{len(done)} of {len(parts)} parts had been measured: they are in this error's .result.")
    raise failure


def token_losses(engine: Engine | EndpointModel, ids: np.ndarray, targets: np.ndarray, where: str) -> np.ndarray:
    """Loss of each target at the position of the id before it, in nats; (T,) float64.

    Raises:
        ValueError: one is NaN or infinite; `where` names the input.
        RuntimeError: see `next_tokens`.
    """
    losses = -next_tokens(engine, ids, targets, range(len(ids)), where)[0]
    bad = np.flatnonzero(~np.isfinite(losses))
    if len(bad):
        raise ValueError(
            f"{where}: the loss of token {bad[0] + 1} of {len(ids)} is {losses[bad[0]]}: the logits at position {bad[0]} "
            f"are not finite. {OVERFLOW}"
        )
    return losses


def answer_of(
    engine: Engine | EndpointModel,
    tokenizer,
    prompt: np.ndarray,
    answer: np.ndarray,
    matches: Callable[[str], bool],
    generate: bool,
    where: str,
) -> Answer:
    """Ask a model, and score what it says.

    Args:
        prompt, answer: ids, (T,) and (n,) int64.
        matches: whether a reply holds the answer.
        where: names the question in an error.

    Raises:
        ValueError: a logit is NaN.
        RuntimeError: see `next_tokens`.
    """
    positions = range(len(prompt) - 1, len(prompt) - 1 + len(answer))
    log_probs, best = next_tokens(engine, np.concatenate([prompt, answer[:-1]]), answer, positions, where)
    bad = np.flatnonzero(np.isnan(log_probs))
    if len(bad):
        raise ValueError(f"{where}: the logits at position {positions[bad[0]]} are NaN. {OVERFLOW}")
    exact, reply = bool((best == answer).all()), None
    if generate:
        reply = tokenizer.decode(answer) if exact else reply_of(engine, tokenizer, prompt, len(answer) + MORE)
    return Answer(
        log_prob=float(max(log_probs.sum(), -1e9)),  # JSON has no infinity
        tokens=len(answer),
        exact=exact,
        reply=reply,
        matched=exact if reply is None else matches(reply),
    )


OVERFLOW = "A common cause is float16 overflow: load the model in torch.bfloat16 or torch.float32."


def next_tokens(
    engine: Engine | EndpointModel, ids: np.ndarray, targets: np.ndarray, positions: range, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability of each target (nats, float64) and the likeliest id (int64) at its position.

    Raises:
        RuntimeError: memory runs out even in the smallest passes; `where` names the input.
    """

    if isinstance(engine, EndpointModel):
        best, own = engine.score(np.append(ids, targets[-1]))
        return own[positions.start + 1 :], best[positions.start + 1 :]

    def read():
        own, best = [], []
        for logits in engine.logits(ids, positions):
            wanted = torch.from_numpy(targets[len(own) :][: len(logits)]).to(logits.device)
            own += (-F.cross_entropy(logits.float(), wanted, reduction="none")).tolist()
            best += logits.argmax(-1).tolist()
        return np.array(own), np.array(best)

    found = engine.with_less_memory(read)
    if found is None:
        raise RuntimeError(f"{where}: {len(ids)} tokens do not fit into memory, even in the smallest passes.")
    return found


def reply_of(engine: Engine | EndpointModel, tokenizer, prompt: np.ndarray, tokens: int) -> str:
    """What a model says after a prompt by greedy decoding, at most `tokens` tokens."""
    if isinstance(engine, EndpointModel):
        return engine.reply(prompt, tokens)
    model, ids = engine.model, torch.from_numpy(prompt)[None].to(engine.device)
    pad = getattr(model.generation_config, "pad_token_id", None)
    said = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        pad_token_id=0 if pad is None else pad,  # of one row, nothing is padded
    )
    return tokenizer.decode(said[0, len(prompt) :], skip_special_tokens=True)


def encoder(tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def check_questions(model: nn.Module, repeats: int, generate: bool) -> None:
    """
    Raises:
        ValueError: no repeats, or the model is to reply and cannot.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}.")
    if generate and not hasattr(model, "generate") and not isinstance(model, EndpointModel):
        raise ValueError(f"{type(model).__name__} has no generate method; measure without replies: generate=False.")


def check_positions(model: nn.Module, tokens: int, what: str, reply: int = 0) -> None:
    """
    Raises:
        ValueError: `tokens` and those of a reply are more than the model's table of positions has.
    """
    tokens += reply
    limit = position_limit(model)
    claim = claimed_context(model)
    if limit is not None and tokens > limit:
        raise ValueError(
            f"{what} needs {tokens} positions{f', {reply} of them for a reply' if reply else ''}, and the model's "
            f"position table ends at {limit}. Stay at or below {limit - reply} tokens"
            + (f", or at {limit} without replies: --no-replies, or generate=False." if reply else ".")
        )
    if limit is None and claim is not None and tokens > claim:
        warnings.warn(
            f"{what} needs {tokens} positions, more than the {claim} (max_position_embeddings) that the model claims to "
            "support. It is measured all the same.",
            stacklevel=3,
        )
