"""Encode literal text, and identify tokenizers by what they do instead of by their names."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any


NOT_IDS = {"version", "truncation", "padding", "decoder"}  # parts of a fast tokenizer that do not change ids
# Attributes of a slow tokenizer that do not change ids
NOT_OPTIONS = {
    "backend", "chat_template", "clean_up_tokenization_spaces", "init_kwargs", "model_max_length", "name_or_path",
    "padding_side", "truncation_side", "verbose",
}  # fmt: skip


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Encode a text without special tokens. A special token that the text contains literally is split into characters.

    Without this function, a text about `</s>` would contain the end-of-text token.

    Args:
        tokenizer: a transformers tokenizer.
        text: any string.
    """
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ids = tokenizer(text, **options)["input_ids"]
    special = set(getattr(tokenizer, "all_special_ids", ())) - {getattr(tokenizer, "unk_token_id", None)}
    if special.isdisjoint(ids):
        return ids
    # Unigram and word-level vocabularies also contain the special tokens as words, so we separate the first character.
    words = sorted(filter(None, map(tokenizer.convert_ids_to_tokens, special)), key=len, reverse=True)
    boundary = "|".join(f"(?<={re.escape(word[0])})(?={re.escape(word[1:])})" for word in words if len(word) > 1)
    parts = [tokenizer(part, **options)["input_ids"] for part in re.split(boundary or "(?!)", text)]
    return [token for part in parts for token in part]


def tokenizer_hash(tokenizer: Any) -> str | None:
    """Return the SHA-256 of everything that determines the ids of a text; None without a transformers tokenizer.

    Tokenizers with the same hash give the same ids. The hash covers the vocabulary, merges, normalizer, pre-tokenizer,
    added tokens and the template with BOS and EOS, but not the name, chat template or decoder.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        content = {name: part for name, part in content.items() if name not in NOT_IDS}
    elif hasattr(tokenizer, "save_vocabulary"):
        content = {
            "class": type(tokenizer).__name__,
            "vocabulary": tokenizer.get_vocab(),
            "added_tokens": {str(id): repr(token) for id, token in tokenizer.added_tokens_decoder.items()},
            "options": options_of(tokenizer),
            "files": saved_files(tokenizer),
        }
    else:
        return None
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def options_of(value: Any, depth: int = 3) -> dict[str, Any]:
    """Return the options in a slow tokenizer's attributes, such as `do_lower_case`, and in those of its parts.

    The attributes are the same after saving and loading. The arguments in `init_kwargs` are not.
    """
    options = {}
    for name, entry in getattr(value, "__dict__", {}).items():
        if name.startswith("_") or name.endswith("_file") or name in NOT_OPTIONS:
            continue
        if isinstance(entry, bool | int | float | str) or name.endswith("_kwargs"):
            options[name] = entry
        elif depth and (inside := options_of(entry, depth - 1)):
            options[name] = inside
    return options


def saved_files(tokenizer: Any) -> list[str]:
    """Return the SHA-256 of each vocabulary file that a slow tokenizer saves, such as a SentencePiece model."""
    with tempfile.TemporaryDirectory() as folder:
        files = tokenizer.save_vocabulary(folder) or ()
        return [hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files]
