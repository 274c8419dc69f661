"""The lm-eval model type `hf-longctx`, which extends `hf`: it loads FoX and HMT without trust_remote_code."""

from __future__ import annotations

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM


UNLIMITED = 2**31 - 1


@register_model("hf-longctx")
class LongContextLM(HFLM):
    """lm-eval's `HFLM` with support for FoX and HMT, which this package registers with transformers.

    `max_length` defaults to the claimed context, as in HFLM, or is unlimited if the model reads in segments.
    """

    @property
    def max_length(self):
        if self._max_length is None and getattr(self.model, "reads_in_segments", False):
            return UNLIMITED
        return super().max_length
