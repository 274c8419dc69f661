"""Run a measurement and write its result, also that of a measurement which an exception ended early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .result import Result, writing


def run_measurement(measure: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """Call `measure`, and keep what it had measured if an exception ends it.

    Returns:
        the result, None if nothing was measured, and the exception, None if there was none. The caller raises it
        again once the result is written.
    """
    try:
        return measure(), None
    except BaseException as error:
        result = getattr(error, "result", None)
        return (result if result is not None and result.measured else None), error


def write_picture(result: Result, path: Path, **options: Any) -> None:
    """Draw a result into a file, which is removed if the disk is full.

    Args:
        options: those of the result's `plot`.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    with writing(path):
        result.plot(path, **options)
