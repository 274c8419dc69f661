"""Hashes of the inputs of a run: data, tokenizer, and JSON values."""

import hashlib
import json
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any


# Parts of a fast tokenizer that do not change ids. A call leaves its truncation and padding behind.
BACKEND_WITHOUT_IDS = ("version", "truncation", "padding", "decoder")
# Attributes of a slow tokenizer that do not change ids
ATTRIBUTES_WITHOUT_IDS = {
    "init_kwargs", "name_or_path", "model_max_length", "padding_side", "truncation_side", "verbose", "backend",
    "clean_up_tokenization_spaces",
}  # fmt: skip


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

    It covers the vocabulary, the normalizer, the pre-tokenizer, the merges, the post-processor, added and special
    tokens, and the chat template. It does not depend on the folder, the maximum length, padding and truncation.
    """
    special = {role: str(token) for role, token in tokenizer.special_tokens_map.items()}
    if "pad_token" not in str(tokenizer.chat_template):
        special.pop("pad_token", None)
    parts = parts_of_fast(tokenizer) if tokenizer.is_fast else parts_of_slow(tokenizer)
    return digest_of([special, tokenizer.chat_template, tokenizer.split_special_tokens, parts])


def parts_of_fast(tokenizer: Any) -> dict[str, Any]:
    """Return the parts of a fast tokenizer that change ids."""
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: part for name, part in parts.items() if name not in BACKEND_WITHOUT_IDS}


def parts_of_slow(tokenizer: Any) -> dict[str, Any]:
    """Return the vocabulary, the added tokens, the options and the vocabulary files of a tokenizer in Python."""
    with tempfile.TemporaryDirectory() as folder:
        with suppress(NotImplementedError):  # a tokenizer of bytes or characters does not have such files
            tokenizer.save_vocabulary(folder)
        files = digest_of_source(Path(folder))
    added = {number: repr(token) for number, token in tokenizer.added_tokens_decoder.items()}
    return {"vocabulary": tokenizer.get_vocab(), "added": added, "options": options_of(tokenizer), "files": files}


def options_of(value: Any, depth: int = 3) -> dict[str, Any]:
    """Return the options in an object's attributes, such as `do_lower_case`, and in those of its parts."""
    options = {}
    for name, entry in getattr(value, "__dict__", {}).items():
        if name.startswith("_") or name.endswith("_file") or name in ATTRIBUTES_WITHOUT_IDS:
            continue
        if isinstance(entry, bool | int | float | str) or name.endswith("_kwargs"):
            options[name] = entry
        elif depth and (inside := options_of(entry, depth - 1)):
            options[name] = inside
    return options


__all__ = ["digest_of", "digest_of_source", "digest_of_tokenizer"]
