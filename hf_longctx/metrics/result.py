"""The base class of all results: JSON serialization, files, figures and report entries.

The result of a task is a `task.TaskResult`. This file does not depend on any model or metric.
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


WRITTEN = ("scripts/results", "model_cards")  # folders that measurements write to


class Number(NamedTuple):
    """A headline number of a result: a row of a report, an entry of a model card, a metric in lm-eval.

    Attributes:
        metric: name of the metric on the Hub, such as "perplexity"; empty to omit the number from model cards.
        name: name in words, with the unit.
        value: number, or a verdict.
        low: lower end of the 95 % CI; None if it is not known.
        high: upper end of the 95 % CI; None if it is not known.
        sample: sample size, such as "10 sequences".
        words: value and interval in words, if numbers do not suffice.
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
        """Return the interval in words; empty if it is not known.

        >>> Number("", "loss", 3.0, 2.5, 3.5).interval(), Number("", "loss", 3.0).interval()
        ('2.5 to 3.5', '')
        """
        if self.words or self.low is None or self.high is None:
            return self.words
        return f"{rounded(self.low)} to {rounded(self.high)}"


class Table(NamedTuple):
    """The numbers of a result as a table to display."""

    columns: tuple[str, ...]
    rows: list[tuple]


class Result:
    """A measurement and its settings.

    A subclass is a frozen dataclass with a field or property `settings` of plain JSON values. It sets `kind` and
    `title`, and defines the methods of the first section.

    Attributes:
        kind: name of the metric in JSON; registers the class for `read_result`.
        title: heading of the metric in a report.
        version: version of the JSON format, incremented when the format changes.
        notes: assumptions about this model that a reader of the result should know.
        caveat: limits of the metric.
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

    # What a subclass defines ----------------------------------------------------------------------------------------

    @property
    def measured(self) -> bool:
        """Return whether anything was measured."""
        return True

    def explanation(self) -> str:
        """Explain the metric, for readers of a report."""
        raise NotImplementedError

    def summary(self) -> str:
        """Return the result in one line."""
        raise NotImplementedError

    @property
    def passed(self) -> bool | None:
        """Return whether the model passes; None if the metric is not pass/fail, or is inconclusive."""
        return None

    def numbers(self) -> list[Number]:
        """Return the headline numbers; an empty list if nothing was measured."""
        return []

    def table(self) -> Table:
        """Return the numbers behind the figure."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Return the JSON object without its header: settings, counts, and the numbers derived from them."""
        raise NotImplementedError

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Result:
        """Return the result with this `document`. It reads counts and settings only, and derives the other numbers."""
        raise NotImplementedError

    def plot(self, path, *, train_length: int | None = None, title: str | None = None, **options) -> None:
        """Draw the result as a PNG, SVG or PDF, depending on the extension of `path`.

        Args:
            path: path of the figure.
            train_length: training context in tokens, marked if an axis of the figure shows tokens.
            title: title of the figure (default: the metric and the model).
            options: options of the metric's figure.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: nothing was measured, or matplotlib does not support the extension.
        """
        raise NotImplementedError

    def _repr_png_(self) -> bytes | None:
        """Return the figure, for notebooks; None if matplotlib is missing or nothing was measured."""
        if not self.measured:
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figure.png"
            try:
                self.plot(file)
            except ImportError:
                return None
            return file.read_bytes()

    # What all results have in common --------------------------------------------------------------------------------

    @property
    def interruption(self) -> str:
        """Describe what interrupted the measurement, for a summary; empty if nothing did."""
        cause = self.settings.get("interrupted")
        return f"; interrupted: {cause}" if cause else ""

    @property
    def model_name(self) -> str:
        """Return the model's name on the Hub, the last component of its folder, or "a model"."""
        name = str(self.settings.get("model") or "a model").rstrip("/")
        return name if name.count("/") <= 1 and not name.startswith("/") else name.rpartition("/")[2]

    def dataset(self) -> tuple[str, str]:
        """Return name and identifier of the evaluation data."""
        if self.settings.get("data_type") == "random":
            return "random tokens", "random-tokens"
        name = str(self.settings.get("corpus", "text"))
        return name, re.sub(r"[^\w./-]+", "-", name.lower())

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy with additional settings."""
        # every subclass is a dataclass
        return replace(self, settings={**self.settings, **settings})  # ty: ignore[invalid-argument-type]

    @classmethod
    def mismatch(cls, document: dict[str, Any]) -> str | None:
        """Return why a JSON object is not a result of this class; None if it is one."""
        metric = document.get("metric")
        return None if metric == cls.kind else f'this JSON is not a result of {cls.kind}: its "metric" is {metric!r}.'

    def to_json(self) -> str:
        """Serialize header and `document` as JSON. The same measurement gives the same string.

        Raises:
            ValueError: a number is NaN or infinite, which JSON does not support.
        """
        document = {"metric": self.kind, "format": self.version, **self.document()}
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Load the result that `to_json` wrote; see `from_document`.

        Raises:
            ValueError: the JSON is not a result of this class, misses a field, or has a newer format.
        """
        document = json.loads(text)
        mismatch = cls.mismatch(document if isinstance(document, dict) else {})
        if mismatch:
            raise ValueError(mismatch)
        try:
            if document.get("format", 1) != cls.version:
                raise ValueError(
                    f"the format of a result of {cls.kind} must be {cls.version}, got {document.get('format', 1)}. Read it "
                    "with the version of hf-longctx that wrote it, or measure again."
                )
            return cls.from_document(document)
        except KeyError as error:
            raise ValueError(f"this result of {cls.kind} lacks {error}.") from error
        except (TypeError, AttributeError) as error:
            raise ValueError(f"a value in this result of {cls.kind} has the wrong type ({error}).") from error

    def save(self, path) -> None:
        """Write `to_json()` to a file atomically; `read_result` reads it.

        The file also records the time (UTC) and the commit of this package. `to_json` does not, so that the same
        measurement gives the same string.
        """
        path, now = Path(path), datetime.now(UTC).isoformat(timespec="seconds")
        document = {**json.loads(self.to_json()), "saved": {"time": now, "commit": commit(Path(__file__).parents[2])}}
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)


def plural(number: int, unit: str) -> str:
    """Format a count with its unit.

    >>> plural(1, "length"), plural(3, "length")
    ('1 length', '3 lengths')
    """
    return f"{number:,} {unit}{'s' * (number != 1)}"


def rounded(value: int | float | str) -> str:
    """Format a number to four digits, or an integer in full."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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


def commit(folder: Path) -> str | None:
    """Return the commit of a git checkout, with "-dirty" if tracked files were changed; None outside a checkout.

    Files that measurements write are ignored: otherwise the second of two measurements would be "-dirty".
    """
    if not (folder / ".git").exists():  # an installed package may lie within an unrelated repository
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
