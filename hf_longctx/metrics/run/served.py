"""Read models that are served through an OpenAI-compatible completions endpoint.

For each prompt token, vLLM reports the log-probabilities of the token and of the most likely token
(`prompt_logprobs`). On other servers, we only measure forgetting curves, using greedy completions.

Before measuring, we send prompts that only differ in the last token. The prediction of this token depends only on the
earlier tokens, so a correct server reports the same prediction for all these prompts. Otherwise, the server appears to
report the prediction of the next token, and is not supported.

    forgetting_curve(ServedModel("http://localhost:8000/v1"), tokens, ...)
"""

from __future__ import annotations

import http.client
import json
import math
import re
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..checks import public_name
from .engine import UnsupportedInput
from .greedy import GreedyCompletions, as_ids
from .neutral import NEUTRAL, accepted_fields
from .probes import prompts
from .prompts import Entry, PromptReader, check_entries


REFUSED = {400, 422}  # status codes of requests with unknown fields or values
PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # status codes of temporary errors
TOO_LONG = re.compile("context (length|window|size)|context_length_exceeded|max_model_len")
REQUEST = {"max_tokens": 1, "prompt_logprobs": 1}
ROUNDING = 0.02  # maximum difference (nats) between the log-probabilities of a token in several requests


class Refused(RuntimeError):
    """The server does not accept a field or a value of a request."""


class ServedModel(PromptReader):
    """A `Reader` for a served model. The constructor requests the model's name and capabilities from the server.

    Args:
        base_url: URL of the API with its version, such as "http://localhost:8000/v1".
        model: name of the served model; optional if the server lists a single model.
        tokenizer: the model's tokenizer, for the ids of BOS and EOS, and for greedy completions on servers that do not
            accept or return ids.
        journal: path of a file that records greedy completions, so that a killed run can resume.
        vocab_size: size of the vocabulary. Servers do not report it. Required for random data without id_range.
        api_key: bearer token. It is not sent to redirected addresses. Default: none.
        concurrency: maximum number of concurrent requests.
        timeout: timeout of a request in seconds. The server only responds when it has read the whole prompt.
        retries: maximum number of retries after a broken connection, a timeout or a temporary error (429, 5xx). Each
            retry emits a RuntimeWarning.
        backoff: delay before the first retry in seconds. Each further retry doubles the delay.

    Attributes:
        position_limit: maximum prompt length in tokens; None if the server does not report it.
        greedy: `GreedyCompletions`; None if the server reports log-probabilities.
        fields: fields of all requests: those of `neutral.NEUTRAL` that the server accepts.

    Raises:
        ConnectionError: the server cannot be reached.
        ValueError: the model does not exist, or the endpoint neither reports prompt log-probabilities nor completes
            prompts.
        RuntimeError: the server returned an error. The exception contains the server's message.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        tokenizer: Any = None,
        journal: Any = None,
        vocab_size: int | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
    ):
        self.base_url = base_url.rstrip("/").removesuffix("/completions")
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.vocab_size = vocab_size or math.inf
        self._key = api_key
        self.model, self.position_limit = self._choose_model(model)
        self.claimed_context = self.position_limit
        self.tokenizer, self.configs = tokenizer, [] if tokenizer is None else [tokenizer]
        self.greedy = None
        self.fields = dict(NEUTRAL)
        self._accepted = False
        self._reply_notes: list[str] | None = None
        try:
            self._check_log_probs()
        except (RuntimeError, ValueError) as error:
            self._no_log_probs = str(error).rstrip(".")
            self.greedy = GreedyCompletions(self, tokenizer, journal)
            for note in self.greedy.notes:  # lm-eval's results do not contain them
                warnings.warn(f"{self.base_url}: {note}", RuntimeWarning, stacklevel=2)

    def __repr__(self):
        return f"ServedModel({self.base_url!r}, {self.model!r})"

    def settings(self) -> dict[str, Any]:
        way = "prompt_logprobs" if self.greedy is None else "greedy completions"
        return {"model": public_name(self.model), "dtype": None, "attention": None, "served_with": way}

    def identity(self) -> dict[str, str]:
        return {"endpoint": self.base_url}

    @property
    def notes(self) -> Sequence[str]:
        return self._reply_notes or [] if self.greedy is None else self.greedy.notes

    def fingerprint(self) -> dict[str, Any]:
        if self.greedy is not None:
            return self.greedy.fingerprint()
        return {**super().fingerprint(), "server_reports": self.reported}

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        if self.greedy is not None:
            return self.greedy.predict(inputs, positions)
        return super().predict(inputs, prefix, positions)

    def prompt_entries(self, prompts: np.ndarray) -> list[list[Entry]]:
        if self.greedy is not None:
            raise ValueError(
                f"{self.base_url} must report log-probabilities of prompt tokens (prompt_logprobs): "
                f"{self._no_log_probs}. Serve the model with vLLM, or measure a forgetting curve only."
            )
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self.entries, prompts.tolist()))

    def entries(self, prompt: list[int], **options: Any) -> list[Entry]:
        """Return the `Entry` of each token of a prompt.

        Raises:
            ConnectionError, RuntimeError: see the class.
            ValueError: the response does not have one entry per token, or an entry does not contain its token.
            UnsupportedInput: the prompt is longer than the server allows.
        """
        response = self.complete({"model": self.model, "prompt": prompt, **REQUEST}, **options)
        check_count((response.get("usage") or {}).get("prompt_tokens", len(prompt)), len(prompt))
        entries = response["choices"][0].get("prompt_logprobs")
        if not entries:
            raise ValueError(f"the response to a prompt of {len(prompt)} tokens does not contain log-probabilities.")
        check_count(len(entries), len(prompt))
        by_id = [{int(token): x["logprob"] for token, x in (entry or {}).items()} for entry in entries]
        # servers encode NaN as null
        by_id = [{token: math.nan if x is None else float(x) for token, x in entry.items()} for entry in by_id]
        return check_entries(by_id, prompt)

    def complete(self, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        """Send a completions request with the `fields`, and return the response.

        Raises:
            RuntimeError: the response does not contain choices.
        """
        try:
            response = self._send("/completions", {**self.fields, **body}, **options)
        except Refused:
            if self._accepted or all(self._is_refused(body, fields, options) for fields in ({"temperature": 0}, {})):
                raise
            self.fields = accepted_fields(self.fields, lambda fields: self._is_refused(body, fields, options))
            response = self._send("/completions", {**self.fields, **body}, **options)
        self._accepted = True
        if isinstance(response, dict) and response.get("system_fingerprint"):
            self.reported["system_fingerprint"] = response["system_fingerprint"]
        if not (isinstance(response, dict) and isinstance(response.get("choices"), list) and response["choices"]):
            raise RuntimeError(f"{self.base_url}/completions must return choices, got {str(response)[:200]}")
        return response

    def _is_refused(self, body, fields, options):
        """Return whether the server refuses a request with some fields."""
        try:
            self._send("/completions", {**fields, **body}, **options)
        except Refused:
            return True
        return False

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer: Any = None) -> str:
        """Return the greedy response, decoded with the server's tokenizer."""
        if self._reply_notes is None:
            self._reply_notes = self._check_replies()
        body = {"model": self.model, "prompt": prompt.tolist(), "max_tokens": tokens}
        return self.complete(body)["choices"][0]["text"]

    def _check_replies(self):
        """Return a note unless responses to repeated passages contain the most likely tokens."""
        separator, units, _ = prompts(self.tokenizer, self.vocab_size)
        wrong = total = 0
        for unit in units:
            ids, tokens = 2 * (separator + unit), len(unit)
            body = {"model": self.model, "prompt": ids, "max_tokens": tokens, "return_token_ids": True}
            said = as_ids(self.complete(body)["choices"][0].get("token_ids") or [])
            if not said or len(said) > tokens:
                return ["The server does not return the ids of responses, so it may penalize repeated tokens in them."]
            entries = self.entries(ids + said)[len(ids) :]
            total += len(said)
            wrong += sum(max(entry.values()) - entry[token] > ROUNDING for entry, token in zip(entries, said))
        differ = f"{wrong} of {total} tokens in responses to repeated text are not the most likely ones"
        return [f"The server penalizes repeated tokens or samples: {differ}."] if wrong else []

    def _choose_model(self, model):
        """Return the model's name, and the maximum prompt length in tokens (None if unknown)."""
        try:
            entries = self._send("/models")["data"]
        except (RuntimeError, LookupError, TypeError) as error:  # some servers do not list models
            if model is None and isinstance(error, RuntimeError):
                raise
            entries = []
        names = [entry.get("id") for entry in entries]
        if model is None and len(names) != 1:
            raise ValueError(
                f"{self.base_url} must list a single model, got {names}. Name the model: --served-as, or model=..."
            )
        if model is not None and names and model not in names:
            raise ValueError(f"model must be one of {names}, got {model!r}. {self.base_url} serves these models.")
        model = names[0] if model is None else model
        entry = next((entry for entry in entries if entry.get("id") == model), {})
        self.reported = {name: entry[name] for name in ("root", "created") if name in entry}
        limit = entry.get("max_model_len")
        return model, limit - 1 if limit else None  # a request must generate a token

    def _check_log_probs(self):
        """Raise ValueError or RuntimeError if the server does not report log-probabilities at the right positions."""
        size = 10 if self.vocab_size == math.inf else int(self.vocab_size)
        probes = [self.entries([0, 1, 2, size * i // 5], retries=1) for i in range(1, 5)]
        if np.ptp([max(entries[3].values()) for entries in probes]) > ROUNDING:
            raise ValueError("the log-probabilities reported for a token appear to be those of the next token.")

    def _send(self, path, body=None, retries=None):
        """Send a request, and return the JSON of the response. Retry after temporary errors.

        We do not use the client of `huggingface_hub.utils.http_backoff`, for two reasons. With HF_HUB_OFFLINE=1,
        it rejects every address, including localhost. If one thread cannot connect, the client is closed for all
        threads.
        """
        url, data = self.base_url + path, None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        retries = self.retries if retries is None else min(retries, self.retries)
        failure: Exception = ConnectionError(f"{url} cannot be reached")
        for attempt in range(retries + 1):
            wait = self.backoff * 2**attempt
            request = urllib.request.Request(url, data, headers)
            if self._key:
                request.add_unredirected_header("Authorization", f"Bearer {self._key}")
            try:
                with urllib.request.urlopen(request, timeout=self.timeout) as response:
                    return json.loads(response.read())
            except urllib.error.HTTPError as error:
                message = read_message(error)
                kind = Refused if error.code in REFUSED else RuntimeError
                kind = UnsupportedInput if TOO_LONG.search(message) else kind
                advice = ". Pass the key with --api-key-env or api_key=..." if error.code in (401, 403) else ""
                failure = kind(f"{url} answered {error.code}: {message}{advice}")
                if error.code not in PASSING or kind is UnsupportedInput:
                    raise failure from None
                retry_after = error.headers.get("Retry-After", "")
                wait = float(retry_after) if retry_after.isdigit() else wait
            except (OSError, http.client.HTTPException) as error:  # includes URLError and timeouts
                failure = ConnectionError(f"{url} cannot be reached: {getattr(error, 'reason', error) or error!r}")
            except ValueError as error:
                raise RuntimeError(f"{url} did not return JSON: {error}") from None
            if attempt < retries:
                warnings.warn(
                    f"{failure}; retry {attempt + 1} of {retries} in {wait:g} s", RuntimeWarning, stacklevel=2
                )
                time.sleep(wait)
        raise failure


def read_message(error: urllib.error.HTTPError) -> str:
    """Return the error message in the server's response."""
    text = error.read().decode(errors="replace").strip()
    try:
        document = json.loads(text)
        inner = document.get("error", document)
        text = inner.get("message", text) if isinstance(inner, dict) else inner
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:500] or str(error.reason)


def check_count(entries: int, tokens: int) -> None:
    if entries != tokens:
        raise ValueError(
            f"the endpoint returned log-probabilities of {entries} tokens for a prompt of {tokens}. Configure the "
            "server not to add special tokens or truncate prompts."
        )
