"""Count the correct predictions of a served model with greedy completions.

We use completions if a server does not report the log-probabilities of prompt tokens. We send the first p tokens of a
sequence as a prompt, and compare the response at temperature 0 with the following tokens. The predictions are correct
up to the first difference. The next prompt contains all tokens up to and including the token that was predicted wrong.
A sequence thus takes one request per wrong prediction, plus one. We request parts of each sequence in parallel.

The server must accept and return token ids. The text of a response is not sufficient, because different tokens may
decode to the same text. Completions do not give losses or log-probabilities.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

import numpy as np

from .engine import UnsupportedInput


ANOTHER = -2  # placeholder for the predicted id if the prediction is wrong
PROBE = [0, 1, 2, 3, 4]
OPTIONS: list[dict[str, Any]] = [
    # vLLM would otherwise use the penalties in generation_config.json
    {"return_token_ids": True, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0},
    # llama.cpp returns ids along with log-probabilities
    {"logprobs": 1, "repeat_penalty": 1.0},
]


class GreedyCompletions:
    """Predict with a served model; see `reader.Reader.predict`.

    Args:
        server: a `served.ServedModel`, which sends the requests.
        tokenizer: the model's tokenizer, which lists the special tokens.

    Raises:
        ValueError: the server does not complete prompts of token ids, or does not return ids.
    """

    def __init__(self, server: Any, tokenizer: Any = None):
        self.server, self.tokenizer, self.halted = server, tokenizer, False
        failures = []
        for self.options in OPTIONS:
            try:
                for at in range(1, len(PROBE)):
                    with suppress(UnsupportedInput):  # the server omits the id of an end-of-text token
                        self.ask(PROBE, at, at + 1, retries=0)
                return
            except (RuntimeError, ValueError) as error:
                failures.append(str(error))
        raise ValueError(
            f"{server.base_url} must complete prompts of token ids at temperature 0, and return ids, got: "
            f"{'; '.join(dict.fromkeys(failures))}. Serve the model with vLLM or llama.cpp. Chat APIs are not supported, "
            "because their responses do not continue given tokens."
        )

    def predict(self, inputs: np.ndarray, positions: range) -> np.ndarray:
        """Return the next input id where the prediction is correct, and -2 where it is wrong.

        Raises:
            UnsupportedInput: the server omits the ids of end-of-text tokens, and an input may contain one.
        """
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        first, stop, workers = positions.start + 1, positions.stop + 1, self.server.concurrency
        parts = min(max(1, workers // len(rows)), stop - first)
        edges = np.linspace(first, stop, parts + 1).astype(int).tolist()
        jobs = [(row, *part) for row in rows.tolist() for part in pairwise(edges)]
        self.halted = False
        with ThreadPoolExecutor(workers) as pool:
            try:
                if parts > 1:  # lets the server cache each row before we request the parts of the row
                    list(pool.map(lambda row: self.read(row, stop - 1, stop), rows.tolist()))
                read = list(pool.map(lambda job: self.read(*job), jobs))
            finally:  # on Ctrl-C, cancel the other parts
                self.halted = True
        right = np.array([*chain(*read)]).reshape(len(rows), -1)
        return np.where(right, rows[:, first:stop], ANOTHER)[inverse.reshape(-1)]

    def read(self, ids: list[int], start: int, stop: int) -> list[bool]:
        """Return whether the prediction of each of ids[start:stop] is correct."""
        right: list[bool] = []
        chunk = stop - start
        while len(right) < stop - start and not self.halted:
            at = start + len(right)
            try:
                answer = self.ask(ids, at, min(at + chunk, stop))
            except BaseException:
                self.halted = True
                raise
            right += answer
            # request fewer tokens after a wrong prediction, and twice as many otherwise
            chunk = 2 * chunk if answer[-1] else 2 * len(answer) - 1
        return right

    def ask(self, ids: list[int], start: int, stop: int, **options: Any) -> list[bool]:
        """Request predictions of ids[start:stop] with the prompt ids[:start].

        Returns:
            whether each prediction in the response is correct, up to the first wrong prediction.

        Raises:
            ValueError: the server read a different number of prompt tokens, or did not return ids.
            UnsupportedInput: the response is an omitted end-of-text token, and ids[start] may be one.
        """
        body = {"model": self.server.model, "prompt": ids[:start], "max_tokens": stop - start, "temperature": 0}
        response = self.server.complete(body | self.options, **options)
        choice = response["choices"][0]
        read = (response.get("usage") or {}).get("prompt_tokens", start)
        if read != start:
            raise ValueError(
                f"{self.server.base_url} read {read} tokens for a prompt of {start}. Configure the server not to add "
                "special tokens or truncate prompts."
            )
        entries = (choice.get("logprobs") or {}).get("content") or []
        said = choice.get("token_ids") or [entry["id"] for entry in entries if "id" in entry]
        right = [a == b for a, b in zip(said, ids[start:stop])]
        if False in right:
            return right[: right.index(False) + 1]
        if right:
            return right
        if choice.get("finish_reason") != "stop" or choice.get("text"):
            raise ValueError(f"{self.server.base_url} did not return token ids")
        # the prediction is an end-of-text token, whose id is omitted
        if self.tokenizer is None or ids[start] in self.tokenizer.all_special_ids:
            raise UnsupportedInput(
                f"the server omits the ids of end-of-text tokens, and token {ids[start]} of the input may be one"
            )
        return [False]
