"""Find the context that a model claims: the largest that its config or its tokenizer's config claims."""

from __future__ import annotations

from typing import Any

from .base import LONGEST
from .reading import LENGTHS, Source, names


SHORTEST_TRAINING = 2048  # tokens; see `claimed_context`


def claimed_context(source: Source) -> tuple[int, str]:
    """Return the tokens of context that a model claims, and which setting claims them; adds to `source.notes`.

    Scaling claims its factor times the length before it. Configs name that length, or else max_position_embeddings is
    either of the two: of dynamic scaling and YaRN the one before it, as transformers computes; of linear scaling the
    one before it where the other reading would be a training on 2048 tokens or fewer.

    Raises:
        ValueError: nothing claims a length, or one is not a number of tokens.
    """
    config, notes = source.config, source.notes
    claims = stated_lengths(source)
    stated = claims.get("max_position_embeddings", max(claims.values(), default=None))
    claims |= scaled_lengths(source, stated, max(claims.values(), default=0) != stated)
    condensed = getattr(config, "rope_condense_ratio", None)
    if condensed and stated:
        claims["rope_condense_ratio"] = int(condensed * stated)
        notes.append(f"rope_condense_ratio = {condensed:g} needs code of FastChat: plain RoPE is judged")
    tokenizer: Any = source.tokenizer.get("model_max_length")
    if is_number(tokenizer) and 1 < tokenizer <= LONGEST:  # those without a limit say 1e30
        claims["model_max_length of the tokenizer"] = int(tokenizer)
    if not claims:
        raise ValueError(f"{type(config).__name__} has no max_position_embeddings; pass context_length instead.")
    by = max(claims, key=lambda name: claims[name])
    if by == "max_position_embeddings":
        notes += default_length(source)
    elif stated is not None and claims[by] > stated and not ("max_pos" in by or by.startswith("factor")):
        notes.append(f"max_position_embeddings is {stated}; {by} claims {claims[by]} tokens")
    chunks = getattr(config, "dual_chunk_attention_config", None)
    if isinstance(chunks, dict):
        native = chunks.get("original_max_position_embeddings", "fewer")
        notes.append(
            f"the claim rests on dual_chunk_attention_config ({native} tokens without it), which transformers ignores: "
            "plain RoPE is judged"
        )
    return claims[by], by


def stated_lengths(source: Source) -> dict[str, int]:
    """Return the lengths that stand in a config, by their names."""
    file, lengths = {**(source.file or {}), **source.text}, {}
    for name in LENGTHS:
        length = getattr(source.config, name, None)
        length = file.get(name) if length is None else length
        if length is None or (name not in file and not source.known and source.text):
            continue
        if not is_number(length) or length < 1:
            raise ValueError(f"{name} is {length!r} in {type(source.config).__name__}; it must be a positive integer.")
        lengths[name] = int(length)
    return lengths


def scaled_lengths(source: Source, stated: int | None, longer: bool) -> dict[str, int]:
    """Return the length that scaling claims; adds a note where it is not clear which length is scaled.

    Args:
        stated: max_position_embeddings.
        longer: whether the config states a longer length under another name, which needs no guess then.
    """
    rope, notes = source.config.rope_parameters, source.notes
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        scaling, factor = parameters.get("rope_type"), parameters.get("factor")
        original = parameters.get("original_max_position_embeddings")
        if scaling not in ("yarn", "linear", "dynamic") or not factor or factor <= 1 or parameters.get("alpha"):
            continue
        named = scaling != "yarn" or source.file is None or is_inside(source.file, "original_max_position_embeddings")
        if original and named:
            if stated and factor * original > stated:
                notes.append(
                    f"max_position_embeddings is {stated}; {scaling} claims {factor:g} times {original} tokens"
                )
            return {f"factor of {scaling}": int(factor * original)}
        if not stated or nested or longer:
            continue
        scaled, check = int(factor * stated), f"{scaling} scaling by {factor:g}; where it is that"
        if scaling == "linear" and stated > SHORTEST_TRAINING * factor:
            check = f"with {check} before scaling, check {scaled} tokens"
        elif scaling == "yarn" or (scaling == "linear" and stated == SHORTEST_TRAINING * factor):
            check = f"before {check} after scaling, check {stated} tokens"
        else:
            check = ""
        if check:
            notes.append(f"max_position_embeddings = {stated} is taken to be the length {check}")
        if not check.startswith("with"):
            return {f"{factor:g} times max_position_embeddings, by {scaling} scaling": scaled}
    return {}


def is_inside(file: Any, name: str) -> bool:
    """Return whether a key stands anywhere in a JSON object."""
    return isinstance(file, dict) and (name in file or any(is_inside(part, name) for part in file.values()))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def default_length(source: Source) -> list[str]:
    """Return a note if the claimed length is the default of the config's class, and config.json names none."""
    config = source.config
    name = getattr(config, "attribute_map", {}).get("max_position_embeddings", "max_position_embeddings")
    if config.max_position_embeddings != getattr(type(config), name, None):
        return []
    return default_note(source, "max_position_embeddings", f"{name} = {config.max_position_embeddings}")


def default_note(source: Source, name: str, setting: str) -> list[str]:
    """Return a note on a setting that is the default of the class; none if config.json names it too."""
    default = f"{setting} is the default of {type(source.config).__name__}"
    if source.file is None:
        return [f"{default}, and stands also where config.json names none"]
    return [] if names(source.file, name) else [f"{default}; config.json names none"]
