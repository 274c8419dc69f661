"""The forgetting curve: how far back a model can copy from its context (Liu et al. 2024, section 3).

This file defines the task and its result, using the modules in `metrics.curve`: `protocol` builds the inputs,
`adaptive` chooses lengths, `intervals` computes confidence intervals, and `lengths` computes the paper's lengths.
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


PAPER_POINTS = 32  # number of lengths in the paper
# Settings that determine the random sequences with data_type="random"
RANDOM_TEXTS = ("seed", "repeats", "lengths", "id_range", "skipped_sha256", "bos_token_id", "eos_token_id")


@dataclass(frozen=True)
class ForgettingCurve(TaskResult):
    """The result of a forgetting curve. The scores are keyed by length."""

    kind, title, inches = "forgetting_curve", "Forgetting curve", (6.6, 5.6)
    verb, same_texts = "copies", ("data_type", "corpus_sha256")

    @classmethod
    def of_points(
        cls,
        points: Sequence[CurvePoint],
        settings: dict[str, Any] | None = None,
        missing: dict[int, str] | None = None,
    ) -> Self:
        """Create a curve from points.

        Args:
            points: points of different lengths, in any order.
            settings: settings of the measurement.
            missing: maps the lengths of missing points to the reasons.
        """
        points = sorted(points, key=lambda p: p.length)
        twice = [a.length for a, b in pairwise(points) if a.length == b.length]
        if twice:
            raise ValueError(f"points must have different lengths, got two of length {twice[0]}.")
        scores = {
            p.length: {"copy": [*p.copy_correct], "LM": [*p.lm_correct]}
            | ({} if p.begin_locs is None else {"begins": [*p.begin_locs]})
            for p in points
        }
        return cls(scores, settings or {}, missing or {})

    def __post_init__(self):
        assert self.points is not None  # creates the points; their constructor checks the counts

    @cached_property
    def points(self) -> tuple[CurvePoint, ...]:
        """The points of the curve, in ascending order of length."""
        return tuple(CurvePoint(n, s["copy"], s["LM"], s.get("begins"), self.whole) for n, s in self.scores.items())

    @property
    def whole(self) -> bool:
        """Whether all tokens of a passage are scored instead of its second half, because a cache is measured."""
        return self.settings.get("cache") is not None

    def span(self, keys):
        return f"length {keys[0]}" if len(keys) == 1 else f"{len(keys)} lengths from {keys[0]} to {keys[-1]}"

    @property
    def fine_length(self) -> MemoryLength:
        """The paper's fine length: the largest measured length with a copy accuracy above 99 %."""
        return self.memory_lengths["fine_max"]

    @property
    def coarse_length(self) -> MemoryLength:
        """The paper's coarse length: the largest measured length that meets the coarse criterion; see `curve.lengths`.

        If many lengths are measured, a length may meet the criterion by chance. `interval` tests for significance.
        """
        return self.memory_lengths["coarse_max"]

    @property
    def memory_lengths(self) -> dict[str, MemoryLength]:
        """The memory length under five definitions; see the function `memory_lengths`."""
        return memory_lengths(self.points)

    def interval(self, method: str, confidence: float = 0.95) -> LengthInterval:
        """Return the confidence interval for the "fine" or the "coarse" length; see `length_interval`."""
        key = method, confidence
        if key not in self._intervals:
            lengths, scored = [p.length for p in self.points], [p.scored_tokens for p in self.points]
            protocol = self.settings.get("protocol", "reference")
            values, places = [p.margins(method) for p in self.points], [p.places for p in self.points]
            self._intervals[key] = length_interval(lengths, values, scored, method, confidence, protocol, places)
        return self._intervals[key]

    @cached_property
    def _intervals(self) -> dict[tuple[str, float], LengthInterval]:
        """Cache of `interval`. A model card calls `interval` a dozen times."""
        return {}

    @property
    def repeats_in_words(self) -> str:
        """The number of repeats in words, such as "10 repeats". It may be a range, such as "3 to 10 repeats"."""
        counts = sorted({p.repeats for p in self.points})
        return plural(counts[0], "repeat") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} repeats"

    @property
    def overlapping(self) -> list[int]:
        """The lengths with many overlapping passages: fewer than three quarters of the repeats are separate."""
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
        if self.whole != other.whole:
            return (
                "one result scores all tokens of a passage, and the other result its second half. Measure the full "
                'cache with --cache full, or cache="full"'
            )
        settings = self.settings, other.settings
        if any(s.get("protocol") == "adaptive" for s in settings):
            return "the adaptive protocol stops where the lengths of one model are significant; measure both with the reference protocol"
        random = [s.get("data_type") == "random" for s in settings]
        if not any(random) and any("corpus_sha256" not in s for s in settings):
            return "a corpus without a hash may be a different corpus"
        reason = super().unlike(other, *RANDOM_TEXTS * all(random))
        if reason is None and not self.same_tokens(other):
            return "the same random ids are different tokens, unless the tokenizers have the same hash"
        return reason

    def extent(self):
        return {
            "repeats": self.repeats_in_words.rpartition(" ")[0],
            "longest lengths": str(self.points[-1].length),
            "scored tokens": "all" if self.whole else "second half",
        }

    def in_words(self) -> str:
        """Describe the coarse and the fine length in sentences."""
        fine = self.interval("fine")
        few = max(p.repeats for p in self.points) < ENOUGH and not fine.longest and fine.high != self.points[0].length
        advice = f"; {ENOUGH} repeats are needed for a lower end of the fine length at each length" if few else ""
        passages = f"{self.repeats_in_words.replace('repeat', 'passage')} at {self.span([*self.scores])}"
        scored = ", all tokens scored" * self.whole
        return (
            f"{self.copies_in_words()} {self.exact_in_words()} Measured with {passages}{scored}{advice}{self.shortage}"
        )

    def copies_in_words(self) -> str:
        """Return a sentence with the coarse length, its 95 % CI, and the copy accuracy at this length."""
        coarse = self.interval("coarse")
        if coarse.low:
            p = next(p for p in self.points if p.length == coarse.low)
            longest = ", the longest tested" * coarse.longest
            interval = f"95 % CI: {coarse.in_words()}{longest}"
            return f"Copies up to {p.length:,} tokens ({interval}) with an accuracy of {100 * p.copy_mean:.3g} %."
        if coarse.high is not None:
            return f"Copies no better than it guesses from {coarse.high:,} tokens on (95 % CI: {coarse.in_words()})."
        return f"Whether the model copies is not significant (95 % CI: {coarse.in_words()})."

    def exact_in_words(self) -> str:
        """Return a sentence with the fine length and its 95 % CI."""
        fine, most = self.interval("fine"), [p for p in self.points if 2 * p.copied > p.repeats]
        exactly = "word for word (accuracy above 99 %"
        if fine.low:
            return f"Copies up to {fine.low:,} tokens {exactly}; 95 % CI: {fine.in_words()})."
        if not most:
            interval = f"; 95 % CI: {fine.in_words()}" if fine.high is not None else ""
            return f"Copies no tested length {exactly}{interval})."
        p, interval = most[-1], f"95 % CI of the longest length: {fine.in_words()}"
        return f"Copies {p.copied} of {p.repeats} passages of {p.length:,} tokens {exactly}; {interval})."

    @property
    def shortage(self) -> str:
        """Suffix of the summary. It is an empty string unless too many passages overlap in the corpus."""
        if not self.overlapping:
            return ""
        p = next(p for p in self.points if p.length == self.overlapping[0])
        return (
            f"; the corpus is too short: its passages overlap from {p.length:,} tokens on, and {p.repeats} of them count as "
            f"{plural(len(p.texts), 'passage')}"
        )

    def explanation(self) -> str:
        scored = (
            "Because a cache is measured, all tokens of a passage are scored. A forgetting curve of the model itself "
            "scores the second half. "
        )
        return scored * self.whole + (
            "The copy accuracy is measured on a passage that the model has read before. The LM accuracy is measured on the "
            "same passage after an unrelated passage. The fine length is the longest length (in tokens) at which the model "
            "copies the typical passage with an accuracy above 99 %. The typical passage stands for more than half of all "
            "passages. The coarse length is the longest length with a mean copy accuracy at least one percentage point "
            "above the LM accuracy. The 95 % CIs come from tests over the repeats. They assume that memory only fades. The "
            "paper's definition takes the longest tested length with a passing mean accuracy. A mean may pass by chance."
        )

    def numbers(self):
        """Return the lower ends of two confidence intervals: for the fine length and for the coarse length.

        Leaderboards rank models by these numbers, so we only report lengths that are statistically significant.
        """
        if not self.points:
            return []
        names = {"fine": "fine memory length of the typical passage", "coarse": "coarse memory length"}
        sample = f"{plural(len(self.points), 'length')}, {self.repeats_in_words}{', all tokens scored' * self.whole}"
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
        columns = ("length", "scored tokens", "copied above 99 %", "worst copy", "mean copy", "± std", "LM", "± std")
        columns += ("p", "mean passes as")
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
    """Measure how far back a causal language model remembers: its forgetting curve (Liu et al. 2024, section 3).

    The model reads two inputs. In `[bos] S [bos] S [eos]`, a passage S occurs twice. In `[bos] I [bos] S [eos]`, S
    follows an unrelated passage I. In both inputs, we count the correct greedy predictions in the second half of the
    last S. With --cache, we count them in all of the last S. Each length has `repeats` passages. An input has 2n + 3
    tokens at length n.

    The copy accuracy is the accuracy in the first input. The fine length is the longest length with a copy accuracy
    above 99 %. The coarse length is the longest length with a copy accuracy at least one percentage point above the
    accuracy in the second input.
    """

    name, result = "curve", ForgettingCurve
    examples = """
  curve gpt2 --text book.txt
  curve model_cards/fox-demo --max-length 64 --points 3 --repeats 2 --output fox
  curve MODEL --preset paper
  curve MODEL --protocol adaptive --journal curve.jsonl
  curve MODEL --endpoint http://localhost:8000/v1"""

    lengths: list[int] | None = option(None, "lengths of the passages in tokens, such as 500,1000", least=1)
    max_length: int | None = option(
        None, "length of the longest passage in tokens (default: half the claimed context)", least=9
    )
    points: int | None = option(None, "number of lengths (default: 16; 32 for the adaptive protocol)", least=2)
    log_lengths: bool = option(False, "space the lengths logarithmically")
    preset: str | None = option(
        None,
        "preset for the lengths: 'paper' measures 32 evenly spaced lengths up to --max-length or the claimed context, "
        "as in Liu et al. Inputs are twice as long",
        choices=("paper",),
    )
    repeats: int = option(10, "number of passages per length", least=1)
    data_type: str = option(
        "order",
        "content of the passages: 'order' takes text from the corpus, 'random' draws random tokens",
        choices=("order", "random"),
    )
    id_range: list[int] | None = option(
        None, "lowest and highest id of random tokens (default: 10 to the last id)", least=0
    )
    irrelevant_text: np.ndarray | None = option(
        None, "token ids of the unrelated passages (default: the end of the corpus)"
    )
    protocol: str = option(
        "reference",
        "lengths to measure: 'reference' measures the whole grid, as in the paper's code; 'adaptive' only measures "
        "lengths that determine the fine and the coarse length",
        choices=("reference", "adaptive"),
    )
    confidence: float | None = option(
        None, "confidence level at which the adaptive protocol stops (default: 0.95)", least=0.01, most=0.9999
    )
    seed: int = option(0, "random seed that selects the passages")

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
                    raise ValueError(f"{name} cannot be combined with {other}. Drop one of them.")
        if self.preset and (self.protocol, self.repeats) != ("reference", 10):
            raise ValueError("preset=paper requires protocol=reference and repeats=10. Drop protocol and repeats.")
        if self.id_range is not None and len(self.id_range) != 2:
            raise ValueError(f"id_range must be two ids [lowest, highest], got {self.id_range}.")
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
        self.fill(lengths=lengths, samples=samples, whole=subject.reader.cache is not None)

    def choose_lengths(self) -> list[int]:
        """Return the lengths to measure: the option `lengths`, the preset, or a grid."""
        subject = self.subject
        if self.lengths is not None:
            return self.lengths
        if self.preset is not None:
            longest = self.max_length or subject.claimed
            if longest is None:
                raise ValueError("preset=paper needs max_length, because the model does not claim a context.")
            return sorted({max(1, longest * i // PAPER_POINTS) for i in range(1, PAPER_POINTS + 1)})
        grid = log_lengths if self.log_lengths else linear_lengths
        points = self.points or (32 if self.protocol == "adaptive" else 16)
        if self.max_length is not None:
            return grid(self.max_length, points)
        corpus_tokens = len(subject.text) if self.uses_text() else None
        return default_lengths(subject.claimed, corpus_tokens, points, grid, self.repeats)

    def check_id_range(self) -> list[int]:
        """Return the lowest and the highest id of random tokens. Check that both are in the vocabulary."""
        vocab_size = self.subject.reader.vocab_size
        if self.id_range is None and vocab_size == math.inf:
            raise ValueError(
                f"the vocabulary size of {self.subject.reader!r} is unknown. Pass vocab_size to the reader, or pass "
                "id_range for random tokens."
            )
        low, high = self.id_range or (10, int(vocab_size) - 1)
        if not 0 <= low <= high < vocab_size:
            raise ValueError(
                f"id_range must lie within 0 .. {vocab_size - 1}, got ({low}, {high}). The model has only these ids."
            )
        return [low, high]

    def facts(self):
        if not self.uses_text():
            if self.skipped:
                return {"skipped_ids": len(self.skipped), "skipped_sha256": content_hash(sorted(self.skipped))}
        elif self.irrelevant is not None:
            return {"irrelevant_tokens": len(self.irrelevant), "irrelevant_sha256": content_hash(self.irrelevant)}
        return {}

    def trials(self, scores):
        if self.protocol == "reference":
            return self.all_trials()
        asked = {key: self.trial(*key) for key, score in scores.items() if isinstance(score, Missing)}
        too_long = min([length for length, *_ in asked], default=math.inf)  # longer inputs are not supported either

        def measure(length: int, first: int, stop: int) -> CurvePoint:
            """Return the point with repeats 0 to `stop - 1`. Raise `Pending` if they are not measured yet.

            The new repeats are split into one trial per process.
            """
            edges = [first + (stop - first) * i // self.subject.processes for i in range(self.subject.processes + 1)]
            asked.update({(length, a, b): self.trial(length, a, b) for a, b in pairwise(edges) if a < b})
            parts = {key: scores.get(key) for key in asked if key[0] == length}
            if None in parts.values():
                raise Pending
            ((_, point),) = joined(parts).items()
            return CurvePoint(length, point["copy"], point["LM"], point.get("begins"), self.whole)

        lengths = [length for length in self.samples if length < too_long]
        with suppress(Pending):  # repeats the search from the start, up to the first unknown score
            if lengths:
                locate(lengths, measure, repeats=self.repeats, confidence=self.confidence or 0.95)
        return [*asked.values()]

    def all_trials(self):
        return [self.trial(length, 0, self.repeats) for length in self.samples]

    def trial(self, length: int, first: int, stop: int) -> Trial:
        """Return the trial of repeats `first` to `stop - 1` at one length. Each repeat has two inputs."""
        return Trial((length, first, stop), input_tokens(length), 2 * (stop - first))

    def requests(self, key):
        length, first, stop = key
        samples, subject = self.samples[length][first:stop], self.subject
        inputs = (model_inputs(kind, samples, subject.bos, subject.eos) for kind in ("copy", "LM"))
        # inputs with the same first passage share a prefix, so the prefix is read once
        return [Predict(rows, 1 + length, scored_logits(length, self.whole)) for rows in inputs]

    def score(self, key, responses):
        length, first, stop = key
        begins = [sample.begin for sample in self.samples[length][first:stop]]
        copy, lm = (right.sum(1).tolist() for right in responses)
        return {"copy": copy, "LM": lm} | ({} if None in begins else {"begins": begins})

    def summarize(self, scores, missing):
        """Join the scores of the trials at each length. In an interrupted run, some scores may be missing."""
        reasons = {length: reason for (length, *_), reason in missing.items()}
        readable = {key: score for key, score in scores.items() if reasons.get(key[0], "interrupted") == "interrupted"}
        measured = joined(readable)
        if "interrupted" in reasons.values():  # the adaptive protocol might have measured any length
            reasons |= dict.fromkeys([length for length in self.samples if length not in reasons], "interrupted")
        return measured, {length: reason for length, reason in sorted(reasons.items()) if length not in measured}


forgetting_curve = function(Curve)


class Pending(Exception):
    """Raised if the adaptive protocol needs a score that is not known yet."""


def joined(scores: dict[tuple[int, int, int], dict[str, list[int]]]) -> dict[int, dict[str, list[int]]]:
    """Join the scores of all trials at each length, in ascending order of length and repeat."""
    joined: dict[int, dict[str, list[int]]] = {}
    for (length, *_), score in sorted(scores.items(), key=lambda item: item[0]):
        for name, values in score.items():
            joined.setdefault(length, {}).setdefault(name, []).extend(values)
    return joined


def undrawn_ids(tokenizer, low: int, high: int) -> frozenset[int]:
    """Return the ids from `low` to `high` that must not be drawn.

    These ids are special tokens, added tokens, or not in the vocabulary.
    """
    added = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return frozenset(range(low, high + 1)) - (set(tokenizer.get_vocab().values()) - added)
