"""The forgetting curve: how far a model copies what it has read (Liu et al. 2024, section 3).

Inputs are in `curve.protocol`, the lengths of an adaptive measurement in `curve.adaptive`, confidence intervals in
`curve.intervals`, and the paper's lengths in `curve.lengths`: plain functions that do not use the task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

import numpy as np

from ..checks import check_token_ids
from ..curve.adaptive import locate
from ..curve.intervals import ENOUGH, SEPARATE, LengthInterval, length_interval
from ..curve.lengths import METHODS, CurvePoint, MemoryLength, memory_lengths
from ..curve.protocol import (
    default_lengths,
    input_tokens,
    linear_lengths,
    log_lengths,
    model_inputs,
    order_samples,
    random_samples,
    scored_logits,
)
from ..function import function
from ..result import Number, Table, plural
from ..run.journal import content_hash
from ..task import Counts, Missing, Predict, Task, TaskResult, Trial, option


PAPER_POINTS = 32  # lengths of the paper
# Settings that random sequences depend on
RANDOM_TEXTS = ("seed", "repeats", "lengths", "id_range", "skipped_sha256", "bos_token_id", "eos_token_id")


def span(lengths: Sequence[int]) -> str:
    """Return the number and the range of lengths in words.

    >>> span([800]), span([8, 16, 64])
    ('length 800', '3 lengths from 8 to 64')
    """
    if len(lengths) == 1:
        return f"length {lengths[0]}"
    return f"{len(lengths)} lengths from {lengths[0]} to {lengths[-1]}"


@dataclass(frozen=True)
class ForgettingCurve(TaskResult):
    """A measured forgetting curve; its scores are keyed by length."""

    kind, title, inches = "forgetting_curve", "Forgetting curve", (6.6, 5.6)
    verb, same_texts = "copies", ("data_type", "corpus_sha256")

    @classmethod
    def of_points(
        cls,
        points: Sequence[CurvePoint],
        settings: dict[str, Any] | None = None,
        not_measured: dict[int, str] | None = None,
    ) -> Self:
        """Return the curve with these points; `not_measured` gives the reasons for missing lengths."""
        points = sorted(points, key=lambda p: p.length)
        twice = [a.length for a, b in pairwise(points) if a.length == b.length]
        if twice:
            raise ValueError(f"points must be of different lengths, got two of length {twice[0]}.")
        scores = {
            p.length: {"copy": [*p.copy_correct], "LM": [*p.lm_correct]}
            | ({} if p.begin_locs is None else {"begins": [*p.begin_locs]})
            for p in points
        }
        return cls(scores, settings or {}, not_measured or {})

    def __post_init__(self):
        assert self.points is not None  # checks the numbers

    @cached_property
    def points(self) -> tuple[CurvePoint, ...]:
        """One `CurvePoint` per measured length, ascending."""
        return tuple(CurvePoint(n, s["copy"], s["LM"], s.get("begins")) for n, s in self.scores.items())

    @property
    def not_measured(self) -> dict[int, str]:
        """The reasons for missing points, by length."""
        return self.missing

    def span(self, keys):
        return span(keys)

    @property
    def fine_length(self) -> MemoryLength:
        """The paper's fine length: the largest measured length with a copy accuracy above 99 %."""
        return self.memory_lengths["fine_max"]

    @property
    def coarse_length(self) -> MemoryLength:
        """The paper's coarse length: the largest measured length copied at least 1 % better than guessed.

        One of many lengths passes by chance, even without memory; `interval` tests for significance.
        """
        return self.memory_lengths["coarse_max"]

    @property
    def memory_lengths(self) -> dict[str, MemoryLength]:
        """All five definitions; see the function `memory_lengths`."""
        return memory_lengths(self.points)

    def interval(self, method: str, confidence: float = 0.95) -> LengthInterval:
        """Return the confidence interval of the "fine" or the "coarse" length; see `length_interval`."""
        key = method, confidence
        if key not in self._intervals:
            lengths, scored = [p.length for p in self.points], [p.scored_tokens for p in self.points]
            protocol = self.settings.get("protocol", "reference")
            values, places = [p.margins(method) for p in self.points], [p.places for p in self.points]
            self._intervals[key] = length_interval(lengths, values, scored, method, confidence, protocol, places)
        return self._intervals[key]

    @cached_property
    def _intervals(self) -> dict[tuple[str, float], LengthInterval]:
        """Cache of `interval`, which a card calls a dozen times."""
        return {}

    @property
    def repeats_in_words(self) -> str:
        """Return the number of repeats in words, such as "10 repeats", or "3 to 10 repeats" for an adaptive curve."""
        counts = sorted({p.repeats for p in self.points})
        return plural(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"

    @property
    def overlapping(self) -> list[int]:
        """The lengths at which more than a quarter of the repeats share scored tokens with another."""
        return [p.length for p in self.points if len(p.texts) < SEPARATE * p.repeats]

    def by_length(self, replies=True, overlapping=False):
        counts = []
        for p in self.points:
            right = np.array(p.copy_correct)[[*range(p.repeats)] if overlapping else p.texts]
            asked = len(right) * p.scored_tokens
            counts.append(Counts(p.length, right / p.scored_tokens, p.scored_tokens, p.length, asked, right.sum()))
        return counts

    def places(self):
        return {p.length: list(p.begin_locs or ()) for p in self.points}

    def distinct(self, length, texts):
        return next(p for p in self.points if p.length == length).first(texts).texts

    def unlike(self, other, *more):
        settings = self.settings, other.settings
        if any(s.get("protocol") == "adaptive" for s in settings):
            return "the adaptive protocol stops where the lengths of one model are significant; measure both with the reference protocol"
        random = [s.get("data_type") == "random" for s in settings]
        if not any(random) and any("corpus_sha256" not in s for s in settings):
            return "a corpus without a hash may be another one"
        return super().unlike(other, *RANDOM_TEXTS * all(random))

    def extent(self):
        return {
            "repeats": self.repeats_in_words.rpartition(" ")[0],
            "longest lengths": str(self.points[-1].length),
        }

    def in_words(self) -> str:
        """Return the lengths up to which the model copies, roughly and word for word, with 95 % CIs in brackets."""
        fine = self.interval("fine")
        few = max(p.repeats for p in self.points) < ENOUGH and not fine.longest and fine.high != self.points[0].length
        advice = f"; {ENOUGH} repeats are needed for a lower end of the fine length at each length" if few else ""
        passages = f"{self.repeats_in_words.replace('repeat', 'passage')} at {span([p.length for p in self.points])}"
        measured = f"Measured with {passages}, 95 % CI in brackets"
        return f"{self.copies_in_words()}; {self.exact_in_words()}. {measured}{advice}{self.shortage}"

    def copies_in_words(self) -> str:
        """Return the length up to which passages are copied better than guessed, and the accuracy there."""
        coarse = self.interval("coarse")
        if coarse.low:
            p = next(p for p in self.points if p.length == coarse.low)
            longest = ", the longest tested" * coarse.longest
            return f"Copies up to {p.length:,} tokens [{coarse.in_words()}{longest}] at {100 * p.copy_mean:.3g} %"
        if coarse.high is not None:
            return f"Copies no better than it guesses from {coarse.high:,} tokens on [{coarse.in_words()}]"
        return f"Whether it copies what it reads is not significant [{coarse.in_words()}]"

    def exact_in_words(self) -> str:
        """Return the length up to which most passages are copied with an accuracy above 99 %."""
        fine, most = self.interval("fine"), [p for p in self.points if 2 * p.copied > p.repeats]
        if fine.low:
            return f"word for word up to {fine.low:,} tokens [{fine.in_words()}]"
        if not most:
            return "word for word at no tested length" + f" [{fine.in_words()}]" * (fine.high is not None)
        p = most[-1]
        return f"word for word {p.copied} of {p.repeats} passages of {p.length:,} tokens [{fine.in_words()}]"

    @property
    def shortage(self) -> str:
        """Return the part of the summary about passages that overlap because the corpus is too short."""
        if not self.overlapping:
            return ""
        p = next(p for p in self.points if p.length == self.overlapping[0])
        return (
            f"; the corpus is too short: its passages overlap from {p.length:,} tokens on, where {p.repeats} of them count as "
            f"{plural(len(p.texts), 'passage')}"
        )

    def explanation(self) -> str:
        return (
            "The model copies a passage that it has read (copy accuracy), and is compared with itself after an unrelated "
            "passage (LM accuracy). The fine length, in tokens, is the longest at which the typical passage, i.e. more than "
            "half of all passages, is copied with an accuracy above 99 %. The coarse length is the longest copied at least "
            "1 % better than guessed, on average. Their 95 % CIs come from tests over the repeats, and assume that memory only fades. "
            "The paper's definition takes the longest tested length whose mean accuracy passes, even by chance."
        )

    def numbers(self):
        """Return the lower ends of the confidence intervals, as the numbers that are significant.

        Upper ends are omitted: a leaderboard would rank them as scores.
        """
        if not self.points:
            return []
        names = {"fine": "fine memory length of the typical passage", "coarse": "coarse memory length"}
        sample = f"{plural(len(self.points), 'length')}, {self.repeats_in_words}"
        numbers = []
        for method, name in names.items():
            interval, paper = self.interval(method), self.memory_lengths[f"{method}_max"]
            words = (
                interval.in_words() + f" (95 % CI{'; the longest tested' * interval.longest})" * interval.significant
            )
            metric = "forgetting_curve" if interval.low else ""
            name = f"{name}, at least (tokens, 95 % CI)"
            paper = f"{sample}; the paper's, of means: {paper}"
            numbers.append(Number(metric, name, interval.low, interval.low, interval.high, paper, words))
        p = next((p for p in self.points if p.length >= self.interval("fine").low), self.points[-1])
        copied = f"{p.copied} of {p.repeats}, the worst to {p.copy_worst:.1%}"
        name = "share of passages copied above 99 %"
        return [
            *numbers,
            Number("", name, round(p.copied / p.repeats, 4), sample=f"{p.length:,} tokens", words=copied),
        ]

    def table(self) -> Table:
        columns = (
            "length",
            "scored tokens",
            "copied above 99 %",
            "worst copy",
            "mean copy",
            "± std",
            "LM",
            "± std",
            "p",
        )
        columns += ("mean passes as",)
        rows = [
            (
                *(p.length, p.scored_tokens, f"{p.copied} of {p.repeats}"),
                *(f"{value:.1%}" for value in (p.copy_worst, p.copy_mean, p.copy_std, p.lm_mean, p.lm_std)),
                f"{p.p_value:.2g}",
                next((method for method in METHODS if p.passes(method)), "-"),
            )
            for p in self.points
        ]
        return Table(columns, rows)

    def draw(self, figure, title, train_length):
        from ..curve.plot import draw_curve

        draw_curve(figure, self, title, train_length)


@dataclass(frozen=True)
class Curve(Task):
    """Measure how far a causal language model remembers: its forgetting curve (Liu et al. 2024, section 3).

    Prints the fine length (copying above 99 %) and the coarse length (copying at least 1 % better than guessing from
    the language).

    At each length n the model reads `[bos] S [bos] S [eos]` and `[bos] I [bos] S [eos]`, 2n + 3 tokens each, `repeats`
    times with another target S, and its greedy predictions of the second half of the last S are counted.
    """

    name, result = "curve", ForgettingCurve
    examples = """
  curve gpt2 --text book.txt
  curve model_cards/fox-demo --max-length 64 --points 3 --repeats 2 --output fox
  curve MODEL --preset paper
  curve MODEL --protocol adaptive --journal curve.jsonl
  curve MODEL --endpoint http://localhost:8000/v1"""

    lengths: list[int] | None = option(None, "lengths of the passages in tokens, such as 500,1000", least=1)
    max_length: int | None = option(None, "longest passage, in tokens (default: half the claimed context)", least=9)
    points: int | None = option(None, "number of lengths (default: 16; 32 for the adaptive protocol)", least=2)
    log_lengths: bool = option(False, "space the lengths logarithmically")
    preset: str | None = option(
        None,
        "paper: the lengths l/32, 2l/32 ... l of Liu et al., l being the claimed context or the longest passage; the model "
        "reads twice as many tokens",
        choices=("paper",),
    )
    repeats: int = option(10, "passages per length", least=1)
    data_type: str = option(
        "order", "order: passages of the corpus; random: random tokens", choices=("order", "random")
    )
    id_range: list[int] | None = option(
        None, "lowest and highest id of random tokens (default: 10 to the last id)", least=0
    )
    irrelevant_text: np.ndarray | None = option(
        None, "token ids of the unrelated passages (default: the end of the corpus)"
    )
    protocol: str = option(
        "reference",
        "reference: the paper's program, token for token; adaptive: measures only what its two lengths depend on",
        choices=("reference", "adaptive"),
    )
    confidence: float | None = option(
        None, "confidence at which the adaptive protocol stops (default: 0.95)", least=0.01, most=0.9999
    )
    seed: int = option(0, "random seed of the passage positions")

    def __post_init__(self):
        super().__post_init__()
        excluded = {
            "preset": ("points", "log_lengths", "lengths") if self.preset else (),
            "lengths": ("points", "log_lengths", "max_length") if self.lengths else (),
            "data_type=random": ("irrelevant_text",) if self.data_type == "random" else (),
            "data_type=order": ("id_range",) if self.uses_text() else (),
            "protocol=reference": ("confidence",) if self.protocol == "reference" else (),
        }
        for name, others in excluded.items():
            for other in others:
                if getattr(self, other) is not None and getattr(self, other) is not False:
                    raise ValueError(f"{name} and {other} exclude each other; drop one.")
        if self.preset and (self.protocol, self.repeats) != ("reference", 10):
            raise ValueError("preset=paper requires protocol=reference and repeats=10. Drop the other value.")
        if self.id_range is not None and len(self.id_range) != 2:
            raise ValueError(f"id_range must be two ids, the lowest and the highest, got {self.id_range}.")
        if self.protocol == "adaptive" and self.confidence is None:
            self.fill(confidence=0.95)

    @classmethod
    def in_report(cls, **arguments):
        return cls(log_lengths=True, **arguments)

    def uses_text(self):
        return self.data_type == "order"

    def prepare(self):
        subject, lengths = self.subject, self.choose_lengths()
        drawing = lengths, self.repeats, self.seed
        if self.uses_text():
            ids = self.irrelevant_text
            if ids is not None:
                ids = check_token_ids(ids, "irrelevant_text", subject.reader.vocab_size)
            self.fill(irrelevant=ids)
            samples = order_samples(subject.text, *drawing, self.irrelevant)
        else:
            id_range = self.check_id_range()
            skip = (
                undrawn_ids(subject.tokenizer, *id_range) if hasattr(subject.tokenizer, "get_vocab") else frozenset()
            )
            samples = random_samples((id_range[0], id_range[1]), *drawing, skip=skip | {subject.bos, subject.eos})
            self.fill(id_range=id_range, skipped=skip)
        self.fill(lengths=lengths, samples=samples)

    def choose_lengths(self) -> list[int]:
        """Return the lengths to measure."""
        subject = self.subject
        if self.lengths is not None:
            return self.lengths
        if self.preset is not None:
            longest = self.max_length or subject.claimed
            if longest is None:
                raise ValueError("the model claims no context, which preset=paper measures up to; give max_length.")
            return sorted({max(1, longest * i // PAPER_POINTS) for i in range(1, PAPER_POINTS + 1)})
        grid = log_lengths if self.log_lengths else linear_lengths
        points = self.points or (32 if self.protocol == "adaptive" else 16)
        if self.max_length is not None:
            return grid(self.max_length, points)
        corpus_tokens = len(subject.text) if self.uses_text() else None
        return default_lengths(subject.claimed, corpus_tokens, points, grid, self.repeats)

    def check_id_range(self) -> list[int]:
        """Return the lowest and the highest random id."""
        vocab_size = self.subject.reader.vocab_size
        if self.id_range is None and vocab_size == math.inf:
            raise ValueError(
                f"the size of the vocabulary of {self.subject.reader!r} is unknown: give it vocab_size, or give id_range."
            )
        low, high = self.id_range or (10, int(vocab_size) - 1)
        if not 0 <= low <= high < vocab_size:
            raise ValueError(f"id_range must lie within the model's ids, 0 .. {vocab_size - 1}, got ({low}, {high}).")
        return [low, high]

    def facts(self):
        facts, tokenizer = {}, self.subject.tokenizer
        if not self.uses_text():
            if self.skipped:
                facts = {"skipped_ids": len(self.skipped), "skipped_sha256": content_hash(sorted(self.skipped))}
            return facts
        if self.irrelevant is not None:
            facts |= {"irrelevant_tokens": len(self.irrelevant), "irrelevant_sha256": content_hash(self.irrelevant)}
        if hasattr(tokenizer, "decode"):  # to compare models with different tokenizers in bytes
            sample = self.subject.text[:10_000].tolist()
            text = tokenizer.decode(sample, clean_up_tokenization_spaces=False)
            facts["bytes_per_token"] = round(len(text.encode()) / len(sample), 2)
        return facts

    def trials(self, scores):
        if self.protocol == "reference":
            return [self.trial(length, 0, self.repeats) for length in self.samples]
        asked = {key: self.trial(*key) for key, score in scores.items() if isinstance(score, Missing)}
        too_long = min([length for length, *_ in asked], default=math.inf)  # longer inputs cannot be read either

        def measure(length: int, first: int, stop: int) -> CurvePoint:
            """Return the point with all repeats up to `stop`, which the processes share."""
            edges = [first + (stop - first) * i // self.subject.processes for i in range(self.subject.processes + 1)]
            asked.update({(length, a, b): self.trial(length, a, b) for a, b in pairwise(edges) if a < b})
            parts = {key: scores.get(key) for key in asked if key[0] == length}
            if None in parts.values():
                raise Pending
            ((_, point),) = joined(parts).items()
            return CurvePoint(length, point["copy"], point["LM"], point.get("begins"))

        lengths = [length for length in self.samples if length < too_long]
        with suppress(Pending):  # replays the search, which only depends on the scores
            if lengths:
                locate(lengths, measure, repeats=self.repeats, confidence=self.confidence or 0.95)
        return [*asked.values()]

    def trial(self, length: int, first: int, stop: int) -> Trial:
        """Return the trial for some repeats of a length, with two inputs each."""
        return Trial((length, first, stop), input_tokens(length), 2 * (stop - first))

    def requests(self, key):
        length, first, stop = key
        samples, subject = self.samples[length][first:stop], self.subject
        inputs = (model_inputs(kind, samples, subject.bos, subject.eos) for kind in ("copy", "LM"))
        return [Predict(rows, 1 + length, scored_logits(length)) for rows in inputs]  # repeats share `[bos] I`

    def score(self, key, responses):
        length, first, stop = key
        begins = [sample.begin for sample in self.samples[length][first:stop]]
        copy, lm = (right.sum(1).tolist() for right in responses)
        return {"copy": copy, "LM": lm} | ({} if None in begins else {"begins": begins})

    def summarize(self, scores, missing):
        """Join the trials of each length; after an interruption, some may be missing."""
        reasons = {length: reason for (length, *_), reason in missing.items()}
        readable = {key: score for key, score in scores.items() if reasons.get(key[0], "interrupted") == "interrupted"}
        measured = joined(readable)
        if "interrupted" in reasons.values():  # we cannot know which other trials would be needed
            reasons |= dict.fromkeys([length for length in self.samples if length not in reasons], "interrupted")
        return measured, {length: reason for length, reason in sorted(reasons.items()) if length not in measured}


forgetting_curve = function(Curve)


class Pending(Exception):
    """The score of a trial is not known yet."""


def joined(scores: dict[tuple[int, int, int], dict[str, list[int]]]) -> dict[int, dict[str, list[int]]]:
    """Join the scores of the repeats of each length, ascending."""
    joined: dict[int, dict[str, list[int]]] = {}
    for (length, *_), score in sorted(scores.items(), key=lambda item: item[0]):
        for name, values in score.items():
            joined.setdefault(length, {}).setdefault(name, []).extend(values)
    return joined


def undrawn_ids(tokenizer, low: int, high: int) -> frozenset[int]:
    """Return the ids from `low` to `high` that text does not contain: special and added tokens, unused ids."""
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return frozenset(range(low, high + 1)) - (set(tokenizer.get_vocab().values()) - added)
