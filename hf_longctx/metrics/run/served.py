"""A model behind an OpenAI-compatible completions endpoint, such as vLLM serves, as a source of predictions.

The reply to a prompt holds the likeliest token at each of its positions in one of these forms, tried in turn:

- `prompt_logprobs` (vLLM): per prompt token a dictionary of token ids with log-probability and rank;
- `echo` with `logprobs` (OpenAI's completions of old): lists over prompt and completion, with tokens as text. Texts
  need not be unique, so numbers are compared: a prompt token is the likeliest if none has a higher log-probability.
- `echo of text`: the same for a prompt that is sent as text, where a tokenizer is given; see text_prompts.py.

What a model expects in place of a token does not depend on that token. Prompts that differ in one token show whether
that holds for what a server reports, or whether its lists are one position late.

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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from .engine import Unreadable
from .prompts import ANOTHER, PromptReader, Scores, no_scores, scores_of_entries
from .text_prompts import TextPrompts


PASSING = {408, 409, 425, 429, 500, 502, 503, 504}  # worth another try
REFUSED = {400, 404, 405, 422, 501}  # the server does not know the request or something in it
TOO_LONG = re.compile("context (length|window|size)|context_length_exceeded|max_model_len")
SAME = 0.02  # nats by which rounding may change a log-probability from one request to the next


class ServedModel(PromptReader):
    """The `Reader` of one served model. Making one asks the server for its name and for its form of log-probabilities.

    Args:
        base_url: up to and including the version, such as "http://localhost:8000/v1".
        model: its name there; may be left out if the server lists one model only.
        tokenizer: that of the model, by which servers that take no ids can be measured.
        vocab_size: size of its vocabulary, which no server reports. Needed for random data without id_range.
        api_key: sent as bearer token, but not to where a server redirects. None: no key is sent.
        concurrency: requests in flight. A server batches them.
        timeout: of one request, in seconds. Long prompts take long: no answer comes before they have been read.
        retries: how often a request is sent again after a broken connection, a timeout or a passing refusal (429,
            5xx), each time with a RuntimeWarning.
        backoff: seconds before the first of them, doubled for each further one.

    Attributes:
        position_limit: longest prompt in tokens, None if the server does not say.

    Raises:
        ConnectionError: the server cannot be reached.
        ValueError: an argument is out of range, there is no such model, or the endpoint gives no log-probabilities of
            the prompt at the right tokens.
        RuntimeError: the server refuses; the message is the server's.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        tokenizer=None,
        vocab_size: int | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout: float = 600.0,
        retries: int = 4,
        backoff: float = 1.0,
    ):
        if not isinstance(base_url, str) or not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url is {base_url!r}; give one like http://localhost:8000/v1.")
        if concurrency < 1 or retries < 0 or not timeout > 0:
            raise ValueError(
                f"concurrency is {concurrency}, retries {retries}, timeout {timeout}: at least one request must be in "
                "flight, retries cannot be negative, and a request needs more than 0 seconds."
            )
        self.base_url = base_url.rstrip("/").removesuffix("/completions")
        self.concurrency, self.timeout, self.retries, self.backoff = concurrency, timeout, retries, backoff
        self.vocab_size = vocab_size or math.inf
        self._key = api_key
        self.model, self.position_limit = self._choose_model(model)
        self.claimed_context = self.position_limit
        self._form = self._choose_form(tokenizer)
        self.form = self._form.name

    def __repr__(self):
        return f"ServedModel({self.base_url!r}, {self.model!r})"

    def settings(self) -> dict[str, Any]:
        return {"model": self.model, "dtype": None, "attention": None, "served_with": self.form}

    def identity(self) -> dict[str, str]:
        return {"endpoint": self.base_url}

    def configured_id(self, name: str) -> None:
        """None: no server reports its special ids."""

    def score_prompts(self, prompts: np.ndarray) -> list[Scores]:
        with ThreadPoolExecutor(self.concurrency) as pool:
            return list(pool.map(self.score_prompt, prompts))

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        log_probs, best = super().score(ids, targets, positions)
        if positions.start == 0 and self._form.prompt is not list and math.isnan(log_probs[0]):
            raise ValueError(
                f"{self.base_url} takes text only and leaves out the log-probability of the first token, without which there "
                "is no loss by position. What it reports suffices for a forgetting curve, and for questions."
            )
        return log_probs, best

    def score_prompt(self, ids: np.ndarray) -> Scores:
        """Return what the model expected in place of each token of a prompt.

        Args:
            ids: (T,) integers.

        Raises:
            ConnectionError, RuntimeError: as for the class.
            ValueError: the reply has not one entry per token, or its tokens are others.
            Unreadable: the prompt is longer than the server allows, or cannot be sent as text.
        """
        prompt = [int(i) for i in ids]
        if max(prompt) >= self.vocab_size:
            raise ValueError(f"id {max(prompt)} is not in the vocabulary of {self.model}.")
        scores = self._form.read(self._complete(prompt, self._form), prompt)
        if scores is None:
            raise ValueError(f"{self.base_url} gave no log-probabilities for a prompt of {len(prompt)} tokens.")
        return scores

    def _complete(self, ids, form, **options):
        body = {"model": self.model, "prompt": form.prompt(ids), **form.options}
        return self._completion(body, **options)

    def _completion(self, body, **options):
        reply = self._send("/completions", body, **options)
        if not (isinstance(reply, dict) and isinstance(reply.get("choices"), list) and reply["choices"]):
            raise RuntimeError(f"{self.base_url}/completions answered without choices: {str(reply)[:200]}")
        return reply

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer=None) -> str:
        """Return the greedy reply; the server's tokenizer makes the text."""
        sent = self._form.prompt([int(i) for i in prompt])
        body = {"model": self.model, "prompt": sent, "max_tokens": tokens, "temperature": 0}
        return self._completion(body)["choices"][0]["text"]

    def _choose_model(self, model):
        """Return the name of the model, and its longest prompt."""
        try:
            entries = self._send("/models")["data"]
        except (Refused, LookupError, TypeError):  # few servers lack the list, but nothing depends on it
            entries = []
        names = [entry.get("id") for entry in entries]
        if model is None and len(names) != 1:
            raise ValueError(
                f"{self.base_url} serves {names or 'models it does not list'}; name one: --served-as, or model=..."
            )
        if model is not None and names and model not in names:
            raise ValueError(f"{self.base_url} does not serve {model!r}, but {names}.")
        model = names[0] if model is None else model
        limits = [entry.get("max_model_len") for entry in entries if entry.get("id") == model]
        return model, limits[0] - 1 if limits and limits[0] else None  # one token must be generated

    def _choose_form(self, tokenizer):
        """Return the first form in which the server gives log-probabilities of the right tokens."""
        size = 10 if self.vocab_size == math.inf else int(self.vocab_size)
        forms = [(form, [[0, 1, 2, size * i // 5] for i in range(1, 5)]) for form in FORMS]
        if tokenizer is not None:
            prompts = TextPrompts(tokenizer)
            forms.append((echo_of_text(prompts), prompts.probes()))
        failures = []
        for form, probes in forms:
            try:
                reply = self._complete(probes[0], form, retries=1)
                form.learn(reply, probes[0])
                scores = [form.read(self._complete(probe, form), probe) for probe in probes]
                read = [each for each in scores if each is not None]
                if len(read) < len(scores):
                    failures.append(f"with {form.name} it left them out")
                elif np.ptp([each.highest[first_difference(probes)] for each in read]) > SAME:
                    failures.append(f"with {form.name} they are those of other tokens, as if one position late")
                else:
                    return form
            except (RuntimeError, ValueError) as error:  # a server that does not know a form may fail with status 500
                failures.append(f"{form.name} failed ({error})")
        raise ValueError(
            f"the endpoint {self.base_url} gives no log-probabilities of the tokens of a prompt, without which nothing can "
            f"be measured: {'; '.join(failures)}. vLLM gives them; chat endpoints and llama.cpp's own server do not."
        )

    def _send(self, path, body=None, retries=None):
        """Return the JSON of a reply, tried again as long as that may help.

        Not by `huggingface_hub.utils.http_backoff`: its client refuses every address under HF_HUB_OFFLINE, where a
        server on this machine can still be measured, and is closed for all threads when one of them cannot connect.
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
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return json.loads(reply.read())
            except urllib.error.HTTPError as error:
                message = read_message(error)
                failure = failure_kind(error.code, message)(
                    f"{url} answered {error.code}: {message}{self._advice(error.code)}"
                )
                if error.code not in PASSING or isinstance(failure, Unreadable):
                    raise failure from None
                retry_after = error.headers.get("Retry-After", "")
                wait = float(retry_after) if retry_after.isdigit() else wait
            except (OSError, http.client.HTTPException) as error:  # URLError and time-outs are OSErrors
                failure = ConnectionError(f"{url} cannot be reached: {getattr(error, 'reason', error) or error!r}")
            except ValueError as error:
                raise RuntimeError(f"{url} did not answer in JSON: {error}") from None
            if attempt < retries:
                warnings.warn(
                    f"{failure}; retry {attempt + 1} of {retries} in {wait:g} s", RuntimeWarning, stacklevel=2
                )
                time.sleep(wait)
        raise failure

    def _advice(self, code):
        if code not in (401, 403):
            return ""
        if self._key:
            return ". This is the answer to the key that was given: look whether it is the right one."
        return (
            ". No key was sent; name the environment variable that holds it: --api-key-env NAME, or give api_key=..."
        )


class Refused(RuntimeError):
    """The server does not take this request."""


def first_difference(rows: list[list[int]]) -> int:
    """Return the first position at which not all rows have the same id."""
    return next(i for i, column in enumerate(zip(*rows)) if len(set(column)) > 1)


def failure_kind(code: int, message: str) -> type[RuntimeError]:
    if TOO_LONG.search(message):
        return Unreadable
    return Refused if code in REFUSED else RuntimeError


def read_message(error: urllib.error.HTTPError) -> str:
    """Return what the server says about an error."""
    text = error.read().decode(errors="replace").strip()
    try:
        document = json.loads(text)
        inner = document.get("error", document)
        text = inner.get("message", text) if isinstance(inner, dict) else inner
    except (ValueError, AttributeError):
        pass
    return " ".join(str(text).split())[:500] or str(error.reason)


def parse_prompt_logprobs(choice: dict[str, Any], ids: list[int]) -> Scores | None:
    """Parse vLLM's form: `[None, {"17": {"logprob": -0.3, "rank": 1}, ...}, ...]`."""
    entries = choice.get("prompt_logprobs")
    if not entries:
        return None
    check_logprob_count(len(entries), len(ids))
    numbers = [{int(token): number(x["logprob"]) for token, x in (entry or {}).items()} for entry in entries]
    return scores_of_entries(numbers, ids)


def parse_echo(choice: dict[str, Any], ids: list[int]) -> Scores | None:
    """Parse OpenAI's form: `{"token_logprobs": [None, -0.3, ...], "top_logprobs": [None, {" the": -0.2}, ...]}`."""
    lists = choice.get("logprobs") or {}
    tokens, alternatives = lists.get("token_logprobs"), lists.get("top_logprobs")
    if not tokens or not alternatives or tokens[0] is not None:  # some servers report the completion only
        return None
    if len(tokens) != len(ids) + 1:  # one token is generated, but not by every server
        check_logprob_count(len(tokens), len(ids))
    if len(alternatives) < len(ids) or not all(alternatives[1 : len(ids)]):  # alternatives of the completion only
        return None
    scores = no_scores(len(ids))
    for i in range(1, len(ids)):
        values = [number(tokens[i]), *map(number, alternatives[i].values())]
        if not any(map(math.isnan, values)):
            scores.highest[i] = max(values)
            scores.best[i] = ids[i] if values[0] >= scores.highest[i] else ANOTHER
        scores.log_probs[i] = values[0]
    return scores


@dataclass(frozen=True)
class Form:
    """A way to ask for the log-probabilities of a prompt.

    Attributes:
        options: of the request.
        parse: scores of a prompt's tokens from the choice of a reply; None if it has none.
        prompt: what is sent for ids.
        learn: is told the reply to the first probe, and its ids.
    """

    name: str
    options: dict[str, Any]
    parse: Callable[[dict[str, Any], list[int]], Scores | None]
    prompt: Callable[[list[int]], list[int] | str] = list
    learn: Callable[[dict[str, Any], list[int]], None] = lambda reply, ids: None

    def read(self, reply: dict[str, Any], ids: list[int]) -> Scores | None:
        """Return the scores of a reply; ValueError if the server has read another number of tokens."""
        check_logprob_count((reply.get("usage") or {}).get("prompt_tokens", len(ids)), len(ids))
        return self.parse(reply["choices"][0], ids)


ECHO = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
FORMS = (
    Form("prompt_logprobs", {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}, parse_prompt_logprobs),
    Form("echo", ECHO, parse_echo),
)


def echo_of_text(prompts: TextPrompts) -> Form:
    def parse(choice, ids):
        listed = prompts.listed(ids)
        part = parse_echo(choice, [ids[i] for i in listed])
        if part is None:
            return None
        scores = no_scores(len(ids))
        for whole, values in zip(scores, part):
            whole[listed] = values
        return scores

    return Form("echo of text", ECHO, parse, prompts.text, prompts.learn)


def number(value) -> float:
    return math.nan if value is None else float(value)


def check_logprob_count(entries, tokens):
    if entries != tokens:
        raise ValueError(
            f"the endpoint returned log-probabilities of {entries} tokens for a prompt of {tokens}. It may add special "
            "tokens or cut long prompts: switch that off."
        )
