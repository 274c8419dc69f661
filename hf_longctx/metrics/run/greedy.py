"""Count the correct predictions of a served model with greedy completions.

We use completions if a server does not report the log-probabilities of prompt tokens. We send the first p tokens of a
sequence as a prompt, and compare the response with the following tokens. The predictions are correct up to the first
difference. The next prompt ends with the correct token at this position. A sequence thus takes about one request per
wrong prediction. We request parts of each sequence in parallel.

If a server returns text instead of token ids, each request covers a single token. A longer response would be
ambiguous, because different tokens may decode to the same text. The text of a token may also be incomplete: servers
drop spaces, line breaks and text at which they stop. If a response could be such a remainder of the correct token, we
test whether the token arrives when the model must copy it.

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

from ...tokenization import tokenizer_hash
from .engine import UnsupportedInput
from .journal import Journal, content_hash
from .probes import Altered, Probes, prompts


ANOTHER = -2  # placeholder for the predicted id if the prediction is wrong
RECHECKS = 4  # responses of each call of `predict` that we request again if a journal contains them
TAIL = 8  # number of tokens before a token that we repeat to test whether the token arrives


class Form(NamedTuple):
    """The format of requests: prompts as ids or text, responses as ids or text, and additional request options."""

    sends_ids: bool
    returns_ids: bool
    options: dict[str, Any] = {}
    adds_bos: bool = False


FORMS = [
    Form(True, True, {"return_token_ids": True}),  # vLLM
    Form(True, True, {"logprobs": 1}),  # llama.cpp returns ids along with log-probabilities
    Form(True, False),
    Form(False, False),
    Form(False, False, adds_bos=True),
]


class Response(NamedTuple):
    """A response to a prompt: its ids (None if the server returns text), its text, and whether the server stopped."""

    ids: list[int] | None
    text: str
    stopped: bool


class GreedyCompletions:
    """Predict with a served model; see `reader.Reader.predict`.

    Args:
        server: a `served.ServedModel`. It sends the requests.
        tokenizer: the model's tokenizer; optional if the server accepts and returns ids.
        journal: path of a file that records every response, so that a killed run can resume. Default: no file.

    Attributes:
        form: the format of requests.
        probes: the `Probes` of the server.

    Raises:
        ValueError: the server does not complete prompts, or the journal belongs to another server, model or tokenizer.
    """

    def __init__(self, server: Any, tokenizer: Any = None, journal: Any = None):
        self.server, self.tokenizer, self.form = server, tokenizer, FORMS[0]
        self.lock = threading.Lock()
        self.halted = False
        self.reports_prompt = True  # whether all responses contain usage.prompt_tokens
        self.intact: dict[Any, bool] = {}  # whether tokens arrive with their spaces; see `arrives`
        self.probes = self.choose_form()
        settings = {"endpoint": server.base_url, "model": server.model, "tokenizer_sha256": tokenizer_hash(tokenizer)}
        self.answers = Journal(journal, {**settings, **self.fingerprint()})
        self.recorded = set(self.answers.done)  # responses from an earlier run
        self.changed: list[bool] = []  # whether they changed

    def fingerprint(self) -> dict[str, Any]:
        """Return the responses to the probes. They identify the model; see `journal.difference`."""
        return {"responses_to_probes": self.probes.responses, "server_reports": self.server.reported}

    @property
    def notes(self) -> list[str]:
        """What could not be shown about the server, as sentences for the result."""
        missing = "The server does not report usage.prompt_tokens, so it may have added tokens to the prompts."
        return self.probes.notes + [missing] * (not self.reports_prompt)

    def choose_form(self) -> Probes:
        """Set `form` to the first of `FORMS` that the server supports, and return its `Probes`."""
        separator, (unit, *_), _ = prompts(self.tokenizer, self.server.vocab_size)
        ids = separator + unit
        failures = []
        for form in FORMS if self.tokenizer is not None else FORMS[:2]:
            self.form = form
            try:
                self.ask(ids, len(ids) - 1, len(ids), retries=0)  # an unknown form is not a temporary error
                return Probes(self)
            except Altered:
                raise
            except (RuntimeError, ValueError) as error:
                failures.append(str(error))
        advice = "" if self.tokenizer is not None else " If the server does not accept ids, pass tokenizer=... ."
        raise ValueError(
            f"{self.server.base_url} must complete prompts at temperature 0, got: "
            f"{'; '.join(text.rstrip('.') for text in dict.fromkeys(failures))}.{advice} Chat APIs are not supported, "
            "because they do not continue a prompt."
        )

    def predict(self, inputs: np.ndarray, positions: range) -> np.ndarray:
        """Return the next input id for each correct prediction, and -2 for each wrong prediction.

        Raises:
            ValueError: responses in the journal changed, so the server has another model.
            UnsupportedInput: the server returns text that does not determine the tokens at some positions.
        """
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        first, stop = positions.start + 1, positions.stop + 1
        workers = self.server.concurrency
        parts = min(max(1, workers // len(rows)), stop - first)
        edges = np.linspace(first, stop, parts + 1).astype(int).tolist()
        jobs = [(row, *part) for row in rows for part in pairwise(edges)]
        self.halted = False
        self.recheck(rows, first, stop)
        with ThreadPoolExecutor(workers) as pool:
            try:
                if parts > 1:  # lets the server cache each row before we request the parts of the row
                    list(pool.map(lambda row: self.read(row, stop - 1, stop), rows))
                read = list(pool.map(lambda job: self.read(*job), jobs))
            finally:  # on Ctrl-C, cancel the other parts
                self.halted = True
        verdicts = np.array([*chain(*read)]).reshape(len(rows), -1)
        self.resolve(verdicts, rows, first)
        unsure = int((verdicts == "unsure").sum())
        if unsure:
            raise UnsupportedInput(
                f"the responses do not contain token ids, so the predicted tokens are unknown at {unsure} of "
                f"{verdicts.size} positions"
            )
        return np.where(verdicts == "right", rows[:, first:stop], ANOTHER)[inverse.reshape(-1)]

    def recheck(self, rows: np.ndarray, first: int, stop: int) -> None:
        """Request some responses of an earlier run again. Raise ValueError if two of them have changed."""
        found = [(row, name, at) for row in rows for name in [row_name(row)] for at in range(first, stop)]
        found = [entry for entry in found if entry[1:] in self.recorded]
        for row, name, at in found[:: max(1, len(found) // RECHECKS)][:RECHECKS]:
            right, then = self.answers.done[name, at]
            tokens = min(right + bool(then), stop - at)
            known, again = (min(right, tokens), then * (tokens > right)), self.ask(row.tolist(), at, at + tokens)
            self.changed.append(again != known)
            if sum(self.changed) > 1:
                raise ValueError(
                    f"{self.answers.path} is a journal of another model: {sum(self.changed)} of {len(self.changed)} "
                    f"responses of {self.server.base_url} changed. To resume the run, serve its model. To start over, "
                    "pass another path."
                )

    def read(self, ids: np.ndarray, start: int, stop: int) -> list[str]:
        """Return the verdict on the prediction of each id in ids[start:stop]; see `ask`."""
        verdicts: list[str] = []
        name, chunk = row_name(ids), stop - start
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
            the number of leading "right" predictions, and the verdict on the next prediction. The verdict is one of:
            "wrong"; "unsure"; "trimmed", if the text differs only in spaces; "stopped", if the text is empty; an empty
            string, if all predictions in the response are "right".
        """
        if not self.form.returns_ids:
            return self.ask_for_text(ids[:start], ids[start], **options)
        said = self.complete(ids[:start], start, stop - start, **options).ids
        assert said is not None
        right = next((i for i, pair in enumerate(zip(said, ids[start:stop])) if pair[0] != pair[1]), len(said))
        if right < len(said):
            return right, "wrong"
        if not said:  # the server omits a predicted end-of-text token
            return 0, "unsure" if self.is_special(ids[start]) else "wrong"
        return right, ""

    def ask_for_text(self, before: list[int], token: int, **options: Any) -> tuple[int, str]:
        """Like `ask` for a single token, but compare the text of the response with the text of the token."""
        expected, sent = self.text_after(before, [token]), self.prompt(before)
        if sent is None or not expected or "\ufffd" in expected or self.is_special(token):
            return 0, "unsure"
        response = self.complete(sent, len(before), 1, **options)
        if response.text.startswith(" ") and not self.ids_of_text[f" {response.text}"]:
            self.intact[" ", ""] = True  # no token becomes this text without its first space
        if response.text == expected:
            return (1, "") if self.ids_of_text[expected] == 1 else (0, "unsure")
        if squeeze(response.text) == squeeze(expected):
            return 0, "trimmed"
        return 0, "stopped" if response.stopped and not response.text else "wrong"

    def resolve(self, verdicts: np.ndarray, rows: np.ndarray, first: int) -> None:
        """Replace "trimmed" and "stopped" by "wrong" if such tokens arrive completely, and by "unsure" otherwise."""
        doubtful = [*zip(*np.nonzero((verdicts == "trimmed") | (verdicts == "stopped")))]
        places = zip(*np.nonzero(verdicts == "right")) if doubtful else ()
        for i, j in places:
            before, token = rows[i, : first + j].tolist(), int(rows[i, first + j])
            self.intact[margins(self.text_after(before, [token]) or "")] = self.intact[token] = True
        for i, j in doubtful:
            before, token = rows[i, : first + j].tolist(), int(rows[i, first + j])
            key = margins(self.text_after(before, [token]) or "") if verdicts[i, j] == "trimmed" else token
            if key not in self.intact:
                self.intact[key] = self.arrives(before, token)
            verdicts[i, j] = "wrong" if self.intact[key] else "unsure"

    def arrives(self, before: list[int], token: int) -> bool:
        """Return whether the text of a token arrives completely when the model copies it."""
        separator = self.probes.separator
        unit = [i for i in before[-TAIL:] if not self.is_special(i)]
        ids = 3 * (separator + unit + [token]) + separator + unit
        said = self.generate(ids, 1)
        return said is not None and said == self.text_after(ids, [token])

    def generate(self, ids: list[int], tokens: int, **fields: Any) -> Any:
        """Return the response to a prompt, as ids or text. Return None if the prompt cannot be sent as text.

        Raises:
            ValueError: the response is invalid, or its text is not the text of its ids.
        """
        sent = self.prompt(ids)
        if sent is None:
            return None
        response = self.complete(sent, len(ids), tokens, fields)
        if response.ids is None:
            return response.text
        if self.tokenizer is not None and response.ids and response.text:
            texts = [squeeze(self.decode(response.ids, skip_special_tokens=skip)) for skip in (False, True)]
            text = squeeze(response.text)
            if "\ufffd" not in text + texts[0] and not any(x.startswith(text) or text.startswith(x) for x in texts):
                raise ValueError(
                    f"{self.server.base_url} must return the ids of the response {response.text!r}, got the ids of "
                    f"{self.decode(response.ids)!r}."
                )
        return response.ids

    def complete(
        self, prompt: Any, length: int, tokens: int, fields: dict[str, Any] | None = None, **options: Any
    ) -> Response:
        """Return the response to a prompt. Its ids may be empty, because a server may omit an end-of-text token.

        Args:
            prompt: prompt, as ids or text.
            length: number of tokens in the prompt.
            tokens: maximum number of tokens in the response.
            fields: further fields of the request.

        Raises:
            ValueError: the server read a different number of prompt tokens, did not return ids, returned too many ids,
                or generated a token that is not the most likely one.
        """
        body = {
            "model": self.server.model,
            "prompt": prompt,
            "max_tokens": tokens,
            **self.form.options,
            **(fields or {}),
        }
        response = self.server.complete(body, **options)
        choice, url = response["choices"][0], self.server.base_url
        read = (response.get("usage") or {}).get("prompt_tokens")
        if read is None:
            self.reports_prompt = False
            if not self.form.sends_ids:
                raise ValueError(
                    f"{url} must report usage.prompt_tokens, which shows how it encoded the prompt, got no such count."
                )
        elif read != length:
            raise ValueError(
                f"{url} read {read} tokens for a prompt of {length}. Configure the server not to add special tokens or "
                "truncate prompts."
            )
        text, stopped = choice.get("text") or "", choice.get("finish_reason") == "stop"
        if not self.form.returns_ids:
            return Response(None, text, stopped)
        entries = (choice.get("logprobs") or {}).get("content") or []
        ids = as_ids(choice.get("token_ids") or [entry["id"] for entry in entries if "id" in entry])
        if ids is None or (not ids and (text or not stopped)):
            raise ValueError(f"{url} did not return token ids.")
        if len(ids) > tokens:
            raise ValueError(
                f"{url} must return the ids of at most {tokens} generated tokens, got {len(ids)}. Configure the server "
                "not to include the prompt."
            )
        if not fields and any(is_unlikely(entry) for entry in entries):
            raise ValueError(
                f"{url} must generate the most likely token, got another token than the first of top_logprobs. Start "
                "the server without penalties and other sampling options."
            )
        return Response(ids, text, stopped)

    def prompt(self, ids: list[int]) -> Any:
        """Return a prompt as ids or text. Return None if the server would not read these ids from the text."""
        if self.form.sends_ids:
            return ids
        text = self.decode(ids)
        if self.encode(text) != ids:
            return None
        return text.removeprefix(self.tokenizer.bos_token) if self.form.adds_bos else text

    def text_after(self, before: list[int], ids: list[int]) -> str | None:
        """Return the text of ids that follow others. Return None if they change the text before them."""
        prompt, text = self.decode(before), self.decode(before + ids)
        return text.removeprefix(prompt) if text.startswith(prompt) else None

    def is_special(self, token: int) -> bool:
        """Return whether an id may be a special token. Without a tokenizer, return True."""
        return self.tokenizer is None or token in self.tokenizer.all_special_ids

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    @cached_property
    def ids_of_text(self) -> Counter[str]:
        """The number of ids that decode to each string. Each id is decoded with another token in front of it."""
        before = self.encode("a")
        texts = [self.decode([*before, token]) for token in range(len(self.tokenizer))]
        return Counter(text.removeprefix(self.decode(before)) for text in texts)


def row_name(ids: np.ndarray) -> str:
    """Return the name of a sequence in the journal."""
    return content_hash(ids)[:16]


def squeeze(text: str) -> str:
    """Remove all whitespace."""
    return "".join(text.split())


def margins(text: str) -> tuple[str, str]:
    """Return the whitespace at the start and at the end of a text. If the text is whitespace, it is both.

    >>> margins(" fox"), margins("\\n")
    ((' ', ''), ('\\n', '\\n'))
    """
    inner = text.strip()
    start, _, end = text.partition(inner) if inner else (text, "", text)
    return start, end


def as_ids(entries: list[Any]) -> list[int] | None:
    """Convert a server's token ids, such as 7 or "token_id:7", to ints. Return None if they are not ids.

    >>> as_ids([7, "token_id:8"]), as_ids(["fox"]), as_ids([[7]])
    ([7, 8], None, None)
    """
    words = [str(entry).removeprefix("token_id:") for entry in entries]
    return [*map(int, words)] if all(word.isdecimal() for word in words) else None


def is_unlikely(entry: dict[str, Any]) -> bool:
    """Return whether a token is not the most likely one of its `top_logprobs`."""
    top = entry.get("top_logprobs") or [{}]
    return top[0].get("id", entry["id"]) != entry["id"] and top[0].get("logprob") != entry.get("logprob")
