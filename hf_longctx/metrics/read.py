"""Read saved results of any metric."""

from __future__ import annotations

import json
from pathlib import Path

from . import tasks  # noqa: F401 - registers the results of all tasks
from .result import Result
from .rope import report  # noqa: F401 - registers RopeReport


def read_result(path) -> Result:
    """Read a result from a JSON file of `save`, of `RopeReport.to_json`, or of `evaluate.save` with our modules.

    Raises:
        ValueError: the file is not JSON, or not a result of any metric; the message names the file.
        FileNotFoundError: the file does not exist.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
        for cls in Result.kinds.values():
            if isinstance(document, dict) and cls.mismatch(document) is None:
                return cls.from_json(text)
        raise ValueError(f"expected a result of {', '.join(sorted(Result.kinds))}.")
    except ValueError as error:
        raise ValueError(f"{path} is not a result file of hf-longctx: {error}") from error
