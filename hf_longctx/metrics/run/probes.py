"""Test requests that show whether the completions of a server are the model's own greedy predictions.

Some servers penalize repeated tokens, sample, drop spaces, or return ids of other tokens. Each of these would change a
forgetting curve without an error. We therefore send prompts with known properties before measuring:

- A repeated passage must be continued by its repetition. This shows that the response contains the generated tokens
  with their spaces, and that no strong penalty applies.
- The strongest penalties must change a response. A server that obeys these fields also obeys their neutral values,
  which we send with every request. A server that ignores them may have a penalty of its own.
- A response must not change if we repeat the request, or request the response one token at a time.

If a test fails although the model might be the reason, the result contains a note. The responses also identify the
model: a journal refuses to resume if they change.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from .neutral import PENALTIES


PASSAGES = (
    " river froze over in the winter of the year, and the people of the town walked across the ice to the market",
    " old clock in the kitchen was late by ten minutes, but nobody ever dared to repair it before the holidays",
    " first letter came from a sailor who had lost his ship near the coast and now wanted to buy a small farm",
)
OPENINGS = (
    "She opened the door and saw",
    "My brother bought a new",
    "The strangest thing about this place is",
    "When the rain stopped, they",
    "In the drawer he found a",
    "The committee decided to",
    "One of the largest",
    "Nobody knew why the",
    "After dinner we talked about",
    "His favorite subject at school was",
    "The engine made a sound like",
    "For many years, scientists",
    "At the end of the road there is",
    "The price of",
    "Every morning the",
    "They named the dog",
    "The book begins with",
    "To fix this problem, you should",
    "Her answer was",
    "The city is famous for its",
    "I have never seen such a",
    "The most important part of the",
    "Last week a group of",
    "If you want to",
)
UNIT = 16  # tokens of a repeated passage
KNOWN = 4  # tokens of the last repetition that are part of the prompt
LOOP = 32  # tokens of the response to a prompt that repeats four tokens
CHUNK = 16  # tokens of a response that we also request one token at a time


class Altered(ValueError):
    """The server changes the text of its responses."""


class Probes:
    """The results of all tests of a server.

    Args:
        completions: a `greedy.GreedyCompletions` with its `form`.

    Attributes:
        responses: responses to the first prompts. They identify the model.
        notes: what could not be shown, as sentences for the result.

    Raises:
        Altered: the server drops the first space of responses.
        ValueError: the server returns other ids than those of its response.
    """

    def __init__(self, completions: Any):
        self.completions = completions
        self.notes = []
        tokenizer, size = completions.tokenizer, completions.server.vocab_size
        self.separator, self.units, openings = prompts(tokenizer, size)
        self.openings = [self.separator + ids for ids in openings]
        # one request at a time, because batches change rounding errors
        first = [*self.copies(), *((ids, 1) for ids in self.openings)]
        self.responses = [completions.generate(*prompt) for prompt in first]
        self.check_copies(self.responses[: len(self.units)])
        self.check_penalties()
        self.check_stability()

    def copies(self) -> list[tuple[list[int], int]]:
        """Return prompts that contain a passage twice and its beginning, and the number of remaining tokens."""
        separator = self.separator
        return [
            (2 * (separator + unit) + separator + unit[: known(unit)], len(unit) - known(unit)) for unit in self.units
        ]

    def check_copies(self, responses: list[Any]) -> None:
        """Check that repeated passages are continued, with all spaces."""
        copied = 0
        url = self.completions.server.base_url
        for (prompt, _), unit, said in zip(self.copies(), self.units, responses):
            rest = unit[known(unit) :]
            expected = self.completions.text_after(prompt, rest) if isinstance(said, str) else rest
            copied += said == expected
            first = self.completions.text_after(prompt, rest[:1]) if isinstance(said, str) else None
            if first and first != first.lstrip() and said.startswith(first.lstrip()):
                raise Altered(
                    f"{url} must return the text of a response with its first space, got {said!r} instead of "
                    f"{expected!r}. Measure with a server that returns token ids, such as vLLM or llama.cpp."
                )
        if not copied:
            self.notes.append(
                f"The server continued none of {len(self.units)} repeated passages. Either the model does not copy, or "
                "the server penalizes repeated tokens or changes its responses."
            )

    def check_penalties(self) -> None:
        """Check that the server obeys the fields for penalties."""
        ignored = [next(iter(fields)) for fields in PENALTIES if not self.obeys(fields)]
        if ignored:
            self.notes.append(
                f"The server does not obey {' and '.join(ignored)}, so it may penalize repeated tokens. With such a "
                "penalty, the model copies further than measured."
            )

    def obeys(self, fields: dict[str, Any]) -> bool:
        """Return whether some of the fields change a response that repeats four tokens."""
        fields = {name: value for name, value in fields.items() if name in self.completions.server.fields}
        for unit in self.units if fields else ():
            prompt = self.separator + 8 * unit[:4], LOOP
            with suppress(RuntimeError):  # the server does not allow such values
                if self.completions.generate(*prompt) != self.completions.generate(*prompt, **fields):
                    return True
        return False

    def check_stability(self) -> None:
        """Check that responses are the same in a second request, and if they are requested one token at a time."""
        if self.completions.form.returns_ids:
            whole = self.generate([(ids, CHUNK) for ids in self.openings[:2]])
            responses = [[token] for said in whole for token in said]
            prompts = [(ids + said[:i], 1) for ids, said in zip(self.openings, whole) for i in range(len(said))]
        else:
            prompts = [(ids, 1) for ids in self.openings[:12]]
            responses = self.generate(prompts)
        changed = sum(before != again for before, again in zip(responses, self.generate(prompts)))
        if changed > 1:  # a single change may be a rounding error
            self.notes.append(
                f"The server is not deterministic: {changed} of {len(prompts)} responses changed in a second request. "
                "It may sample, or penalize tokens of its response."
            )

    def generate(self, prompts: list[tuple[list[int], int]]) -> list[Any]:
        """Return the responses to prompts with their numbers of tokens, requested in parallel."""
        with ThreadPoolExecutor(self.completions.server.concurrency) as pool:
            return list(pool.map(lambda prompt: self.completions.generate(*prompt), prompts))


def known(unit: list[int]) -> int:
    """Return the number of tokens of the last repetition that are part of the prompt."""
    return min(KNOWN, len(unit) - 1)


def prompts(tokenizer: Any, vocab_size: float) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return a separator, passages and openings, as ids. Without a tokenizer, we draw random ids."""
    if tokenizer is not None:
        special = (getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos"))
        separator = [i for i in special if i is not None][:1]
        encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in PASSAGES + OPENINGS]
    else:  # the first three ids are often special
        separator = []
        rng = np.random.default_rng(0)
        size = 10 if vocab_size == math.inf else int(vocab_size)
        encoded = [rng.permutation(np.arange(min(3, size - 2), size)).tolist() for _ in PASSAGES]
        encoded += [rng.permutation(np.arange(min(3, size - 2), size))[:3].tolist() for _ in OPENINGS]
    return separator, [ids[:UNIT] for ids in encoded[: len(PASSAGES)]], encoded[len(PASSAGES) :]
