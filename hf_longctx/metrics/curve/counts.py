"""What one process measures of a forgetting curve: counts of right predictions, kept in a journal as they come.

Journal entries: `(length, first repeat): {"copy": counts, "LM": counts}` for consecutive repeats; with nested targets
`(length, repeat, kind): {kind: [count]}`; and `(length,): {"not_measured": reason}`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..run.distributed import Worker
from ..run.engine import OutOfMemory, Unreadable, batches
from ..run.reader import Reader
from ..run.scoring import OVERFLOW
from .protocol import Sample, input_tokens, model_input, scored_logits
from .result import CurvePoint


KINDS = ("copy", "LM")


class Measurement:
    """Measures parts of a curve, unless the journal has them, within `reader.reading`.

    The worker's journal takes the counts; its bar advances by the `cost` of every input that was counted.
    """

    def __init__(self, reader: Reader, samples: dict[int, list[Sample]], bos: int, eos: int, worker: Worker):
        self.reader, self.samples, self.bos, self.eos = reader, samples, bos, eos
        self.worker, self.journal, self.bar = worker, worker.journal, worker.bar

    def cost(self, length: int) -> float:
        """Of reading one input at a length."""
        return self.reader.cost(input_tokens(length))

    def expect(self, total: float) -> None:
        """Set the bar to `total` work, of which the journal may have a part already."""
        self.bar.reset(total)
        counted = ((key[0], sum(map(len, result.values()))) for key, result in self.journal.done.items() if key[1:])
        self.bar.update(sum(inputs * self.cost(length) for length, inputs in counted))

    def show(self, length: int) -> None:
        """Say on the bar what is being read."""
        self.bar.set_postfix_str(f"length {length:,}, {input_tokens(length):,} tokens")

    def inputs(self, kind: str, length: int, repeats: Sequence[int]) -> np.ndarray:
        """(R, 2n + 3) int64"""
        samples = [self.samples[length][repeat] for repeat in repeats]
        return np.stack([sample_input(sample, kind, self.bos, self.eos) for sample in samples])

    def measure(self, length: int, first: int, stop: int) -> None:
        """Both kinds of input at one length, repeats first to stop - 1."""
        if {(length, first), (length,)} & self.journal.done.keys():
            return
        repeats = range(first, stop)
        self.show(length)
        try:
            self.journal.append((length, first), {kind: self._predict(kind, length, repeats) for kind in KINDS})
        except Unreadable as error:
            self.give_up(length, error)
        self.bar.update(2 * len(repeats) * self.cost(length))

    def _predict(self, kind, length, repeats):
        """Right predictions of each repeat."""
        inputs = self.inputs(kind, length, repeats)
        return self.count(kind, length, repeats, self.reader.predict(inputs, 1 + length, scored_logits(length)))

    def measure_nested(self, lengths: Sequence[int], repeats: Sequence[int]) -> None:
        """These repeats at all lengths, whose samples are starts of each other, reading no beginning twice.

        All LM inputs share the start of one irrelevant text; the copy inputs of a repeat share that of its target.
        """
        done = self.journal.done.keys()
        parts = [{(n, r, kind) for kind in KINDS} for n in lengths for r in repeats if not {(n,), (n, r)} & done]
        if all(part <= done for part in parts):
            return
        if not self.reader.reuses_prefixes:
            for length in lengths:
                for repeat in repeats:
                    self.measure(length, repeat, repeat + 1)
            return
        engine = self.reader.engine
        fitting = [length for length in lengths if (length,) not in self.journal.done]
        together = max(1, engine.tokens_per_pass // input_tokens(max(lengths)))
        for kind, group in [("LM", repeats), *(("copy", some) for some in batches(list(repeats), together))]:
            while fitting:
                try:
                    engine.with_less_memory(self._measure_group, engine, kind, fitting, group)
                    break
                except OutOfMemory as error:
                    reached = next(n for n in fitting if self._remaining(n, group, kind))
                    for length in [n for n in fitting if n >= reached]:
                        fitting.remove(length)
                        self.give_up(length, error)

    def _remaining(self, length, repeats, kind):
        return [repeat for repeat in repeats if (length, repeat, kind) not in self.journal.done]

    def _measure_group(self, engine, kind, lengths, repeats):
        """Inputs of one kind whose beginnings, length by length, go on from each other."""
        cache, texts, read = None, 1 if kind == "LM" else len(repeats), 0
        for length in lengths:
            if not self._remaining(length, repeats, kind):
                continue
            self.show(length)
            cache = engine.new_cache() if cache is None else cache
            inputs, scored = self.inputs(kind, length, repeats), scored_logits(length)
            engine.read(inputs[:texts, read : 1 + length], cache)
            read = 1 + length
            size = texts if kind == "copy" else max(1, engine.tokens_per_pass // inputs.shape[1])
            for rows in batches(list(range(len(repeats))), size):
                batch = [repeats[i] for i in rows]
                remaining = self._remaining(length, batch, kind)
                if not remaining:
                    continue
                predictions = engine.read_after(cache, inputs[rows, read : scored.stop], len(scored), texts)
                for repeat, count in zip(batch, self.count(kind, length, batch, predictions)):
                    if repeat in remaining:
                        self.journal.append((length, repeat, kind), {kind: [count]})
                        self.bar.update(self.cost(length))

    def count(self, kind: str, length: int, repeats: Sequence[int], predictions: np.ndarray) -> list[int]:
        """Right predictions of each repeat.

        Raises:
            ValueError: a prediction is -1, as there was NaN.
        """
        scored, inputs = scored_logits(length), self.inputs(kind, length, repeats)
        bad = np.argwhere(predictions == -1)
        if len(bad):
            raise ValueError(
                f"length {length}, repeat {repeats[bad[0][0]]}, {kind} input: the logits at position "
                f"{scored[bad[0][1]]} of {inputs.shape[1]} are NaN, so there is no prediction to count. {OVERFLOW}"
            )
        return (predictions == inputs[:, scored.start + 1 : scored.stop + 1]).sum(1).tolist()

    def give_up(self, length: int, reason: Unreadable) -> None:
        self.journal.append((length,), {"not_measured": str(reason)})


def sample_input(sample: Sample, kind: str, bos: int, eos: int) -> np.ndarray:
    """The "copy" or the "LM" input of a sample, (2n + 3,) int64."""
    return model_input(sample.target if kind == "copy" else sample.irrelevant, sample.target, bos, eos)


def tally(entries: dict, samples: dict[int, list[Sample]]) -> tuple[list[CurvePoint], dict[int, str]]:
    """The points that the entries of one or several journals amount to, and why lengths have none.

    A point has the repeats of which both inputs were counted.
    """
    counts, missing = {}, {}
    for (length, *rest), result in entries.items():
        if "not_measured" in result:
            missing[length] = result["not_measured"]
            continue
        for kind, values in result.items():
            counts.setdefault((length, kind), {}).update(enumerate(values, start=rest[0]))
    points = []
    for length in sorted({length for length, _ in counts} - missing.keys()):
        copy, lm = (counts.get((length, kind), {}) for kind in KINDS)
        repeats = sorted(copy.keys() & lm.keys())
        if repeats:
            begins = [samples[length][repeat].begin for repeat in repeats]
            begins = None if None in begins else begins
            points.append(CurvePoint(length, [copy[r] for r in repeats], [lm[r] for r in repeats], begins))
    return points, dict(sorted(missing.items()))
