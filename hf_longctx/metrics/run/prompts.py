"""Read vLLM models through the log-probabilities of prompt tokens (`prompt_logprobs`).

vLLM reports the prediction of a token at the position of this token, not one position earlier. A prompt must therefore
be one token longer than the scored input. `served.ServedModel` reads a vLLM server, and `OfflineModel` reads a vLLM
engine in this process:

    forgetting_curve(OfflineModel(LLM("my-fox", dtype="float32")), tokens, ...)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..checks import public_name
from .probes import prompts
from .reader import Reader, before_end, eos_ids


NO_PREDICTION = -1  # placeholder for the predicted id if the logits are NaN
Entry = dict[int, float]  # log-probabilities (nats) of the prompt token and of the most likely token, keyed by id


class PromptReader(Reader):
    """A `Reader` that derives predictions and scores from the log-probabilities of prompt tokens.

    Attributes:
        tokenizer: the model's tokenizer; None if unknown.
    """

    tokenizer: Any = None

    def prompt_entries(self, prompts: np.ndarray) -> list[list[Entry]]:
        """Return an `Entry` for each token of prompts (R, T) int64. The first entry of a prompt is empty."""
        raise NotImplementedError

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        """See `Reader.predict`. Positions must be below T - 1, because vLLM only reports tokens of the prompt."""
        rows, inverse = np.unique(inputs, axis=0, return_inverse=True)
        reported = slice(positions.start + 1, positions.stop + 1)
        best = np.array([[likeliest(entry) for entry in row[reported]] for row in self.prompt_entries(rows)])
        return best[inverse.reshape(-1)]

    def fingerprint(self) -> dict[str, Any]:
        separator, units, _ = prompts(self.tokenizer, self.vocab_size)
        prompt = [token for unit in units for token in 2 * (separator + unit)]
        (entries,) = self.prompt_entries(np.array([prompt]))
        return {"responses_to_probes": [likeliest(entry) for entry in entries[1:]]}

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        (entries,) = self.prompt_entries(np.append(ids, targets[-1])[None])
        entries = entries[positions.start + 1 :]
        log_probs = [entry[token] for entry, token in zip(entries, targets.tolist())]
        return np.array(log_probs), np.array([*map(likeliest, entries)])


def likeliest(entry: Entry) -> int:
    """Return the most likely id of an entry. Ties give the lowest id, and a NaN gives -1."""
    if any(map(math.isnan, entry.values())):
        return NO_PREDICTION
    return min(entry, key=lambda token: (-entry[token], token))


def check_entries(entries: list[Entry], ids: list[int]) -> list[Entry]:
    """Check that each entry contains the prompt token at its position, and return the entries."""
    for i, (entry, token) in enumerate(zip(entries, ids)):
        if i and token not in entry:
            raise ValueError(
                f"the log-probabilities at position {i} must include prompt token {token}, got tokens {list(entry)}. "
                "Configure the endpoint not to rewrite prompts."
            )
    return entries


class OfflineModel(PromptReader):
    """A `Reader` for a `vllm.LLM`. The LLM does not need a tokenizer (`skip_tokenizer_init=True`).

    Attributes:
        position_limit: maximum prompt length in tokens. It is `max_model_len` - 1, because vLLM must generate a token.
    """

    def __init__(self, llm: Any):
        self.llm, self.config = llm, llm.model_config
        self.configs = [self.config.hf_config]
        self.vocab_size = self.config.get_vocab_size()
        self.claimed_context = self.position_limit = self.config.max_model_len - 1

    def settings(self) -> dict[str, Any]:
        dtype = str(self.config.dtype).removeprefix("torch.")
        return {"model": public_name(self.config.model), "dtype": dtype, "attention": None, "served_with": "vllm.LLM"}

    def identity(self) -> dict[str, str]:
        revision = getattr(self.config.hf_config, "_commit_hash", None)  # only set for a model from the Hub
        return {"engine": "vllm"} | ({"revision": revision} if revision else {})

    def prompt_entries(self, prompts: np.ndarray) -> list[list[Entry]]:
        outputs = self._generate(prompts, max_tokens=1, prompt_logprobs=1)
        return [
            check_entries(
                [{token: value.logprob for token, value in (entry or {}).items()} for entry in output.prompt_logprobs],
                output.prompt_token_ids,
            )
            for output in outputs
        ]

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer: Any) -> str:
        (output,) = self._generate(prompt[None], max_tokens=tokens)
        return tokenizer.decode(before_end(output.outputs[0].token_ids, eos_ids(self.configs)))

    def _generate(self, prompts, **options):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, detokenize=False, **options)
        return self.llm.generate([{"prompt_token_ids": row.tolist()} for row in prompts], params, use_tqdm=False)
