"""The arguments of a report, kept in arguments.json: its folder is of one model, one text and one set of arguments."""

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
    """Raise ValueError if the folder holds measurements with other arguments."""
    file = folder / "arguments.json"
    if not file.exists() or not has_measurements(folder):
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changes = [CHANGES.get(name, name) for name, value in arguments.items() if before.get(name) != value]
    if changes:
        raise ValueError(
            f"{folder} holds a report with another {' and '.join(changes)}. Take another folder (--output FOLDER)."
        )


def has_measurements(folder: Path) -> bool:
    """Return whether there is a result, or a journal with more than its first line."""
    results = {path.name for path in folder.glob("*.json")} - {"arguments.json"}
    journals = (folder / "unfinished").glob("*.jsonl*")
    return bool(results) or any(journal.read_bytes().count(b"\n") > 1 for journal in journals)


def write_arguments(folder: Path, arguments: dict[str, Any]) -> None:
    """Make the folder, and write down the arguments of its report."""
    if not has_measurements(folder):  # the journals of a run that failed at once may be of other arguments
        for journal in (folder / "unfinished").glob("*.jsonl*"):
            journal.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")
