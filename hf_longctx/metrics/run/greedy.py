"""Count a served model's right predictions from greedy completions, if it does not report prompt log-probabilities.

A causal model's prediction at a position depends only on the tokens before it. The response to `ids[:p]` at
temperature 0 is thus right at p, p + 1, ... as long as it repeats the true tokens. The next request continues after
the first wrong token, replaced by the true one. Each part of a sequence takes errors + 1 requests. Parts are requested
in parallel, because the whole sequence is known.

A server that returns text instead of ids gets one request per token, because several tokens may decode to one string.

Chat APIs are not supported, because their response does not continue given tokens. Losses and log-probabilities are
not available.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from .engine import UnsupportedInput
from .journal import Journal, content_hash


ANOTHER = -2  # stands for an id that is not the true one
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}


class Form(NamedTuple):
    """The form of a request: whether to send ids, whether the server returns ids, and the options for it."""

    sends_ids: bool
    returns_ids: bool
    options: dict[str, Any] = {}
    adds_bos: bool = False


FORMS = [
    Form(
        True, True, {"return_token_ids": True, **NEUTRAL}
    ),  # vLLM, by default with penalties of generation_config.json
    Form(True, True, {"logprobs": 1, "repeat_penalty": 1.0}),  # llama.cpp, whose log-probabilities name ids
    Form(True, False),
    Form(False, False),
    Form(False, False, adds_bos=True),
]


class GreedyCompletions:
    """Predictions of a served model; see `reader.Reader.predict`.

    Args:
        server: a `served.ServedModel`, which sends the requests.
        tokenizer: the model's tokenizer; optional if the server takes and returns ids.
        journal: path of a file that records every response, so that a killed run can resume; or None.

    Raises:
        ValueError: the server does not complete prompts, or the journal is from another model.
    """

    def __init__(self, server: Any, tokenizer: Any = None, journal: Any = None):
        self.server, self.tokenizer, self.form = server, tokenizer, FORMS[0]
        self.answers = Journal(journal, {"endpoint": server.base_url, "model": server.model})
        self.lock, self.halted = threading.Lock(), False
        self.keeps_spaces = False  # some servers strip the space before a word
        self.choose_form()

    def choose_form(self) -> None:
        """Choose the first form that the server supports."""
        failures = []
        for form in FORMS if self.tokenizer is not None else FORMS[:2]:
            self.form = form
            try:
                for at in range(1, 5):
                    self.ask(self.probe(), at, at + 1, retries=0)
                return
            except (RuntimeError, ValueError) as error:
                failures.append(str(error))
        advice = "" if self.tokenizer is not None else " Where ids cannot be sent, give tokenizer=... ."
        raise ValueError(
            f"{'; '.join(dict.fromkeys(failures))}. {self.server.base_url} must complete a prompt at temperature 0.{advice} A "
            "chat API cannot be measured, as its response does not begin after given tokens."
        )

    def probe(self) -> list[int]:
        """Return five ids for a test request."""
        if self.tokenizer is None:
            return [0, 1, 2, 3, 4]
        bos = self.tokenizer.bos_token_id
        ids = self.encode("the model reads the text of the book") * 5
        return ([] if bos is None else [bos]) + ids[: 5 - (bos is not None)]

    def predict(self, inputs: np.ndarray, positions: range) -> np.ndarray:
        """Return the input's next id where the model predicts it, and -2 where it predicts another id.

        Raises:
            UnsupportedInput: a position cannot be reached by text, or several tokens decode to the response.
        """
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        first, stop, workers = positions.start + 1, positions.stop + 1, self.server.concurrency
        parts = min(max(1, workers // len(rows)), stop - first)
        edges = np.linspace(first, stop, parts + 1).astype(int).tolist()
        jobs = [(row, *part) for row in rows for part in pairwise(edges)]
        self.halted = False
        with ThreadPoolExecutor(workers) as pool:
            try:
                if parts > 1:  # the server has then read each row, and may have cached the common prefix of the parts
                    list(pool.map(lambda row: self.read(row, stop - 1, stop), rows))
                read = list(pool.map(lambda job: self.read(*job), jobs))
            finally:  # on Ctrl-C, cancel the other parts
                self.halted = True
        verdicts = np.array([*chain(*read)]).reshape(len(rows), -1)
        unsure = int((verdicts == "unsure").sum())
        if unsure:
            raise UnsupportedInput(
                f"the responses do not contain token ids, so the predicted tokens are unknown at {unsure} of "
                f"{verdicts.size} positions"
            )
        return np.where(verdicts == "right", rows[:, first:stop], ANOTHER)[inverse.reshape(-1)]

    def read(self, ids: np.ndarray, start: int, stop: int) -> list[str]:
        """Return for each of ids[start:stop] whether its prediction is "right", "wrong" or "unsure"."""
        verdicts: list[str] = []
        name, chunk = content_hash(ids)[:16], stop - start
        while len(verdicts) < stop - start and not self.halted:
            at = start + len(verdicts)
            if (name, at) not in self.answers.done:
                try:
                    answer = self.ask(ids.tolist(), at, min(at + chunk, stop))
                except BaseException:
                    self.halted = True
                    raise
                with self.lock:
                    if (name, at) not in self.answers.done:
                        self.answers.append((name, at), answer)
            right, then = self.answers.done[name, at]
            verdicts += ["right"] * right + [then] * bool(then)
            chunk = 2 * right + 1 if then else 2 * chunk  # tokens generated after an error are wasted
        return verdicts[: stop - start]

    def ask(self, ids: list[int], start: int, stop: int, **options: Any) -> tuple[int, str]:
        """Return how many of ids[start:stop] a response repeats, and the verdict on the next token, if any."""
        if not self.form.returns_ids:
            return self.ask_for_text(ids[:start], ids[start], **options)
        said, stopped = self.complete(ids[:start], start, stop - start, **options)
        right = next((i for i, pair in enumerate(zip(said, ids[start:stop])) if pair[0] != pair[1]), len(said))
        if right < len(said):
            return right, "wrong"
        if stopped and start + right < stop:  # stopped at an unreported end-of-text token
            return right, "unsure" if self.is_special(ids[start + right]) else "wrong"
        if not right:
            raise ValueError(f"{self.server.base_url} returned no token ids.")
        return right, ""

    def ask_for_text(self, before: list[int], token: int, **options: Any) -> tuple[int, str]:
        """Return the same as `ask` for one token, comparing its text."""
        prompt, text = self.decode(before), self.decode([*before, token])
        expected, reachable = text.removeprefix(prompt), self.form.sends_ids or self.encode(prompt) == before
        if not (reachable and text.startswith(prompt) and expected) or "\ufffd" in expected or self.is_special(token):
            return 0, "unsure"
        sent = prompt.removeprefix(self.tokenizer.bos_token) if self.form.adds_bos else prompt
        said, _ = self.complete(before if self.form.sends_ids else sent, len(before), 1, **options)
        self.keeps_spaces |= said.startswith(" ")
        if said == expected:
            return (1, "") if self.ids_of_text[said] == 1 else (0, "unsure")
        return 0, "unsure" if said == self.decode([token]) and not self.keeps_spaces else "wrong"

    def complete(self, prompt: Any, length: int, tokens: int, **options: Any) -> tuple[Any, bool]:
        """Return the response to a prompt of `length` tokens, ids or text, and whether an end-of-text token ended it.

        Raises:
            ValueError: the server has read a different number of tokens.
        """
        body = {
            "model": self.server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            **self.form.options,
        }
        response = self.server.complete(body, **options)
        choice = response["choices"][0]
        read = (response.get("usage") or {}).get("prompt_tokens", length if self.form.sends_ids else None)
        if read != length:
            raise ValueError(
                f"{self.server.base_url} has read {read} tokens of a prompt of {length}. It may add special tokens or cut "
                "long prompts: switch that off."
            )
        stopped = choice.get("finish_reason") == "stop"
        if not self.form.returns_ids:
            return choice.get("text") or "", stopped
        entries = (choice.get("logprobs") or {}).get("content") or []
        ids = choice.get("token_ids") or [entry["id"] for entry in entries if "id" in entry]
        return ids[:tokens], stopped

    def is_special(self, token: int) -> bool:
        """Return whether an id may end a sequence."""
        return self.tokenizer is None or token in self.tokenizer.all_special_ids

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def ids_of_text(self) -> Counter[str]:
        """Number of ids that decode to each string after another token."""
        before = self.encode("a")
        texts = [self.decode([*before, token]) for token in range(len(self.tokenizer))]
        return Counter(text.removeprefix(self.decode(before)) for text in texts)
