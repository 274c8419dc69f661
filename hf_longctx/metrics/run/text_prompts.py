"""Prompts as text, for served models that take no token ids, such as llama-cpp-python's.

A server reads a text as its tokenizer splits it, so ids can be sent only if encoding their text gives them back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .engine import Unreadable


class TextPrompts:
    """The texts that stand for ids, with the tokenizer of the model that is served.

    Attributes:
        adds_bos: the server puts a BOS in front by itself.
        leaves_out_bos: its lists have no entry for a BOS. Those of llama-cpp-python pair each token with what comes
            after it, unless a BOS in front, which one list lacks and the other has, puts them right.
    """

    def __init__(self, tokenizer):
        self.tokenizer, self.bos = tokenizer, tokenizer.bos_token_id
        self.adds_bos = self.leaves_out_bos = False

    def probes(self) -> list[list[int]]:
        """Return prompts that begin as those of the metrics do, and differ in their last word."""
        begin = [] if self.bos is None else [self.bos]
        return [begin + self.encode(f"the cat sat on the {word}") for word in ("mat", "sun", "dog", "very", "old")]

    def learn(self, reply: dict[str, Any], ids: list[int]) -> None:
        """Set the attributes by the reply to a probe."""
        if self.bos is not None:
            tokens = (reply["choices"][0].get("logprobs") or {}).get("tokens") or [self.tokenizer.bos_token]
            self.adds_bos = (reply.get("usage") or {}).get("prompt_tokens") == len(ids) + 1
            self.leaves_out_bos = tokens[0] != self.tokenizer.bos_token

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def text(self, ids: list[int]) -> str:
        """Return the text that the server reads as these ids.

        Raises:
            ValueError: no BOS in front, although the server needs one.
            Unreadable: the text has other ids.
        """
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        again = self.encode(text)
        if again != ids:
            same = next((i for i, (a, b) in enumerate(zip(ids, again)) if a != b), min(len(ids), len(again)))
            raise Unreadable(
                f"the server takes text only, and the text of an input of {len(ids)} tokens is split otherwise from "
                f"position {same}"
            )
        if (self.adds_bos or self.leaves_out_bos) and ids[0] != self.bos:
            raise ValueError(
                f"the prompt begins with id {ids[0]}, and this server reads prompts behind the BOS {self.bos} only: "
                f"--bos-token-id {self.bos}, or bos_token_id={self.bos}."
            )
        return text.removeprefix(self.tokenizer.bos_token) if self.adds_bos else text

    def listed(self, ids: list[int]) -> np.ndarray:
        """Return the positions of the tokens that the lists of a reply have entries for."""
        return np.flatnonzero(np.array(ids) != self.bos) if self.leaves_out_bos else np.arange(len(ids))
