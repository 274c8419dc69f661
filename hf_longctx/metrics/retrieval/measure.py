"""Run a model over the needle in a haystack and over line retrieval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import nn

from ..checks import (
    check_kind,
    check_lengths,
    check_token_ids,
    numbers,
    tokenizer_name,
    whole_number,
)
from ..run.distributed import Run, labels, run_distributed
from ..run.journal import content_hash
from ..run.reader import Reader, check_positions, reader_for, special_ids
from ..run.scoring import REPLY_MARGIN, score_answer
from .answers import Answers, holds_number, holds_text
from .haystack import (
    DEPTHS,
    NeedleCell,
    NeedleGrid,
    Pieces,
    draw_begins,
    ends_sentence,
    haystack_length,
    hide_needle,
    insertion_point,
    needle_pieces,
    split_encoding,
)
from .lines import LineRetrieval, LinesPoint, Record, draw_record
from .wording import Frame, chat_frame, wording


def needle_in_a_haystack(
    model: nn.Module | Reader,
    tokenizer: Any,
    tokens: Sequence[int] | np.ndarray,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    mode: str = "standard",
    needle: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    chat_template: bool = False,
    repeats: int = 1,
    seed: int = 0,
    bos_token_id: int | None = None,
    generate: bool = True,
    corpus_name: str | None = None,
    train_length: int | None = None,
    run: Run | None = None,
) -> NeedleGrid:
    """Measure whether a model finds one sentence in a long text (Lin et al. 2025, section 4.3 and appendix B.3).

    Args:
        model: a causal language model, which runs in its own dtype, on its own device, in eval mode; or a reader, such
            as `ServedModel`.
        tokenizer: that of the model.
        tokens: the text of the haystacks, a flat sequence of ids, encoded without special tokens.
        lengths: of prompt and answer together, BOS included, in tokens, strictly ascending.
        depths: where the needle goes, from 0, the beginning, to 1, the end.
        mode: "standard", or "easy" with the question in the needle.
        needle, question, answer: one's own, in any language; see `wording.wording`.
        chat_template: ask as the user of a chat, by the template of the tokenizer, which also has the BOS.
        repeats: haystacks per length and depth. None overlaps another of its length, as far as the text has room.
        seed: of Python's `random.Random`, which draws where the haystacks start in `tokens`.
        bos_token_id: defaults to that of the model's configuration, or its EOS.
        generate: let the model reply, by its `generate`, greedily. Where it gives the answer token for token anyway,
            that is the reply. Without replies a cell's `match_rate` equals its `exact_rate`.
        corpus_name, train_length: name of the corpus and context length of the training, in tokens, for the settings.
        run: journal, memory budget and progress bar; see `Run`, also for several processes and interruptions.

    Returns:
        `NeedleGrid` with one cell per length and depth.

    Raises:
        ValueError: an argument does not fit, the model's positions do not reach; raised before the model runs. Or the
            journal is of another run, or a logit is NaN.
        RuntimeError: memory runs out even in the smallest passes.
    """
    reader = reader_for(model)
    lengths = check_lengths(lengths)
    depths = sorted({float(depth) for depth in numbers("depths", depths)})
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"depths must be one or more numbers from 0 to 1, got {depths}.")
    repeats, seed = whole_number("repeats", repeats, 1), whole_number("seed", seed)
    check_kind(bool, chat_template=chat_template, generate=generate)
    if generate:
        check_replies(reader, "measure without replies: generate=False, or --no-replies")
    name_of_tokenizer = tokenizer_name(tokenizer)
    names = labels(corpus_name, train_length)
    corpus = check_token_ids(tokens, "tokens", reader.vocab_size)
    bos, _ = special_ids(reader, bos_token_id, None)
    words, frame = wording(mode, needle, question, answer), chat_frame(tokenizer) if chat_template else None
    pieces = needle_pieces(encoder(tokenizer), bos, words, frame)
    for piece, ids in zip(pieces._fields, pieces):
        check_token_ids(ids, f"the {piece} as the tokenizer encodes it", reader.vocab_size)
    questions = [(depth, repeat) for repeat in range(repeats) for depth in depths]
    begins = {
        (n, *question): begin
        for n in lengths
        for question, begin in zip(
            questions, draw_begins(len(corpus), haystack_length(n, pieces), len(questions), seed)
        )
    }
    check_positions(reader, lengths[-1], "the longest length", REPLY_MARGIN * generate)
    settings = reader.settings() | {
        "mode": mode,
        "seed": seed,
        "repeats": repeats,
        "questions_per_length": len(questions),
        "generate": generate,
        "bos_token_id": bos,
        "tokenizer": name_of_tokenizer,
        "pieces_sha256": content_hash(np.concatenate(pieces)),
        "corpus_tokens": len(corpus),
        "corpus_sha256": content_hash(corpus),
    }
    own = {"needle": needle, "question": question, "answer": answer, "chat_template": chat_template or None}
    settings |= {name: value for name, value in own.items() if value is not None}
    haystacks = Haystacks(corpus, pieces, tokenizer)

    def measure(cell: tuple[int, float]) -> dict[str, Any]:
        length, depth = cell
        positions, answers = [], []
        own = [begins[length, depth, repeat] for repeat in range(repeats)]
        for begin in own:
            prompt, position = haystacks.prompt(length, depth, begin)
            place = f"length {length}, depth {depth}, haystack from {begin}"
            matches = partial(holds_text, expected=words.answer)
            answers.append(score_answer(reader, tokenizer, prompt, pieces.answer, matches, generate, place))
            positions.append(position)
        return {"positions": positions, "begins": own, "answers": Answers(answers).to_list()}

    def name(cell: tuple[int, float]) -> str:
        return f"{cell[0]:,} tokens, depth {cell[1]:.0%}"

    def result(entries: dict[tuple[int, float], Any]) -> NeedleGrid:
        measured = [(cell, entries[cell]) for cell in grid if cell in entries]
        cells = [NeedleCell.from_list(e["answers"], *cell, e["positions"], e["begins"]) for cell, e in measured]
        grid_asked = {"lengths": lengths, "depths": depths}
        return NeedleGrid(cells, settings | grid_asked | names)

    grid = [(length, depth) for length in lengths for depth in depths]
    return run_distributed(
        reader,
        "needle",
        lambda worker: worker.measure({cell: cell[0] for cell in grid}, measure, name),
        result,
        depends_on={"metric": NeedleGrid.kind, **settings},
        trial=haystacks.prompt(lengths[0], 0, begins[lengths[0], depths[0], 0])[0],
        run=run,
    )


class Haystacks:
    """Haystacks of a corpus, which get the needle between two sentences.

    Args:
        corpus: (N,) ids.
        pieces: what is put around a haystack.
        tokenizer: tells by its `decode` where sentences end.
    """

    def __init__(self, corpus: np.ndarray, pieces: Pieces, tokenizer: Any):
        self.corpus, self.pieces, self.tokenizer = corpus, pieces, tokenizer
        self.sentence_ends: dict[int, bool] = {}  # of the ids met so far

    def prompt(self, length: int, depth: float, begin: int) -> tuple[np.ndarray, int]:
        """Return the prompt of a haystack that starts at `begin`, and how many of its tokens precede the needle."""
        haystack = self.corpus[begin : begin + haystack_length(length, self.pieces)]
        for i in set(haystack.tolist()) - self.sentence_ends.keys():
            self.sentence_ends[i] = ends_sentence(self.tokenizer.decode([i]))
        at = insertion_point(np.array([self.sentence_ends[i] for i in haystack.tolist()]), depth)
        return hide_needle(haystack, at, self.pieces), len(self.pieces.bos) + at


def line_retrieval(
    model: nn.Module | Reader,
    tokenizer: Any,
    *,
    lines: Sequence[int],
    repeats: int = 10,
    chat_template: bool = False,
    seed: int = 0,
    bos_token_id: int | None = None,
    generate: bool = True,
    train_length: int | None = None,
    run: Run | None = None,
) -> LineRetrieval:
    """Measure whether a model finds one of many lines, `line <name>: REGISTER_CONTENT is <number>`, by its name.

    Other arguments and errors are those of `needle_in_a_haystack`.

    Args:
        lines: numbers of lines in a record.
        repeats: records for each of them, each with one question.
        seed: of Python's `random.Random`, which makes up the records.

    Returns:
        `LineRetrieval` with one point per number of lines.
    """
    reader = reader_for(model)
    lines = sorted({whole_number("lines", n) for n in numbers("lines", lines)})
    if not lines:
        raise ValueError("lines is empty; give one or more numbers of lines.")
    repeats, seed = whole_number("repeats", repeats, 1), whole_number("seed", seed)
    check_kind(bool, chat_template=chat_template, generate=generate)
    if generate:
        check_replies(reader, "measure without replies: generate=False, or --no-replies")
    name_of_tokenizer = tokenizer_name(tokenizer)
    names = labels(None, train_length)
    bos, _ = special_ids(reader, bos_token_id, None)
    encode, frame = encoder(tokenizer), chat_frame(tokenizer) if chat_template else None

    def question(n: int, repeat: int) -> tuple[Record, np.ndarray, np.ndarray]:
        record = draw_record(n, seed, repeat)
        prompt, answer = split_encoding(encode, record_prompt(record, frame), record.answer)
        before = [] if chat_template else [bos]
        prompt = check_token_ids([*before, *prompt], "the record as the tokenizer encodes it", reader.vocab_size)
        answer = check_token_ids(answer, "the answer as the tokenizer encodes it", reader.vocab_size)
        if len(set(prompt[1:].tolist())) < 2:
            raise ValueError(
                "the tokenizer turns a record of lines into one id over and over: it does not know this language. Give "
                "the tokenizer of the model."
            )
        return record, prompt, answer

    longest = max(sum(map(len, question(n, i)[1:])) for n in (lines[0], lines[-1]) for i in range(repeats))
    check_positions(reader, longest, f"a record of {lines[-1]} lines", REPLY_MARGIN * generate)
    _, trial, _ = question(lines[0], 0)
    settings = (
        reader.settings()
        | {
            "seed": seed,
            "repeats": repeats,
            "generate": generate,
            "bos_token_id": bos,
            "tokenizer": name_of_tokenizer,
            "record_sha256": content_hash(trial),
        }
        | ({"chat_template": True} if chat_template else {})
    )

    def measure(n: int) -> dict[str, Any]:
        tokens, asked_lines, answers = [], [], []
        for repeat in range(repeats):
            record, prompt, answer = question(n, repeat)
            matches = partial(holds_number, expected=record.number)
            where = f"{n} lines, repeat {repeat}"
            answers.append(score_answer(reader, tokenizer, prompt, answer, matches, generate, where))
            tokens.append(len(prompt) + len(answer))
            asked_lines.append(record.asked_line)
        return {"tokens": tokens, "asked_lines": asked_lines, "answers": Answers(answers).to_list()}

    def result(entries: dict[int, Any]) -> LineRetrieval:
        measured = [(n, entries[n]) for n in lines if n in entries]  # the journal may have others too
        points = [LinesPoint.from_list(e["answers"], n, e["tokens"], e["asked_lines"]) for n, e in measured]
        return LineRetrieval(points, settings | {"lines": lines} | names)

    return run_distributed(
        reader,
        "line retrieval",
        lambda worker: worker.measure({n: n for n in lines}, measure, lambda n: f"{n} lines"),
        result,
        depends_on={"metric": LineRetrieval.kind, **settings},
        trial=trial,
        run=run,
    )


def record_prompt(record: Record, frame: Frame | None) -> str:
    """Return record and question, up to where the answer begins; in a chat, it begins in the reply."""
    if frame is None:
        return record.text + record.question
    question, _, begin = record.question.rpartition("\nAnswer: ")
    return frame.head + record.text + question + frame.tail + begin


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function from text to ids without special tokens."""
    return lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def check_replies(reader: Reader, remedy: str) -> None:
    """Raise ValueError if the model cannot reply; `remedy` says how to mend it."""
    if not reader.can_reply:
        raise ValueError(f"{reader.settings()['model']} has no generate method; {remedy}.")
