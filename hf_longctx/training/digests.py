"""Hashes of the inputs of a run: data, tokenizer, and JSON values."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..tokenization import tokenizer_hash


def digest_of(value: Any) -> str:
    """Return the SHA-256 hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_of_source(path: Path) -> str:
    """Return a hash of a file's contents, or of a folder's files. For a dataset on the Hub, return its name."""
    if path.is_file():
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    contents = [(str(file.relative_to(path)), digest_of_source(file)) for file in files]
    return digest_of(contents) if path.is_dir() else str(path)


def digest_of_tokenizer(tokenizer: Any) -> str:
    """Return a hash of everything that determines the token ids of documents and conversations, and their ends.

    In addition to `tokenizer_hash`, it covers special tokens and the chat template. It does not depend on the folder,
    the maximum length, padding and truncation.
    """
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    if "pad_token" not in str(tokenizer.chat_template):
        special.pop("pad_token", None)
    facts = [special, tokenizer.chat_template, tokenizer.split_special_tokens]
    return digest_of([*facts, tokenizer_hash(tokenizer)])


__all__ = ["digest_of", "digest_of_source", "digest_of_tokenizer"]
