"""A small synthetic memory task: facts, one per segment, followed by questions about them.

    write   [W key value  filler ...]
    noise   [filler ...]
    read    [R key  filler ...  A value  filler ...]

Most filler tokens repeat the segment's key, as a document repeats its topic words, so that a summary of a few tokens
shows the topic. The keys of a sequence differ. Questions draw keys with replacement; otherwise a model could answer by
elimination. Without memory, accuracy is at most one in `writes`.

`answer_at`, the position of the answer in a question, determines what is measured. Position 13 (of 16) is outside the
first half, which the published recall reads before predicting it. Position 2 comes before its segment's key, as in
`[R A value key ...]`: a causal model cannot know the question yet, so a model that answers has read ahead.
"""

from dataclasses import dataclass

import torch


WRITE, READ, ANSWER = 1, 2, 3  # 0 is padding
FIRST_KEY = 4


@dataclass(frozen=True)
class RecallTask:
    """The sizes of the task.

    Args:
        segment_length: tokens per fact or question.
        keys: number of distinct keys, an upper bound on the facts per sequence.
        values: number of distinct values.
        noise: number of distinct noise tokens.
        topic: share of the filler that repeats the segment's key; the rest is noise.
        noise_segments: noise segments between facts and questions.
        answer_at: position of the answer in a question, 2 or from 3 to segment_length - 1. At 2 the key follows it.
    """

    segment_length: int = 16
    keys: int = 16
    values: int = 16
    noise: int = 28
    topic: float = 0.6
    noise_segments: int = 0
    answer_at: int = 13

    @property
    def vocab_size(self) -> int:
        return FIRST_KEY + self.keys + self.values + self.noise

    def sample(self, writes, reads, rows, generator):
        """Return random sequences of `writes` facts, noise segments, and `reads` questions.

        Args:
            writes: facts per sequence, 1 to `keys`.
            reads: questions per sequence.
            rows: number of sequences.
            generator: `torch.Generator`.

        Returns:
            ids (rows, (writes + noise_segments + reads) * segment_length), long; labels of the same shape, -100 except
            for the answers; question_facts (rows, reads), long, the fact of each question.
        """

        def draw(low, count, *shape):
            return low + torch.randint(count, shape, generator=generator)

        order = torch.rand(rows, self.keys, generator=generator).argsort(1)
        key, value = FIRST_KEY + order[:, :writes], draw(FIRST_KEY + self.keys, self.values, rows, writes)
        question_facts = draw(0, writes, rows, reads)
        key, value = (torch.cat([x, x.gather(1, question_facts)], 1) for x in (key, value))  # (rows, segments)

        segments, length = writes + reads, self.segment_length
        first_noise = FIRST_KEY + self.keys + self.values
        noise = draw(first_noise, self.noise, rows, segments, length)
        on_topic = torch.rand(rows, segments, length, generator=generator) < self.topic
        ids = torch.where(on_topic, key[..., None], noise)
        fact, question = ids[:, :writes], ids[:, writes:]
        fact[..., 0], fact[..., 1], fact[..., 2] = WRITE, key[:, :writes], value[:, :writes]
        question[..., 0] = READ
        question[..., 3 if self.answer_at == 2 else 1] = key[:, writes:]
        question[..., self.answer_at - 1], question[..., self.answer_at] = ANSWER, value[:, writes:]
        between = draw(first_noise, self.noise, rows, self.noise_segments, length)
        ids = torch.cat([fact, between, question], 1)
        labels = torch.full_like(ids, -100)
        labels[:, -reads:, self.answer_at] = value[:, writes:]
        return ids.flatten(1), labels.flatten(1), question_facts


__all__ = ["RecallTask"]
