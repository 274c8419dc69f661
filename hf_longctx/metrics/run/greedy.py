"""Count the correct predictions of a served model with greedy completions.

We use completions if a server does not report the log-probabilities of prompt tokens. We send the first p tokens of a
sequence as a prompt, and compare the response at temperature 0 with the following tokens. The predictions are correct
up to the first difference. The next prompt ends with the correct token at this position. A sequence thus takes about
one request per wrong prediction. We request parts of each sequence in parallel.

If a server returns text instead of token ids, each request covers a single token. A longer response would be
ambiguous, because different tokens may decode to the same text.

Chat APIs are not supported, because they do not continue a prompt. Completions do not give losses or
log-probabilities.
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


ANOTHER = -2  # placeholder for the predicted id if the prediction is wrong
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0}


class Form(NamedTuple):
    """The format of requests: prompts as ids or text, responses as ids or text, and additional request options."""

    sends_ids: bool
    returns_ids: bool
    options: dict[str, Any] = {}
    adds_bos: bool = False


FORMS = [
    # vLLM would otherwise use the penalties in generation_config.json
    Form(True, True, {"return_token_ids": True, **NEUTRAL}),
    # llama.cpp returns ids along with log-probabilities
    Form(True, True, {"logprobs": 1, "repeat_penalty": 1.0}),
    Form(True, False),
    Form(False, False),
    Form(False, False, adds_bos=True),
]


class GreedyCompletions:
    """Predict with a served model; see `reader.Reader.predict`.

    Args:
        server: a `served.ServedModel`. It sends the requests.
        tokenizer: the model's tokenizer; optional if the server accepts and returns ids.
        journal: path of a file that records every response, so that a killed run can resume. Default: no file.

    Raises:
        ValueError: the server does not complete prompts, or the journal belongs to another server or model.
    """

    def __init__(self, server: Any, tokenizer: Any = None, journal: Any = None):
        self.server, self.tokenizer, self.form = server, tokenizer, FORMS[0]
        self.answers = Journal(journal, {"endpoint": server.base_url, "model": server.model})
        self.lock, self.halted = threading.Lock(), False
        self.keeps_spaces = False  # some servers strip leading spaces
        self.choose_form()

    def choose_form(self) -> None:
        """Set `form` to the first of `FORMS` that the server supports."""
        failures = []
        for form in FORMS if self.tokenizer is not None else FORMS[:2]:
            self.form = form
            try:
                for at in range(1, 5):
                    self.ask(self.probe(), at, at + 1, retries=0)
                return
            except (RuntimeError, ValueError) as error:
                failures.append(str(error))
        advice = "" if self.tokenizer is not None else " If the server does not accept ids, pass tokenizer=... ."
        raise ValueError(
            f"{self.server.base_url} must complete prompts at temperature 0, got: "
            f"{'; '.join(dict.fromkeys(failures))}.{advice} Chat APIs are not supported, "
            "because they do not continue a prompt."
        )

    def probe(self) -> list[int]:
        """Return the five token ids of a test prompt."""
        if self.tokenizer is None:
            return [0, 1, 2, 3, 4]
        bos = self.tokenizer.bos_token_id
        ids = self.encode("the model reads the text of the book") * 5
        return ([] if bos is None else [bos]) + ids[: 5 - (bos is not None)]

    def predict(self, inputs: np.ndarray, positions: range) -> np.ndarray:
        """Return the next input id for each correct prediction, and -2 for each wrong prediction.

        Raises:
            UnsupportedInput: the server returns text that does not determine the tokens at some positions.
        """
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        first, stop, workers = positions.start + 1, positions.stop + 1, self.server.concurrency
        parts = min(max(1, workers // len(rows)), stop - first)
        edges = np.linspace(first, stop, parts + 1).astype(int).tolist()
        jobs = [(row, *part) for row in rows for part in pairwise(edges)]
        self.halted = False
        with ThreadPoolExecutor(workers) as pool:
            try:
                if parts > 1:  # lets the server cache each row before we request the parts of the row
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
        """Return "right", "wrong" or "unsure" for the prediction of each id in ids[start:stop]."""
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
            # request fewer tokens after a wrong prediction, and twice as many otherwise
            chunk = 2 * right + 1 if then else 2 * chunk
        return verdicts[: stop - start]

    def ask(self, ids: list[int], start: int, stop: int, **options: Any) -> tuple[int, str]:
        """Request predictions of ids[start:stop] with the prompt ids[:start].

        Returns:
            the number of leading "right" predictions, and the verdict on the next prediction: "wrong" or "unsure". If
            all predictions in the response are "right", the verdict is an empty string.
        """
        if not self.form.returns_ids:
            return self.ask_for_text(ids[:start], ids[start], **options)
        said = self.complete(ids[:start], start, stop - start, **options)
        right = next((i for i, pair in enumerate(zip(said, ids[start:stop])) if pair[0] != pair[1]), len(said))
        if right < len(said):
            return right, "wrong"
        if not said:  # the server omits a predicted end-of-text token
            return 0, "unsure" if self.is_special(ids[start]) else "wrong"
        return right, ""

    def ask_for_text(self, before: list[int], token: int, **options: Any) -> tuple[int, str]:
        """Like `ask` for a single token, but compare the text of the response with the text of the token."""
        prompt, text = self.decode(before), self.decode([*before, token])
        expected, reachable = text.removeprefix(prompt), self.form.sends_ids or self.encode(prompt) == before
        if not (reachable and text.startswith(prompt) and expected) or "\ufffd" in expected or self.is_special(token):
            return 0, "unsure"
        sent = prompt.removeprefix(self.tokenizer.bos_token) if self.form.adds_bos else prompt
        said = self.complete(before if self.form.sends_ids else sent, len(before), 1, **options)
        self.keeps_spaces |= said.startswith(" ")
        if said == expected:
            return (1, "") if self.ids_of_text[said] == 1 else (0, "unsure")
        return 0, "unsure" if said == self.decode([token]) and not self.keeps_spaces else "wrong"

    def complete(self, prompt: Any, length: int, tokens: int, **options: Any) -> Any:
        """Return the response as ids or text. The ids may be empty, because a server may omit an end-of-text token.

        Args:
            prompt: prompt, as ids or text.
            length: number of tokens in the prompt.
            tokens: maximum number of tokens in the response.

        Raises:
            ValueError: the server read a different number of prompt tokens, or did not return ids.
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
                f"{self.server.base_url} read {read} tokens for a prompt of {length}. Configure the server not to add "
                "special tokens or truncate prompts."
            )
        if not self.form.returns_ids:
            return choice.get("text") or ""
        entries = (choice.get("logprobs") or {}).get("content") or []
        ids = choice.get("token_ids") or [entry["id"] for entry in entries if "id" in entry]
        if not ids and (choice.get("text") or choice.get("finish_reason") != "stop"):
            raise ValueError(f"{self.server.base_url} did not return token ids.")
        return ids[:tokens]

    def is_special(self, token: int) -> bool:
        """Return whether an id may be a special token. Without a tokenizer, return True."""
        return self.tokenizer is None or token in self.tokenizer.all_special_ids

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @cached_property
    def ids_of_text(self) -> Counter[str]:
        """The number of ids that decode to each string. Each id is decoded with another token in front of it."""
        before = self.encode("a")
        texts = [self.decode([*before, token]) for token in range(len(self.tokenizer))]
        return Counter(text.removeprefix(self.decode(before)) for text in texts)
