"""Inputs of visitors: files of the Hub, read without a token and up to a size, and configurations."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError


EXAMPLES = Path(__file__).with_name("examples")
MEGABYTE = 10**6
# The largest integers in a configuration, by names: classes of transformers make a list entry for each layer or label.
LARGEST = {"layer|label|block|depth": 1024, "dim|head|hidden|embd": 32_768, "": 10**12}


def fetch(repo: str, name: str, limit: int, revision: str | None = None) -> Path:
    """Return a file of a model on the Hub, in the cache; the name of its folder is the commit.

    Raises:
        ValueError: the file has more bytes than `limit`, or `repo` is not a name.
        FileNotFoundError: there is no such repository that everybody can read, or it lacks the file.
    """
    try:
        file = get_hf_file_metadata(hf_hub_url(repo, name, revision=revision), token=False)
    except RepositoryNotFoundError as error:  # one that is gated or private too
        raise FileNotFoundError(f"there is no model {repo} on the Hub that everybody can read.") from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{repo} has no {name}.") from error
    if file.size is None or file.size > limit:
        raise ValueError(f"{name} of {repo} has {file.size} bytes; this Space reads up to {limit:,}.")
    return Path(hf_hub_download(repo, name, revision=file.commit_hash, token=False))


def read_config(text: str) -> dict:
    """Return the values of a config.json.

    Raises:
        ValueError: the text is not a JSON object, or an integer is larger than that of any model, see `LARGEST`.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"config.json is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"config.json must hold a JSON object, not a {type(values).__name__}.")
    for name, number in integers("", values):
        limit = next(limit for pattern, limit in LARGEST.items() if re.search(pattern, name))
        if number > limit:
            raise ValueError(f"{name} is {number}; this Space reads numbers up to {limit:,} there.")
    return values


def integers(name: str, value) -> Iterator[tuple[str, int]]:
    """Yield all integers in a JSON value, by the name of the nearest object's entry that holds them."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from integers(key, inner)
    elif isinstance(value, list):
        for inner in value:
            yield from integers(name, inner)
    elif isinstance(value, int):
        yield name, value
