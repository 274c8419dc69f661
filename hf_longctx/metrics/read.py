"""Read saved results of any metric."""

from __future__ import annotations

import json
from pathlib import Path

from . import tasks  # noqa: F401 - importing `tasks` registers the results of all tasks
from .result import Result
from .rope import report  # noqa: F401 - importing `report` registers RopeReport


def read_result(path) -> Result:
    """Read a result from a JSON file written by `Result.save`, or by `evaluate.save` with one of our modules.

    Raises:
        ValueError: the file is not JSON, or is not a result of a metric of this package.
        FileNotFoundError: the file does not exist.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text)
        for kind, cls in Result.kinds.items():
            if isinstance(document, dict) and document.get("metric") == kind:
                return cls.from_json(text)
        raise ValueError(f'"metric" must be one of {", ".join(sorted(Result.kinds))}.')
    except ValueError as error:
        raise ValueError(f"{path} is not a result file of hf-longctx: {error}") from error
