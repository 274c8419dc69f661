"""The output of `HMTWrapper`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .packing_hmt import Part
from .retriever_hmt import Retrieved
from .state_hmt import HMTState, join_rows


class Report(NamedTuple):
    """Report of a part for `output_recall`.

    recall: result of the recall. None: no recall to report.
    embedding: memory embeddings of the segment, (B, m, d). None: none was computed.
    """

    part: Part
    recall: Retrieved | None
    embedding: Tensor | None


@dataclass
class HMTOutput(ModelOutput):
    """Output of `HMTWrapper`. `recall_*` and `memories` require `output_recall=True`.

    Attributes:
        loss: scalar, returned if `labels` are given.
        logits: (B, T, V), 0 on padding. `logits_to_keep` can select some of the T positions.
        state: `HMTState` after the last token, returned with `use_cache=True`.
        recall_scores: for each segment, the recall weights of the memories, (B, c), oldest first. A weight is 0 if the
            row does not have the memory. If the segment does not recall, the entry is None. The first segment and a
            segment with an incomplete query do not recall.
        recall_ends: for each segment, the ends of the remembered segments, (B, c), long. An end is a number of tokens
            from the start of the sequence. The entry is None where the entry of `recall_scores` is None.
        recall_distance: distance in segments to the memory with the largest weight, (segments, B), long. Without a
            recall, the distance is 0.
        memories: memory embeddings of each segment of this call, (B, m, d); 0 in a row without this memory.
        cache: alias of `state`, used since transformers 5.24.
        past_key_values: alias of `state`, used before transformers 5.24.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: HMTState | None = None
    recall_scores: tuple | None = None
    recall_ends: tuple | None = None
    segment_length: int | None = None
    recall_distance: Tensor | None = None
    memories: tuple | None = None
    cache: HMTState | None = None

    @property
    def past_key_values(self) -> HMTState | None:
        """Alias of `state`, used before transformers 5.24."""
        return self.state

    @property
    def last_hidden_state(self) -> Tensor:
        """Raise AttributeError, because no single pass reads the whole sequence."""
        raise AttributeError(
            "HMT does not return last_hidden_state, so the trainers of TRL cannot train it. Train with Trainer of "
            "transformers or with hf-longctx finetune --recipe hmt. Trainers of TRL can train the backbone before it "
            "is wrapped: HMTWrapper.from_backbone(trainer.model, config)."
        )

    def recalled(self, row: int = 0, top: int | None = 3) -> list[list[tuple[range, float]]]:
        """For each segment of the call, list the `top` memories with the largest recall weights, best first.

        Each entry is a pair: the range of the memory's tokens in the sequence, and the weight. If a segment does not
        recall, its list is empty.

        Raises:
            ValueError: the call did not use `output_recall=True`.
        """
        if self.recall_scores is None or self.recall_ends is None or self.segment_length is None:
            raise ValueError("The output does not contain recall scores. Call the model with output_recall=True.")
        listed = []
        for scores, ends in zip(self.recall_scores, self.recall_ends):
            pairs = [] if scores is None else zip(ends[row].tolist(), scores[row].tolist())
            best = sorted((pair for pair in pairs if pair[0] and pair[1]), key=lambda pair: -pair[1])[:top]
            listed.append([(range(end - self.segment_length, end), weight) for end, weight in best])
        return listed


def recall_fields(reports: list[list[Report]], length: int, ids: Tensor) -> dict[str, Any]:
    """Return `recall_*`, `memories` and `segment_length` of an output, for the reports of a `Call` and its ids."""
    batch = len(ids)
    recalls = []
    memories = []
    for of_segment in reports:
        found: list[Any] = [x for x in of_segment if x.recall is not None and x.recall.weights is not None]
        made = [(x.part.rows, x.embedding) for x in of_segment if x.embedding is not None]
        memories += [join_rows(made, batch)] if made else []
        weights = ends = None
        distance = ids.new_zeros(batch, dtype=torch.long)
        if found:
            weights = join_rows([(x.part.rows, x.recall.weights) for x in found], batch)
            ends = join_rows([(x.part.rows, x.recall.ends) for x in found], batch)
            segments = {row: n for x in found for row, n in zip(x.part.rows, x.part.segments)}
            begins = torch.tensor([segments.get(row, 0) for row in range(batch)], device=ends.device)
            nearest = ends.gather(1, weights.argmax(1, keepdim=True)).squeeze(1) // length
            distance = (1 + begins - nearest) * (ends > 0).any(1)
        recalls.append((weights, ends, distance))
    scores, ends, distances = zip(*recalls)
    return {
        "recall_scores": scores,
        "recall_ends": ends,
        "recall_distance": torch.stack(distances),
        "memories": tuple(memories),
        "segment_length": length,
    }
