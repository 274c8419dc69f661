"""What one process measures of a forgetting curve: counts of right predictions, kept in a journal as they come.

Journal entries: `(length, first repeat): {"copy": counts, "LM": counts}` for consecutive repeats; with nested targets
`(length, repeat, kind): {kind: [count]}`; and `(length,): {"not_measured": reason}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from torch import nn

from ..run.engine import Engine, batches
from ..run.served import EndpointModel
from .result import CurvePoint, Sample, input_tokens, model_input, scored_logits


KINDS = ("copy", "LM")
OUT_OF_MEMORY = "out of memory, even in the smallest passes"


def engine_for(model: nn.Module, ids: np.ndarray, tokens_per_pass: int | None) -> Engine | EndpointModel:
    """What reads for this model; ids (T,) are tried, of which an engine needs three."""
    if isinstance(model, EndpointModel):
        return model
    return Engine(model, np.resize(ids, max(len(ids), 3)), tokens_per_pass)


class Measurement:
    """Measures parts of a curve, unless the journal has them.

    Args:
        model: in eval and inference mode.
        samples: the repeats at each length.
        bos, eos: ids.
        tokens_per_pass: see `Engine`.
        journal: where the counts go.
        bar: advanced by the `cost` of every input that was counted.
        cost: of reading an input at a length.
    """

    def __init__(
        self, model: nn.Module, samples: dict[int, list[Sample]], bos, eos, tokens_per_pass, journal, bar, cost
    ):
        self.model, self.samples, self.bos, self.eos = model, samples, bos, eos
        self.tokens_per_pass, self.journal, self.bar, self.cost = tokens_per_pass, journal, bar, cost

    @cached_property
    def engine(self) -> Engine | EndpointModel:
        return engine_for(self.model, self.inputs("copy", min(self.samples), [0])[0], self.tokens_per_pass)

    def inputs(self, kind: str, length: int, repeats: Sequence[int]) -> np.ndarray:
        """(R, 2n + 3) int64"""
        samples = [self.samples[length][repeat] for repeat in repeats]
        prefixes = [s.target if kind == "copy" else s.irrelevant for s in samples]
        return np.stack([model_input(p, s.target, self.bos, self.eos) for p, s in zip(prefixes, samples)])

    def measure(self, length: int, first: int, stop: int) -> None:
        """Both kinds of input at one length, repeats first to stop - 1."""
        if {(length, first), (length,)} & self.journal.done.keys():
            return
        repeats = range(first, stop)
        predicted = self.engine.with_less_memory(self._predict_both, length, repeats)
        if predicted is None:
            self.give_up(length)
        else:
            counts = {kind: self.count(kind, length, repeats, found) for kind, found in predicted.items()}
            self.journal.append((length, first), counts)
        self.bar.update(2 * len(repeats) * self.cost(length))

    def _predict_both(self, length, repeats):
        inputs = {kind: self.inputs(kind, length, repeats) for kind in KINDS}
        return {kind: self.engine.predict(x, 1 + length, scored_logits(length)) for kind, x in inputs.items()}

    def measure_nested(self, lengths: Sequence[int], repeats: Sequence[int]) -> None:
        """These repeats at all lengths, whose samples are starts of each other, reading no beginning twice.

        All LM inputs share the start of one irrelevant text; the copy inputs of a repeat share that of its target.
        """
        done = self.journal.done.keys()
        parts = [{(n, r, kind) for kind in KINDS} for n in lengths for r in repeats if not {(n,), (n, r)} & done]
        if all(part <= done for part in parts):
            return
        if not self.engine.reuses_prefixes:
            for length in lengths:
                for repeat in repeats:
                    self.measure(length, repeat, repeat + 1)
            return
        fitting = [length for length in lengths if (length,) not in self.journal.done]
        together = max(1, self.engine.tokens_per_pass // input_tokens(max(lengths)))
        for kind, group in [("LM", repeats), *(("copy", some) for some in batches(list(repeats), together))]:
            while self.engine.with_less_memory(self._measure_group, kind, fitting, group) is None:
                reached = next(n for n in fitting if self._todo(n, group, kind))
                for length in [n for n in fitting if n >= reached]:
                    fitting.remove(length)
                    self.give_up(length)

    def _todo(self, length, repeats, kind):
        return [repeat for repeat in repeats if (length, repeat, kind) not in self.journal.done]

    def _measure_group(self, kind, lengths, repeats):
        """Inputs of one kind whose beginnings, length by length, go on from each other. Returns True when done."""
        engine, cache, texts, read = self.engine, None, 1 if kind == "LM" else len(repeats), 0
        for length in lengths:
            if not self._todo(length, repeats, kind):
                continue
            cache = engine.new_cache() if cache is None else cache
            inputs, scored = self.inputs(kind, length, repeats), scored_logits(length)
            engine.read(inputs[:texts, read : 1 + length], cache)
            read = 1 + length
            size = texts if kind == "copy" else max(1, engine.tokens_per_pass // inputs.shape[1])
            for some in batches(list(range(len(repeats))), size):
                chosen = [repeats[i] for i in some]
                todo = self._todo(length, chosen, kind)
                if not todo:
                    continue
                found = engine.read_after(cache, inputs[some, read : scored.stop], len(scored), texts)
                for repeat, count in zip(chosen, self.count(kind, length, chosen, found)):
                    if repeat in todo:
                        self.journal.append((length, repeat, kind), {kind: [count]})
                        self.bar.update(self.cost(length))
        return True

    def count(self, kind: str, length: int, repeats: Sequence[int], predicted: np.ndarray) -> list[int]:
        """Right predictions of each repeat.

        Raises:
            ValueError: a prediction is -1, as there was NaN.
        """
        scored, inputs = scored_logits(length), self.inputs(kind, length, repeats)
        bad = np.argwhere(predicted == -1)
        if len(bad):
            raise ValueError(
                f"length {length}, repeat {repeats[bad[0][0]]}, {kind} input: the logits at position "
                f"{scored[bad[0][1]]} of {inputs.shape[1]} are NaN, so there is no prediction to count. A common cause "
                "is float16 overflow: load the model in torch.bfloat16 or torch.float32."
            )
        return (predicted == inputs[:, scored.start + 1 : scored.stop + 1]).sum(1).tolist()

    def give_up(self, length: int) -> None:
        self.journal.append((length,), {"not_measured": OUT_OF_MEMORY})


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
            points.append(
                CurvePoint(
                    length, [copy[r] for r in repeats], [lm[r] for r in repeats], None if None in begins else begins
                )
            )
    return points, dict(sorted(missing.items()))
