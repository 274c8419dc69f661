"""The base class of all results: JSON serialization, files, figures and report entries.

The results of tasks subclass `task.TaskResult`. This file does not depend on any model or metric.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self


WRITTEN = ("scripts/results", "model_cards")  # folders with results; changes in these folders do not count as "-dirty"


class Number(NamedTuple):
    """A headline number of a result, for reports, model cards and lm-eval.

    Attributes:
        metric: name of the metric on the Hub, such as "perplexity". Model cards omit a number whose `metric` is empty.
        name: name in words, with the unit.
        value: the number, or a verdict in words.
        low: lower end of the 95 % CI; None if unknown.
        high: upper end of the 95 % CI; None if unknown.
        sample: sample size, such as "10 sequences".
        words: text shown instead of `low` and `high`.
        more_is_better: whether a larger value is better.
    """

    metric: str
    name: str
    value: int | float | str
    low: float | None = None
    high: float | None = None
    sample: str = ""
    words: str = ""
    more_is_better: bool = True

    def interval(self) -> str:
        """Return the interval in words. The string is empty if the interval is unknown.

        >>> Number("", "loss", 3.0, 2.5, 3.5).interval(), Number("", "loss", 3.0).interval()
        ('2.5 to 3.5', '')
        """
        if self.words or self.low is None or self.high is None:
            return self.words
        return f"{rounded(self.low)} to {rounded(self.high)}"


class Table(NamedTuple):
    """A table of numbers, for display."""

    columns: tuple[str, ...]
    rows: list[tuple]


class Result:
    """A measurement and its settings.

    A subclass is a frozen dataclass with a field or property `settings` of plain JSON values. It sets `kind` and
    `title`. It defines the methods in the section "Methods of subclasses".

    Attributes:
        kind: name of the metric in JSON. Classes that set `kind` are registered for `read_result`.
        title: heading of the metric in a report.
        version: version of the JSON format, incremented when the format changes.
        notes: assumptions about the measured model, for readers of the result.
        caveat: limitations of the metric.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[int] = 1
    kinds: ClassVar[dict[str, type[Result]]] = {}
    settings: dict[str, Any]
    notes: Sequence[str] = ()
    caveat: str = ""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "kind" in vars(cls):
            Result.kinds[cls.kind] = cls

    # Methods of subclasses ------------------------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        """Whether the result contains at least one measurement."""
        return True

    def explanation(self) -> str:
        """Return an explanation of the metric, for readers of a report."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return a one-line summary of the result."""
        raise NotImplementedError

    @property
    def passed(self) -> bool | None:
        """Whether the model passes. None if the metric is inconclusive or is not a pass/fail test."""
        return None

    def numbers(self) -> list[Number]:
        """Return the headline numbers. The list is empty if nothing was measured."""
        return []

    def table(self) -> Table:
        """Return the numbers in the figure as a table."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Return the settings, counts and derived numbers as a JSON object. The header is not included."""
        raise NotImplementedError

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Result:
        """Create a result from its `document`. Counts and settings are read, and derived numbers are recomputed."""
        raise NotImplementedError

    def plot(self, path, *, train_length: int | None = None, title: str | None = None, **options) -> None:
        """Save the figure of the result as PNG, SVG or PDF, depending on the extension of `path`.

        Args:
            path: path of the figure.
            train_length: training context in tokens, marked in the figure if an axis shows tokens.
            title: title of the figure (default: the metric and the model).
            options: additional options of the metric.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: nothing was measured, or matplotlib does not support the extension.
        """
        raise NotImplementedError

    def _repr_png_(self) -> bytes | None:
        """Return the figure as a PNG for notebooks. Return None if matplotlib is missing or nothing was measured."""
        try:
            return self.picture("png") if self.measured else None
        except ImportError:
            return None

    def picture(self, extension: str, **options: Any) -> bytes:
        """Return the figure as a file with this extension. `options` are the options of `plot`."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"figure.{extension}"
            self.plot(file, **options)
            return file.read_bytes()

    # Methods of all results -----------------------------------------------------------------------------------------

    @property
    def interruption(self) -> str:
        """Why the measurement was interrupted, as a suffix of the summary. Empty if it was not interrupted."""
        cause = self.settings.get("interrupted")
        return f"; interrupted: {cause}" if cause else ""

    @property
    def model_name(self) -> str:
        """The model's name on the Hub or its folder name; "a model" if unknown."""
        name = str(self.settings.get("model") or "a model").rstrip("/")
        return name if name.count("/") <= 1 and not name.startswith("/") else name.rpartition("/")[2]

    def dataset(self) -> tuple[str, str]:
        """Return the name and the identifier of the evaluation data."""
        if self.settings.get("data_type") == "random":
            return "random tokens", "random-tokens"
        name = str(self.settings.get("corpus", "text"))
        return name, re.sub(r"[^\w./-]+", "-", name.lower())

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy of the result with additional settings."""
        # every subclass is a dataclass, so `replace` is possible
        return replace(self, settings={**self.settings, **settings})  # ty: ignore[invalid-argument-type]

    def to_json(self) -> str:
        """Serialize the header and the `document` as JSON. The same measurement always gives the same string.

        Raises:
            ValueError: a number is NaN or infinite. JSON does not support these values.
        """
        document = {"metric": self.kind, "format": self.version, **self.document()}
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Load the result that `to_json` wrote; see `from_document`.

        Raises:
            ValueError: the JSON is not a result of this class, lacks a field, or has a different format.
        """
        document = json.loads(text)
        metric = document.get("metric") if isinstance(document, dict) else None
        if metric != cls.kind:
            raise ValueError(f'this JSON is not a result of {cls.kind}: its "metric" is {metric!r}.')
        try:
            if document.get("format", 1) != cls.version:
                raise ValueError(
                    f"the format of a {cls.kind} result must be {cls.version}, got {document.get('format', 1)}. Read "
                    "it with the version of hf-longctx that wrote it, or measure again."
                )
            return cls.from_document(document)
        except KeyError as error:
            raise ValueError(f"this {cls.kind} result lacks the field {error}.") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"this {cls.kind} result contains a value of the wrong type ({error}).") from error

    def save(self, path) -> None:
        """Write the result to a JSON file atomically. `read_result` reads the file.

        In addition to `to_json`, the file contains the time (UTC) and the commit of this package.
        """
        path, now = Path(path), datetime.now(UTC).isoformat(timespec="seconds")
        document = {**json.loads(self.to_json()), "saved": {"time": now, "commit": commit(Path(__file__).parents[2])}}
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)


def plural(number: int, unit: str) -> str:
    """Format a count with its unit, in the plural if needed.

    >>> plural(1, "length"), plural(3, "length")
    ('1 length', '3 lengths')
    """
    return f"{number:,} {unit}{'s' * (number != 1)}"


def rounded(value: int | float | str) -> str:
    """Format a float with four significant digits, and any other value in full."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_measurement(measure: Callable[[], Result]) -> tuple[Result | None, BaseException | None]:
    """Run a measurement, and catch its exception if it fails.

    The caller should save the result, and then raise the exception.

    Returns:
        the result and the exception. The result may be partial. It is None if nothing was measured. The exception is
        None if the measurement did not fail.
    """
    try:
        return measure(), None
    except BaseException as error:
        result = getattr(error, "result", None)
        return (result if result is not None and result.measured else None), error


def commit(folder: Path) -> str | None:
    """Return the commit of a git checkout. Return None outside a checkout.

    If tracked files were changed, the commit ends with "-dirty". Changed result files do not count. Otherwise, each
    measurement would mark the next one as "-dirty".
    """
    if not (folder / ".git").exists():  # git also searches the parent folders, and may find another repository
        return None
    git = ["git", "-C", str(folder)]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 10}
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, **options).stdout.strip()
        code = [".", *(f":!{written}" for written in WRITTEN)]
        changed = subprocess.run([*git, "status", "--porcelain", "-uno", "--", *code], check=True, **options).stdout
        return head + "-dirty" * bool(changed)
    except (OSError, subprocess.SubprocessError):
        return None
