"""Training sequences for head windows: their ends repeat passages and records that the model has read before.

A model rarely needs distant tokens to predict ordinary text, so text alone would close the windows of the heads that
retrieve. What is repeated lies at least half of the sequence back, if there is room: otherwise a window of half of the
sequence would be enough for these heads, and they would forget it in a longer context.
"""

import itertools
import math
import random
from typing import Any

import torch
from torch.utils.data import Dataset


PASSAGES = 1 / 6  # share of a sequence that the repeated passages have in total, so that all steps are alike
SHORTEST = 32  # tokens of a passage; lengths are log-uniform up to the total
RECORDS, REPEATED = 8, 4  # number of records in a sequence, and of those that its end repeats
SCORED = 1 / 4  # share of the positions whose distributions are compared; half of them are at the repeated tokens
# Formats of a record. A name and a number are different in each record.
FORMATS = "\nThe code of {} is {}.\n", "\nline {}: REGISTER_CONTENT is <{}>\n", "\n{} = {}\n"
NAMES = """
apple amber arrow basin birch canyon cedar cloud copper coral crane delta ember falcon field forest garden harbor
island ivory jasper lantern lotus maple marble meadow mirror mountain ocean olive orchard pearl pepper prairie
quartz raven ribbon river saddle silver spruce stone summit thunder tiger timber valley velvet violet walnut
willow
""".split()  # noqa: SIM905


class WindowSequences(Dataset):
    """Sequences from which windows are learned. An item depends only on its index and on the seed.

    Args:
        texts: dataset of tokenized text. Its items are dicts with "input_ids", (T,) int64.
        tokenizer: a transformers tokenizer, for the records and the BOS.
        size: number of sequences.
        seed: seed of all sequences.

    Items are dicts of "input_ids" and "labels", (T,) int64. Labels are -100 where distributions are not compared.

    Raises:
        ValueError: the sequences are too short.
    """

    def __init__(self, texts: Any, tokenizer: Any, size: int, seed: int = 0):
        self.texts, self.tokenizer, self.size, self.seed = texts, tokenizer, size, seed
        self.length = len(texts[0]["input_ids"])
        self.bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        records = max(sum(map(len, itertools.chain(*self._records(self._random(index))))) for index in range(size))
        shortest = math.ceil(max(SHORTEST / PASSAGES, (len(self.bos) + records) / (1 - 2 * PASSAGES)))
        if self.length < shortest:
            raise ValueError(
                f"Sequences must have at least {shortest} tokens for their records and text, got {self.length}. Give "
                f"--max_length {1 << (shortest - 1).bit_length()}."
            )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        rng = self._random(index)
        records, repeated = self._records(rng)
        total, lengths = int(PASSAGES * self.length), []
        while (room := total - sum(lengths)) >= SHORTEST:
            lengths.append(min(int(math.exp(rng.uniform(math.log(SHORTEST), math.log(total)))), room))
        sources = [rng.randrange(len(self.texts)) for _ in lengths]
        passages = [self._text(rng, length, [source]) for length, source in zip(lengths, sources)]
        for passage in passages[::2]:  # nothing but the first reading predicts its tokens
            rng.shuffle(passage)
        parts, again = records + passages, repeated + passages
        rng.shuffle(parts)
        rng.shuffle(again)
        end = [token for part in again for token in part]
        rest = self.length - len(self.bos) - len(end) - sum(map(len, parts))
        between = min(rest, self.length // 2)  # tokens of text between the last part and the end
        cuts = sorted(rng.randrange(rest - between + 1) for _ in parts)
        others = [row for row in range(len(self.texts)) if row not in sources] or sources
        ids = list(self.bos)
        for part, begin, stop in zip([*parts, []], [0, *cuts], [*cuts, rest]):
            ids += self._text(rng, stop - begin, others) + part
        ids = torch.tensor(ids + end)
        count, first = int(SCORED * self.length) // 2, self.length - len(end)
        scored = rng.sample(range(first, self.length), min(len(end), count)) + rng.sample(range(1, first), count)
        labels = torch.full_like(ids, -100)
        labels[scored] = ids[scored]
        return {"input_ids": ids, "labels": labels}

    def _random(self, index: int) -> random.Random:
        return random.Random(f"{self.seed} {index}")

    def _text(self, rng: random.Random, count: int, rows: list[int]) -> list[int]:
        begin = rng.randrange(self.length - count + 1)
        return self.texts[rng.choice(rows)]["input_ids"][begin : begin + count].tolist()

    def _records(self, rng: random.Random) -> tuple[list[list[int]], list[list[int]]]:
        """Return records of random names and numbers, as token ids, and those that the end repeats."""
        names = [f"{a} {b}" for a, b in zip(rng.sample(NAMES, RECORDS), rng.sample(NAMES, RECORDS))]
        texts = [rng.choice(FORMATS).format(name, rng.randrange(10**4, 10**5)) for name in names]
        records = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return records, rng.sample(records, REPEATED)


__all__ = ["WindowSequences"]
