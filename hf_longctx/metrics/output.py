"""Run a measurement so that a partial result can be written after an exception."""

from __future__ import annotations

from collections.abc import Callable

from .result import Result


def run_measurement(measure: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """Call `measure`; return the partial result if an exception ends it.

    Returns:
        the result (None if nothing was measured) and the exception (None if it succeeded). The caller re-raises the
        exception once the result is written.
    """
    try:
        return measure(), None
    except BaseException as error:
        result = getattr(error, "result", None)
        return (result if result is not None and result.measured else None), error
