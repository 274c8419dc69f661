"""A journal: every finished part of a measurement is a line of a file, from which a killed run resumes.

    with Journal("curve.jsonl", settings) as journal:
        for length in lengths:
            if length not in journal.done:
                journal.append(length, measure(length))

The first line holds the settings, each other line one part. Lines carry no time, so a run that was killed and resumed,
going through its parts in the same order, ends with the same bytes as one that was not. This file knows no model.
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
    """A journal holds a run with other settings."""


class Journal(AbstractContextManager):
    """Results by key, kept in a JSONL file. Close it, or use it in a `with` statement.

    Args:
        path: the file; made with its folder if missing, resumed if it is a journal of the same settings. A last line
            that was being written when the run was killed is dropped. None keeps the results in memory only.
        settings: all that the results depend on, as JSON values: model, seed, tokenizer, hash of the corpus, ...

    Attributes:
        settings: in JSON types.
        done: the finished parts, `{key: result}`. Lists within keys are tuples here.

    Raises:
        OtherRun: the file holds a run with other settings; the message names what differs.
        ValueError: the file is not a journal, or is damaged before its last line. It is left as it was.
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
            raise ValueError(f"{self.path} is not a journal. Give another path, or move that file away.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close(), which has nothing to write
        self._file.truncate(len(whole))
        if not whole:
            self._write(header)

    def append(self, key, result) -> None:
        """Add a finished part; once this returns, it is on the disk.

        Args:
            key: a string, a number, None, or a list or tuple of these, not in `done` yet.
            result: JSON values. Numbers must be finite.

        Raises:
            ValueError: the key is there already, or a number is not finite.
            TypeError: key or result are not such values.
            OSError: the part cannot be written, as when the disk is full; `done` has the part all the same.
        """
        line = json.dumps({"key": key, "result": result}, allow_nan=False).encode() + b"\n"
        entry = json.loads(line)
        key = entry["key"]
        key = tuple(key) if isinstance(key, list) else key
        if key in self.done:
            raise ValueError(f"key {key!r} is in the journal already.")
        self.done[key] = entry["result"]
        if self._file is not None:
            self._write(line)

    def close(self, *_: Any) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    __exit__ = close

    def _write(self, line):
        try:
            if self._file.write(line) < len(line):  # unbuffered, so that a full disk is noticed here and only here
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"the journal cannot be written: {error.strerror}", str(self.path)) from error

    def _read(self, lines):
        """Return the results in the lines of a file, whose first one must be our header."""
        try:
            header, *parts = map(json.loads, lines)
            written, version = header["settings"], header["format"]
            done = {tuple(p["key"]) if isinstance(p["key"], list) else p["key"]: p["result"] for p in parts}
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(
                f"{self.path} is not a journal, or is damaged ({error!r}). Give another path, or move that file away."
            ) from None
        if version != FORMAT:
            raise ValueError(f"{self.path} must have format {FORMAT}, got {version}. Give another path.")
        missing = "nothing"
        differing = [
            f"{name} is {written.get(name, missing)!r} there and {self.settings.get(name, missing)!r} here"
            for name in sorted({*written, *self.settings})
            if written.get(name, missing) != self.settings.get(name, missing)
        ]
        if differing:
            raise OtherRun(
                f"{self.path} is a journal from another run: {'; '.join(differing)}. To resume it, use its settings; "
                "to start over, give another path."
            )
        return done


def content_hash(ids) -> str:
    """SHA-256 of a sequence of token ids, whatever integer type they come in; for the settings of a journal.

    >>> content_hash([1, 2, 3])[:8] == content_hash(np.array([1, 2, 3], dtype=np.uint16))[:8]
    True
    """
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()
