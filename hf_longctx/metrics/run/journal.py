"""A journal: a file with one line per finished part of a measurement. A killed run resumes from this file.

    with Journal("curve.jsonl", settings) as journal:
        for length in lengths:
            if length not in journal.done:
                journal.append(length, measure(length))

The first line contains the settings. Every other line contains one part. There are no timestamps. If a run is killed
and resumed in the same order, it thus writes the same bytes as an uninterrupted run.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np


FORMAT = 1


class OtherRun(ValueError):
    """The journal file belongs to a run with different settings."""


class Journal(AbstractContextManager):
    """A JSONL file of results, keyed by part. Use the journal in a `with` statement, or close it.

    Args:
        path: path of the file. A missing file is created with its folder. An existing journal with the same settings
            is resumed. An incomplete last line is dropped. Default: keep the results in memory only.
        settings: all settings that affect the results, as JSON values. Examples: model, seed, tokenizer, corpus hash.

    Attributes:
        settings: the settings in JSON types.
        done: results of the finished parts, by key. A list in a JSON key becomes a tuple.

    Raises:
        OtherRun: the file belongs to a run with different settings. The message lists them.
        ValueError: the file is not a journal, or is damaged before its last line. The file is not modified.
    """

    def __init__(self, path: str | os.PathLike | None, settings: dict[str, Any]):
        self.path = None if path is None else Path(path)
        self.settings = json.loads(json.dumps(settings))
        self.done: dict[Any, Any] = {}
        self._file: Any = None
        if self.path is None:
            return
        header = json.dumps({"format": FORMAT, "settings": self.settings}).encode() + b"\n"
        content = self.path.read_bytes() if self.path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if whole:
            self.done = self._read(whole.splitlines())
        elif not header.startswith(content):
            raise ValueError(f"{self.path} is not a journal. Pass another path, or move the file away.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - `close` closes the file
        self._file.truncate(len(whole))
        if not whole:
            self._write(header)

    def append(self, key, result) -> None:
        """Add the result of a part, and flush it to disk.

        Args:
            key: a string, a number, None, or a list or tuple of these. It must not be in `done` yet.
            result: JSON values. Numbers must be finite.

        Raises:
            ValueError: a number is not finite.
            TypeError: the key or the result has a different type.
            OSError: the result cannot be written, e.g. because the disk is full. `done` still contains the result.
        """
        line = json.dumps({"key": key, "result": result}, allow_nan=False).encode() + b"\n"
        entry = json.loads(line)
        key = entry["key"]
        key = tuple(key) if isinstance(key, list) else key
        self.done[key] = entry["result"]
        if self._file is not None:
            self._write(line)

    def close(self, *_: Any) -> None:
        if self._file is not None:
            self._file.close()

    __exit__ = close

    def _write(self, line):
        try:
            if self._file.write(line) < len(line):  # the file is unbuffered, so a full disk is detected here
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"the journal cannot be written: {error.strerror}", str(self.path)) from error

    def _read(self, lines):
        """Parse the lines of a journal into `{key: result}`. Raise an error if the journal is from another run."""
        try:
            header, *parts = map(json.loads, lines)
            written, version = header["settings"], header["format"]
            done = {tuple(p["key"]) if isinstance(p["key"], list) else p["key"]: p["result"] for p in parts}
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.path} is not a journal, or is damaged ({error!r}). Pass another path, or move the file away."
            ) from None
        if version != FORMAT:
            raise ValueError(f"{self.path} must have format {FORMAT}, got {version}. Pass another path.")
        missing = "nothing"
        differing = [
            difference(name, written.get(name, missing), self.settings.get(name, missing))
            for name in sorted({*written, *self.settings})
        ]
        differing = [text for text in differing if text]
        reported = written.get("server_reports"), self.settings.get("server_reports")
        if differing and reported[0] != reported[1]:
            differing.append(f"the server reported {reported[0]} there and reports {reported[1]} here")
        if differing:
            raise OtherRun(
                f"{self.path} is a journal from another run: {'; '.join(differing)}. To resume it, use its settings. "
                "To start over, pass another path."
            )
        return done


def difference(name: str, there: Any, here: Any) -> str:
    """Describe how a setting differs between a journal and this run. Return an empty string if it is the same.

    Rounding errors may change a few predictions of a served model. We allow one change, and 3 % of a long list. What a
    server reports about itself, such as its start time, may change.

    >>> difference("seed", 3, 4), difference("responses_to_probes", ["fox", "dog"], ["fox", "cat"])
    ('seed is 3 there and 4 here', '')
    """
    if there == here or name == "server_reports":
        return ""
    if name == "responses_to_probes" and isinstance(there, list) and isinstance(here, list):
        changed = sum(x != y for x, y in zip(there, here)) + abs(len(there) - len(here))
        text = f"the server has another model, because {changed} of {len(here)} responses to test prompts changed"
        return text if changed > max(1, 0.03 * len(here)) else ""
    if name == "responses_to_probes":
        return "an earlier version wrote it, without responses that identify the model"
    return f"{name} is {there!r} there and {here!r} here"


def content_hash(ids) -> str:
    """Return the SHA-256 of token ids. It does not depend on the integer type.

    >>> content_hash([1, 2, 3])[:8] == content_hash(np.array([1, 2, 3], dtype=np.uint16))[:8]
    True
    """
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()
