"""A journal: a file with a line for every finished part of a measurement, from which a killed run resumes.

    with Journal("curve.jsonl", settings) as journal:
        for length in lengths:
            if length not in journal.done:
                journal.append(length, measure(length))

The first line contains the settings, each other line one part. Lines do not contain timestamps, so a run that is
killed and resumed in the same order writes the same bytes as an uninterrupted one. This file does not depend on a
model.
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
    """The journal belongs to a run with other settings."""


class Journal(AbstractContextManager):
    """Results by key in a JSONL file. Close it, or use it in a `with` statement.

    Args:
        path: path of the file. It is created with its folder if missing, and resumed if its settings match. An
            incomplete last line of a killed run is dropped. None keeps the results in memory only.
        settings: everything that the results depend on, as JSON values: model, seed, tokenizer, corpus hash, ...

    Attributes:
        settings: the settings in JSON types.
        done: the finished parts, `{key: result}`. Lists within keys become tuples.

    Raises:
        OtherRun: the file belongs to a run with other settings; the message names the differences.
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
            raise ValueError(f"{self.path} is not a journal. Give another path, or move that file away.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._file.truncate(len(whole))
        if not whole:
            self._write(header)

    def append(self, key, result) -> None:
        """Add a finished part, which is on disk when this returns.

        Args:
            key: a string, a number, None, or a list or tuple of these, that is not in `done` yet.
            result: JSON values. Numbers must be finite.

        Raises:
            ValueError: a number is not finite.
            TypeError: the key or the result has another type.
            OSError: the part cannot be written, e.g. because the disk is full; `done` contains it nevertheless.
        """
        line = json.dumps({"key": key, "result": result}, allow_nan=False).encode() + b"\n"
        entry = json.loads(line)
        key = entry["key"]
        key = tuple(key) if isinstance(key, list) else key
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
            if self._file.write(line) < len(line):  # unbuffered, so a full disk shows up here and nowhere else
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"the journal cannot be written: {error.strerror}", str(self.path)) from error

    def _read(self, lines):
        """Parse the lines of a file into results; the first line must be our header."""
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
    """Return the SHA-256 of token ids, independent of their integer type, for the settings of a journal.

    >>> content_hash([1, 2, 3])[:8] == content_hash(np.array([1, 2, 3], dtype=np.uint16))[:8]
    True
    """
    return hashlib.sha256(np.ascontiguousarray(ids, dtype="<i8").tobytes()).hexdigest()
