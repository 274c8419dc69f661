"""A local server that responds like known completion endpoints, with a real model."""

import json
import threading
from collections import deque
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import torch

from hf_longctx.metrics import ServedModel


CORPUS = np.random.default_rng(0).integers(3, 12, size=200)
OPTIONS = {"lengths": [4, 9, 20], "repeats": 3, "bos_token_id": 1, "eos_token_id": 2}


class Server:
    """The behaviour of a server.

    Attributes:
        form: "vllm" (prompt_logprobs), "ids" (the ids of the completion, of vLLM),
            "llama.cpp" (log-probabilities of the completion only, which name ids), "text" (text of the completion),
            "text only" (the prompt must be text too, and gets a BOS), "chat" (no completions).
        troubles: what happens to the next requests for completions instead of an answer: a status, a function of the
            handler, or None, nothing.
        spoil: changes a response before it is sent.
        sampler: changes the logits of the next token: a function of the request, the ids before it, the number of ids
            in the prompt, and the logits.
        refusal: the status and message for a request, or None.
        keys: what each request had for "Authorization".
        decode, encode: text of ids, and back.
        detokenize: text of the ids that follow others.
        eos: the id that ends a completion.
        lists_limit: whether /models reports max_model_len.
        usage: whether responses report the number of prompt tokens.
        started: the start time that /models reports.
    """

    def __init__(self, model, form="vllm", key=None, max_model_len=None, names=("tiny",)):
        self.model, self.form, self.key, self.max_model_len, self.names = model, form, key, max_model_len, names
        self.lists_limit, self.usage, self.started = True, True, 1
        self.decode, self.encode, self.eos = lambda ids: "".join(map(text_of, ids)), None, None
        self.detokenize = lambda prompt, said: self.decode(said)
        self.sampler, self.refusal = lambda body, ids, prompt, logits: logits, lambda body: None
        self.troubles, self.spoil, self.requests, self.keys = deque(), lambda choice: choice, [], []
        self.lock = threading.Lock()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}/v1"

    def models(self):
        limit = {} if self.max_model_len is None or not self.lists_limit else {"max_model_len": self.max_model_len}
        return {"object": "list", "data": [{"id": name, "created": self.started, **limit} for name in self.names]}

    def complete(self, body):
        """Return a status and a response."""
        if self.form == "chat":
            return 404, {"detail": "Not Found"}
        if refused := self.refusal(body):
            return refused[0], {"error": {"message": refused[1]}}
        if isinstance(body["prompt"], str) != (self.form == "text only"):
            return 400, {"error": {"message": "prompt must be a string or ids"}}
        if self.form == "text only":
            body = body | {"prompt": [1, *self.encode(body["prompt"])]}
        if self.max_model_len is not None and len(body["prompt"]) + body["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": f"maximum context length is {self.max_model_len} tokens"}}
        said = self.say(body["prompt"], body["max_tokens"], body)
        stopped = said[-1] == self.eos
        choice = {
            "index": 0,
            "text": self.detokenize(body["prompt"], said[: len(said) - stopped]),
            "logprobs": None,
            "prompt_logprobs": None,
        }
        choice["finish_reason"] = "stop" if stopped else "length"
        if self.form == "vllm" and body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = vllm_entries(body["prompt"], self.logits(body["prompt"]).log_softmax(-1))
        if self.form in ("ids", "vllm") and body.get("return_token_ids"):
            choice["token_ids"] = said
        if self.form == "llama.cpp" and body.get("logprobs"):
            choice["logprobs"] = {"content": [{"id": i, "logprob": -0.1} for i in said]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(said)} if self.usage else None
        reply = {"object": "text_completion", "model": body["model"], "choices": [self.spoil(choice)], "usage": usage}
        return 200, reply

    def logits(self, ids):
        with self.lock, torch.inference_mode():
            output = self.model(torch.tensor([ids]))
        return (output[0] if isinstance(output, tuple) else output.logits)[0]

    def say(self, ids, tokens, body=None):
        """Greedy decoding, token by token."""
        said = list(ids)
        while len(said) < len(ids) + tokens and (len(said) == len(ids) or said[-1] != self.eos):
            said.append(int(self.sampler(body or {}, said, len(ids), self.logits(said)[-1]).argmax()))
        return said[len(ids) :]


def vllm_entries(prompt, log_probs):
    """Return vLLM's entries with ranks, as JSON: the prompt's own token, then the most likely one."""
    entries = [None]
    for token, row in zip(prompt[1:], log_probs):
        entry = {}
        for i in (token, int(row.argmax())):
            rank = int((row > row[i]).sum()) + 1
            entry[str(i)] = {"logprob": float(row[i]), "rank": rank, "decoded_token": text_of(i)}
        entries.append(entry)
    return entries


def text_of(token):
    """Return the text of ids. Several tokens have the same text, like the pieces of a character in practice."""
    return chr(ord("a") + token % 3)


@contextmanager
def serving(*args, **options):
    """Yield a `Server` that answers until the end of the `with` statement."""
    server = Server(*args, **options)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            server.keys.append(self.headers["Authorization"])
            self.reply(200, server.models())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body)
            server.keys.append(self.headers["Authorization"])
            if server.troubles:
                trouble = server.troubles.popleft()
                if callable(trouble):
                    return trouble(self)
                if trouble is not None:
                    return self.reply(trouble, {"error": {"message": "in trouble"}})
            self.reply(*server.complete(body))

        def reply(self, status, document):
            if server.key is not None and self.headers["Authorization"] != f"Bearer {server.key}":
                status, document = 401, {"error": "invalid key"}
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    class Http(ThreadingHTTPServer):
        request_queue_size = 64

    http = Http(("127.0.0.1", 0), Handler)
    server.port = http.server_address[1]
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def connect(server, **options):
    return ServedModel(server.url, **{"backoff": 0.01, "timeout": 10.0} | options)
