"""An engine of vLLM in this program, `vllm.LLM`, as a source of predictions without a server.

forgetting_curve(OfflineModel(LLM("my-fox", dtype="float32")), tokens, ...)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..checks import public_name
from .prompts import PromptReader, Scores, scores_of_entries


class OfflineModel(PromptReader):
    """The `Reader` of a `vllm.LLM`, which may be made with `skip_tokenizer_init=True`.

    Attributes:
        position_limit: longest prompt in tokens: `max_model_len`, less one that has to be generated.
    """

    def __init__(self, llm):
        self.llm, self.config = llm, llm.model_config
        self.vocab_size = self.config.get_vocab_size()
        self.claimed_context = self.position_limit = self.config.max_model_len - 1

    def settings(self) -> dict[str, Any]:
        dtype = str(self.config.dtype).removeprefix("torch.")
        return {"model": public_name(self.config.model), "dtype": dtype, "attention": None, "served_with": "vllm.LLM"}

    def identity(self) -> dict[str, str]:
        revision = getattr(self.config.hf_config, "_commit_hash", None)  # of a model from the Hub
        return {"engine": "vllm"} | ({"revision": revision} if revision else {})

    def configured_id(self, name: str) -> int | None:
        value = getattr(self.config.hf_config, name, None)
        return value[0] if isinstance(value, (list, tuple)) else value  # chat models list several EOS ids

    def score_prompts(self, prompts: np.ndarray) -> list[Scores]:
        outputs = self._generate(prompts, max_tokens=1, prompt_logprobs=1)
        return [scores_of_entries([*map(log_probs_by_id, x.prompt_logprobs)], x.prompt_token_ids) for x in outputs]

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer) -> str:
        (output,) = self._generate(prompt[None], max_tokens=tokens)
        return tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)

    def _generate(self, prompts, **options):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, detokenize=False, **options)
        return self.llm.generate([{"prompt_token_ids": row.tolist()} for row in prompts], params, use_tqdm=False)


def log_probs_by_id(entry) -> dict[int, float]:
    """Return the log-probability by id of one token of a prompt, nothing for the first."""
    return {token: value.logprob for token, value in (entry or {}).items()}
