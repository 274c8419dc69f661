"""A model behind an OpenAI-compatible completions endpoint, such as vLLM serves, as a source of predictions.

The prompt is sent as token ids, and the reply holds the likeliest token at each position of the prompt, in one of two
forms, which are tried in turn.

- `prompt_logprobs` (vLLM): per prompt token a dictionary of token ids with log-probability and rank;
- `echo` with `logprobs` (OpenAI's completions of old): lists over prompt and completion, with tokens as text. Texts
  need not be unique, so numbers are compared: a prompt token is the likeliest if none has a higher log-probability.

    forgetting_curve(ServedModel("http://localhost:8000/v1"), tokens, ...)
"""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import numpy as np


NO_PREDICTION, ANOTHER = -1, -2  # in place of ids: NaN; a token that the reply does not identify
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # worth another try
REFUSED = {400, 404, 405, 422, 501}  # the server does not know the request or something in it
PROBE = [1, 2, 3]


class ServedModel:
    """The `Reader` of one served model. Making one asks the server for its name and for its form of log-probabilities.

    Args:
        base_url: up to and including the version, such as "http://localhost:8000/v1".
        model: its name there; may be left out if the server lists one model only.
        vocab_size: size of its vocabulary, which no server reports. Needed for random data without id_range.
        api_key: sent as bearer token; by default the environment's OPENAI_API_KEY, if there is one.
        concurrency: requests in flight. A server batches them.
        timeout: of one request, in seconds. Long prompts take long: no answer comes before they have been read.
        retries: how often a request is sent again after a broken connection, a timeout or a passing refusal (429,
            5xx).
        backoff: seconds before the first of them, doubled for each further one.

    Attributes:
        position_limit: longest prompt in tokens, None if the server does not say.

    Raises:
        ConnectionError: the server cannot be reached.
        ValueError: there is no such model, or the endpoint gives no log-probabilities of the prompt.
        RuntimeError: the server refuses; the message is the server's.
    """

    can_reply, device = True, None
    is_distributed = False
    reuses_prefixes = False  # the server does, by itself

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        vocab_size: int | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
    ):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}; give one like http://localhost:8000/v1.")
        self.base_url = base_url.rstrip("/").removesuffix("/completions")
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.vocab_size = vocab_size or math.inf
        self._key = api_key if api_key is not None else os.environ.get("OPENAI_API_KEY")
        self.model, self.position_limit = self._choose_model(model)
        self.claimed_context = self.position_limit
        self.form = self._choose_form()

    def __repr__(self):
        return f"ServedModel({self.base_url!r}, {self.model!r})"

    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "dtype": None, "attention": None, "served_with": self.form}

    def identity(self) -> dict[str, str]:
        return {"endpoint": self.base_url}

    def configured_id(self, name: str) -> None:
        """None: no server reports its special ids."""

    def cost(self, tokens: int) -> float:
        return tokens

    def reading(self, trial: np.ndarray, tokens_per_pass: int | None) -> nullcontext:
        """Nothing to prepare: memory and passes are the server's business."""
        return nullcontext()

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """As for `reader.Reader`, but at positions up to T - 2: log-probabilities are those of the prompt's tokens.

        A prediction is -2 where the likeliest id is not that of the input and the reply does not identify it.
        """
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        with ThreadPoolExecutor(self.concurrency) as pool:
            best = np.stack(list(pool.map(lambda row: self.score_prompt(row)[0], rows)))
        # the prediction after position p is reported with the token p + 1
        return best[inverse.reshape(-1)][:, positions.start + 1 : positions.stop + 1]

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        best, log_probs = self.score_prompt(np.append(ids, targets[-1]))
        return log_probs[positions.start + 1 :], best[positions.start + 1 :]

    def score_prompt(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each token of a prompt, what the model expected in its place.

        Args:
            ids: (T,) integers.

        Returns:
            The likeliest id, (T,) int64, see `predict`; and the log-probability of the prompt's token, (T,) float64,
            in nats. The first of each is -1 and NaN: nothing comes before it.

        Raises:
            ConnectionError, RuntimeError: as for the class.
            ValueError: the reply has not one entry per token, or its tokens are others.
        """
        ids = [int(i) for i in ids]
        if max(ids) >= self.vocab_size:
            raise ValueError(f"id {max(ids)} is not in the vocabulary of {self.model}.")
        options, parse = FORMS[self.form]
        reply = self._send("/completions", {"model": self.model, "prompt": ids, **options})
        scores = parse(reply["choices"][0], ids)
        if scores is None:
            raise ValueError(f"{self.base_url} gave no log-probabilities for a prompt of {len(ids)} tokens.")
        return scores

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer=None) -> str:
        """As for `reader.Reader`; the server's tokenizer makes the text."""
        body = {"model": self.model, "prompt": [int(i) for i in prompt], "max_tokens": tokens, "temperature": 0}
        return self._send("/completions", body)["choices"][0]["text"]

    def _choose_model(self, model):
        """The name, and the longest prompt."""
        try:
            entries = self._send("/models")["data"]
        except (RuntimeError, LookupError, TypeError):  # few servers lack the list, but nothing depends on it
            entries = []
        names = [entry.get("id") for entry in entries]
        if model is None and len(names) != 1:
            raise ValueError(f"{self.base_url} serves {names or 'models it does not list'}; name one: model=...")
        if model is not None and names and model not in names:
            raise ValueError(f"{self.base_url} does not serve {model!r}, but {names}.")
        model = names[0] if model is None else model
        limits = [entry.get("max_model_len") for entry in entries if entry.get("id") == model]
        return model, limits[0] - 1 if limits and limits[0] else None  # one token must be generated

    def _choose_form(self):
        """The first form in which the server gives log-probabilities."""
        failures = []
        for form, (options, parse) in FORMS.items():
            try:
                reply = self._send("/completions", {"model": self.model, "prompt": PROBE, **options})
                if parse(reply["choices"][0], PROBE) is not None:
                    return form
                failures.append(f"with {form} it left them out")
            except Refused as error:
                failures.append(f"{form} it refused ({error})")
        raise ValueError(
            f"the endpoint {self.base_url} gives no log-probabilities of the tokens of a prompt, without which nothing can "
            f"be measured: {'; '.join(failures)}. vLLM gives them; chat endpoints and llama.cpp do not."
        )

    def _send(self, path, body=None):
        """The JSON of a reply, tried again as long as that may help.

        Not by `huggingface_hub.utils.http_backoff`: its client refuses every address under HF_HUB_OFFLINE, where a
        server on this machine can still be measured, and is closed for all threads when one of them cannot connect.
        """
        url, data = self.base_url + path, None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        for attempt in range(self.retries + 1):
            wait = self.backoff * 2**attempt
            try:
                request = urllib.request.Request(url, data, headers)
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                kind = Refused if error.code in REFUSED else RuntimeError
                failure = kind(f"{url} answered {error.code}: {read_message(error)}")
                if error.code not in PASSING:
                    raise failure from None
                retry_after = error.headers.get("Retry-After", "")
                wait = float(retry_after) if retry_after.isdigit() else wait
            except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
                failure = ConnectionError(f"{url} cannot be reached: {getattr(error, 'reason', error) or error!r}")
            except ValueError as error:
                raise RuntimeError(f"{url} did not answer in JSON: {error}") from None
            if attempt < self.retries:
                time.sleep(wait)
        raise failure


class Refused(RuntimeError):
    """The server does not take this request."""


def read_message(error: urllib.error.HTTPError) -> str:
    """What the server says about an error."""
    text = error.read().decode(errors="replace").strip()
    try:
        document = json.loads(text)
        inner = document.get("error", document)
        text = inner.get("message", text) if isinstance(inner, dict) else inner
    except (ValueError, AttributeError):
        pass
    return str(text)[:500] or str(error.reason)


def parse_prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """vLLM's form: `[None, {"17": {"logprob": -0.3, "rank": 1}, ...}, ...]`."""
    entries = choice.get("prompt_logprobs")
    if not entries:
        return None
    check_count(len(entries), len(ids))
    best, log_probs = no_scores(len(ids))
    for i, entry in enumerate(entries[1:], start=1):
        numbers = {int(token): number(value["logprob"]) for token, value in entry.items()}
        if ids[i] not in numbers:
            raise ValueError(
                f"the tokens of the reply are not those of the prompt: at position {i} of {list(numbers)}, not of {ids[i]}. "
                "Does the endpoint rewrite prompts?"
            )
        log_probs[i] = numbers[ids[i]]
        if not any(map(math.isnan, numbers.values())):
            highest = max(numbers.values())
            best[i] = min(token for token, value in numbers.items() if value == highest)  # as argmax does
    return best, log_probs


def parse_echo(choice: dict[str, Any], ids: list[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """OpenAI's form: `{"token_logprobs": [None, -0.3, ...], "top_logprobs": [None, {" the": -0.2}, ...], ...}`."""
    lists = choice.get("logprobs") or {}
    tokens, alternatives = lists.get("token_logprobs"), lists.get("top_logprobs")
    if not tokens or not alternatives or tokens[0] is not None:  # some servers report the completion only
        return None
    if len(tokens) != len(ids) + 1:  # one token is generated, but not by every server
        check_count(len(tokens), len(ids))
    if len(alternatives) < len(ids) or not all(alternatives[1 : len(ids)]):  # alternatives of the completion only
        return None
    best, log_probs = no_scores(len(ids))
    for i in range(1, len(ids)):
        log_probs[i] = number(tokens[i])
        highest = max(map(number, alternatives[i].values()))
        if not math.isnan(log_probs[i]) and not math.isnan(highest):
            best[i] = ids[i] if log_probs[i] >= highest else ANOTHER
    return best, log_probs


FORMS: dict[str, tuple[dict[str, Any], Callable]] = {
    "prompt_logprobs": ({"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}, parse_prompt_logprobs),
    "echo": ({"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}, parse_echo),
}


def no_scores(n):
    return np.full(n, NO_PREDICTION, dtype=np.int64), np.full(n, np.nan)


def number(value) -> float:
    return math.nan if value is None else float(value)


def check_count(entries, tokens):
    if entries != tokens:
        raise ValueError(
            f"the endpoint returned log-probabilities of {entries} tokens for a prompt of {tokens}. It may add special "
            "tokens or cut long prompts: switch that off."
        )
