"""Write sequences in which passages occur twice, from which a model learns to remember.

Plain text rarely rewards remembering; a repeated passage rewards it at every token. Passages have all lengths, because
a preferred length would teach a fixed offset instead of copying. A model soon memorizes a small corpus, and
repetitions of memorized text teach nothing. Therefore many passages are corrupted text, shuffled snippets or random
tokens, which only a model that has read them in the same sequence can predict.
"""

import random
from pathlib import Path

import numpy as np
import torch

from hf_longctx.training.conversations import FIRST, SCORED
from hf_longctx.training.data import FLAGS, TokenDataset


# Kinds of passages and their probabilities.
PASSAGES = {"text": 0.5, "corrupted text": 0.2, "snippets": 0.15, "random tokens": 0.15}
CORRUPTION = 0.2  # share of the tokens in corrupted text that are replaced by random ones
SHORTEST = 8  # tokens of a passage


class CopyDataset(torch.utils.data.Dataset):
    """Sequences of text, some of which are replaced by repeated passages: [bos] S [bos] S, with S of any length.

    Sequence i depends only on `seed` and i, so a resumed training sees the sequences of an uninterrupted one.

    Args:
        rows: sequences of text.
        share: share of the sequences that are replaced, from 0 to 1.
        tokenizer: its BOS begins a passage.
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
            # neither the end of a passage nor what is not text can be predicted before the repetition
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
    """Write sequences to a token file, .npy, and to another one the flags: where documents begin, what is scored."""
    tokens, flags = [], []
    for row in (rows[i] for i in range(len(rows))):
        tokens.append(row["input_ids"].numpy())
        flags.append(SCORED * (row["labels"] != -100).numpy() + FIRST * (row["position_ids"] == 0).numpy())
    np.save(path.with_suffix(FLAGS), np.concatenate(flags).astype(np.uint8))
    np.save(path, np.concatenate(tokens).astype(np.uint16 if rows.vocab_size <= 2**16 else np.uint32))


__all__ = ["CopyDataset", "write"]
