"""The JSON texts of the results: each names its metric and its format, and a saved one its time and commit."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path


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


def save_document(path, text: str) -> None:
    """Write the JSON text of a result to a file, with `saved`: the time in UTC, and the commit of our code.

    A result itself knows neither, so that the same measurement gives the same text. The file appears when it is
    complete.
    """
    path = Path(path)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document = {**json.loads(text), "saved": {"time": now, "commit": commit_of(Path(__file__).parents[2])}}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(path)


def commit_of(folder: Path) -> str | None:
    """The commit of a git checkout, with "-dirty" after it if tracked files were changed; None for other folders."""
    if not (folder / ".git").exists():  # installed, perhaps within the repository of something else
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
