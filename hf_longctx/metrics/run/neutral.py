"""Request fields that ask a server for plain greedy decoding.

Servers have default settings of their own, and many of them penalize repeated tokens. Such a penalty forbids copying.
We therefore send the neutral value of every field that a server may know. Most servers ignore unknown fields. If a
server refuses some of them, we omit as few as possible. `probes` then tests whether the server decodes greedily.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


NEUTRAL: dict[str, Any] = {
    # Greedy decoding. top_k=1 also works with servers that replace a temperature of 0.
    "temperature": 0,
    "do_sample": False,
    "top_k": 1,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1,
    "typical": 1,
    "xtc_probability": 0,
    "mirostat": 0,
    "mirostat_mode": 0,
    "penalty_alpha": 0,
    "guidance_scale": 1,
    "logit_bias": {},
    # No penalties. llama.cpp switches all penalties off if repeat_last_n is 0.
    "repetition_penalty": 1,
    "repeat_penalty": 1,
    "rep_pen": 1,
    "encoder_repetition_penalty": 1,
    "repeat_last_n": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "dry_multiplier": 0,
    "no_repeat_ngram_size": 0,
    # Every generated token, and nothing else.
    "echo": False,
    "min_tokens": 0,
    "ignore_eos": False,
    "ban_eos_token": False,
    "skip_special_tokens": False,  # some special tokens open and close thoughts
    "spaces_between_special_tokens": False,
}
# The strongest penalties that servers accept. A server that obeys these fields also obeys their neutral values.
PENALTIES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 2, "repeat_penalty": 2, "rep_pen": 2, "repeat_last_n": 64},
    {"presence_penalty": 2, "frequency_penalty": 2, "repeat_last_n": 64},
)


def accepted_fields(
    fields: dict[str, Any], refused: Callable[[dict[str, Any]], bool], accepted: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return as many fields as a server accepts, by bisection.

    Args:
        fields: fields to try.
        refused: function that sends a request with some fields, and returns whether the server refuses it.
        accepted: fields that the server accepts, included in every request. Default: none.
    """
    accepted = accepted or {}
    if not refused(accepted | fields):
        return accepted | fields
    if len(fields) < 2:
        return accepted
    entries = [*fields.items()]
    for half in (entries[: len(entries) // 2], entries[len(entries) // 2 :]):
        accepted = accepted_fields(dict(half), refused, accepted)
    return accepted
