"""lm-eval's model type `hf-longctx`: its `hf`, for FoX and HMT without trust_remote_code, and HMT without a limit."""

from __future__ import annotations

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM


UNLIMITED = 2**31 - 1


@register_model("hf-longctx")
class LongContextLM(HFLM):
    """A causal language model of transformers, FoX and HMT among them, which importing this package makes known.

    `max_length` defaults to what the configuration claims, as in HFLM; a model that reads in segments has no limit.
    """

    @property
    def max_length(self):
        if self._max_length is None and getattr(self.model, "reads_in_segments", False):
            return UNLIMITED
        return super().max_length
