"""The JSON texts of the results: each names its metric and its format."""

from __future__ import annotations

import json


def write_document(metric: str, version: int, **fields) -> str:
    """A result as JSON text, one value a line. Raises ValueError on NaN and infinity, which JSON does not have."""
    return json.dumps({"metric": metric, "format": version, **fields}, indent=1, allow_nan=False) + "\n"


def read_document(text: str, metric: str, newest: int) -> dict:
    """The object that `write_document` wrote.

    Raises:
        ValueError: it is of another metric, or of a format newer than `newest`.
    """
    document = json.loads(text)
    found = document.get("metric") if isinstance(document, dict) else None
    if found != metric:
        raise ValueError(f'this JSON is no result of {metric}: its "metric" is {found!r}.')
    if document["format"] > newest:
        raise ValueError(
            f"this result of {metric} has format {document['format']}, and this version of hf-longctx reads up to "
            f"{newest}. Upgrade: pip install -U hf-longctx"
        )
    return document
