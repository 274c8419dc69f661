"""The lm-eval model type `hf-longctx`. It extends `hf`, and loads FoX and HMT without trust_remote_code."""

from __future__ import annotations

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM


UNLIMITED = 2**31 - 1


@register_model("hf-longctx")
class LongContextLM(HFLM):
    """lm-eval's `HFLM` with support for FoX and HMT. This package registers both with transformers.

    If the model reads in segments, `max_length` is unlimited by default. Otherwise, it defaults to the claimed
    context, as in HFLM.
    """

    @property
    def max_length(self):
        if self._max_length is None and getattr(self.model, "reads_in_segments", False):
            return UNLIMITED
        return super().max_length
