"""Write training sequences with repeated passages, which teach a model to copy from context.

Plain text rarely rewards remembering; a repeated passage rewards it at every token. Passage lengths vary, because a
preferred length would teach a fixed offset instead of copying. Repetitions of memorized text teach nothing, and a
small corpus is soon memorized. Therefore many passages are corrupted text, shuffled snippets or random tokens, which
can only be predicted from the context.
"""

import random
from pathlib import Path

import numpy as np
import torch

from hf_longctx.training.conversations import TOKEN
from hf_longctx.training.data import TokenDataset


# Kinds of passages and their probabilities.
PASSAGES = {"text": 0.5, "corrupted text": 0.2, "snippets": 0.15, "random tokens": 0.15}
CORRUPTION = 0.2  # share of tokens replaced by random tokens in corrupted text
SHORTEST = 8  # tokens of a passage


class CopyDataset(torch.utils.data.Dataset):
    """Sequences of text, some of which are replaced by repeated passages: [bos] S [bos] S, with S of any length.

    Sequence i depends only on `seed` and i, so a resumed run sees the same sequences as an uninterrupted one.

    Args:
        rows: sequences of text.
        share: fraction of sequences to replace, from 0 to 1.
        tokenizer: a tokenizer whose BOS begins each passage.
        seed: random seed of the passages.
    """

    def __init__(self, rows: TokenDataset, share: float, tokenizer, seed: int):
        self.rows, self.share, self.seed = rows, share, seed
        self.bos_token_id, self.vocab_size = tokenizer.bos_token_id, len(tokenizer)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        rng = random.Random(f"{self.seed}-{index}")
        return self.passages(rng) if rng.random() < self.share else self.rows[index]

    def passages(self, rng):
        length = self.rows.length
        ids, labels = [], []
        while (room := length - len(ids)) > 2 * (SHORTEST + 1):
            (kind,) = rng.choices(list(PASSAGES), PASSAGES.values())
            passage = self.passage(rng, kind, rng.randint(SHORTEST, room // 2 - 1))
            ids += [self.bos_token_id, *passage] * 2
            # before the repetition, the end of a passage and anything but text is unpredictable
            labels += [-100, *(passage if kind == "text" else [-100] * len(passage)), -100, *passage]
        text = self.text(rng, room)
        ids, labels = [*ids, self.bos_token_id, *text], [*labels, -100, *text]
        row = {"input_ids": ids[:length], "position_ids": range(length), "labels": labels[:length]}
        return {name: torch.tensor(values) for name, values in row.items()}

    def passage(self, rng, kind, length):
        if kind == "snippets":
            snippets = (self.text(rng, rng.randint(1, 6)) for _ in range(length))
            return [token for snippet in snippets for token in snippet][:length]
        replaced = {"text": 0, "corrupted text": CORRUPTION, "random tokens": 1}[kind]
        return [
            rng.randrange(self.vocab_size) if rng.random() < replaced else token for token in self.text(rng, length)
        ]

    def text(self, rng, length):
        tokens = self.rows.tokens
        begin = rng.randrange(len(tokens) - length + 1)
        return tokens[begin : begin + length].tolist()


def write(rows: CopyDataset, path: Path) -> None:
    """Write sequences to a token file (.npy) that marks document starts and scored labels."""
    tokens = np.empty((len(rows), rows.rows.length), TOKEN)
    for record, row in zip(tokens, (rows[i] for i in range(len(rows)))):
        record["id"] = row["input_ids"]
        record["first"], record["scored"] = row["position_ids"] == 0, row["labels"] != -100
    np.save(path, tokens)


__all__ = ["CopyDataset", "write"]
