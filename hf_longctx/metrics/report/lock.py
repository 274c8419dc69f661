"""The folder of a report is of one model, one text and one set of arguments: arguments.json holds them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


# Names for changes that no argument shows: a name or a file may stand for something else today.
CHANGES = {
    "weights_sha256": "state of the model (its weights or its configuration changed)",
    "corpus_sha256": "text (its content or its tokenizer changed)",
}


def check_unchanged(folder: Path, arguments: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: the folder holds measurements of something else.
    """
    file = folder / "arguments.json"
    if not file.exists() or not begun(folder):
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changes = [CHANGES.get(name, name) for name, value in arguments.items() if before.get(name) != value]
    if changes:
        raise ValueError(
            f"{folder} holds a report with another {' and '.join(changes)}. Take another folder (--output FOLDER)."
        )


def begun(folder: Path) -> bool:
    """Whether anything has been measured: there is a result, or a journal with more than its first line."""
    results = {path.name for path in folder.glob("*.json")} - {"arguments.json"}
    journals = (folder / "unfinished").glob("*.jsonl*")
    return bool(results) or any(journal.read_bytes().count(b"\n") > 1 for journal in journals)


def begin(folder: Path, arguments: dict[str, Any]) -> None:
    """Write down what the folder is a report of."""
    if not begun(folder):  # the journals of a run that failed at once may be of other arguments
        for journal in (folder / "unfinished").glob("*.jsonl*"):
            journal.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")


def absolute(name: str | None) -> str | None:
    """A file or folder by its whole path; any other name as it is."""
    return str(Path(name).resolve()) if name is not None and Path(name).exists() else name
