"""The base class of all results: their JSON texts, files, figures and what a report says about them.

The result of a task is a `task.TaskResult`. This file knows no model and no metric.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self


WRITTEN = ("scripts/results", "model_cards")  # by measurements


class Number(NamedTuple):
    """A headline number of a result: a row of a report, an entry of a model card, a metric in lm-eval.

    Attributes:
        metric: name of the metric on the Hub, such as "perplexity"; empty if the number is not for a model card.
        name: name in words, with the unit.
        value: number, or a verdict.
        low: lower end of the 95 % CI; None if it is not known.
        high: upper end.
        sample: sample size, such as "10 sequences".
        words: value and interval in words, where numbers do not suffice.
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
    """The numbers of a result, as strings and numbers to show."""

    columns: tuple[str, ...]
    rows: list[tuple]


class Result:
    """A measurement and its settings.

    A subclass is a frozen dataclass with a field or property `settings`, in plain JSON values. It sets `kind` and
    `title` and defines the methods of the first part.

    Attributes:
        kind: name of the metric in JSON; registers the class for `read_result`.
        title: heading of the metric in a report.
        version: version of the JSON format; raised when the format changes.
    """

    kind: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[int] = 1
    kinds: ClassVar[dict[str, type[Result]]] = {}
    settings: dict[str, Any]

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
    def holds(self) -> bool | None:
        """Return whether the model passes; None if the metric has nothing to pass, or cannot tell."""
        return None

    def numbers(self) -> list[Number]:
        """Return the headline numbers; an empty list if nothing was measured."""
        return []

    def remarks(self) -> list[str]:
        """Return the assumptions and limits that a reader of the result should know."""
        return []

    def table(self) -> Table:
        """Return the numbers behind the figure."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Return the JSON object without its header: settings, counts, and the numbers that follow from them."""
        raise NotImplementedError

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Result:
        """Return the result with this `document`. Only counts and settings are read; the rest follows from them."""
        raise NotImplementedError

    def plot(self, path, *, train_length: int | None = None, title: str | None = None, **options) -> None:
        """Draw the result into a PNG, SVG or PDF, by the extension of `path`.

        Args:
            path: the file to write.
            train_length: context length of the model's training, in tokens, marked where the figure has tokens on an
                axis.
            title: title of the figure (default: the metric and the model).
            options: options of the metric's figure.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: nothing was measured, or matplotlib does not know the extension.
        """
        raise NotImplementedError

    # In a notebook ------------------------------------------------------------------------------------------------

    def _repr_png_(self) -> bytes | None:
        """Return the figure; None without matplotlib, or if nothing was measured."""
        if not self.measured:
            return None
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "figure.png"
            try:
                self.plot(file)
            except ImportError:
                return None
            return file.read_bytes()

    def _repr_html_(self) -> str:
        """Return title, summary and figure, with the numbers folded away."""
        columns, rows = self.table() if self.measured else ((), [])
        cells = [("th", columns), *(("td", row) for row in rows)]
        table = "".join(
            f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in row)}</tr>" for tag, row in cells
        )
        png = self._repr_png_()
        figure = png and f'<img width="640" alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
        return (
            f"<p><b>{html.escape(self.title)}</b><br>{html.escape(self.summary())}</p>{figure or ''}"
            f"<details><summary>Numbers</summary><table>{table}</table></details>"
        )

    # What all results have in common --------------------------------------------------------------------------------

    @property
    def interruption(self) -> str:
        """Return the part of a summary about what ended the measurement early; empty if nothing did."""
        cause = self.settings.get("interrupted")
        return f"; interrupted: {cause}" if cause else ""

    @property
    def model_name(self) -> str:
        """Return the model's name on the Hub, the last part of its folder, or "a model"."""
        name = str(self.settings.get("model") or "a model").rstrip("/")
        return name if name.count("/") <= 1 and not name.startswith("/") else name.rpartition("/")[2]

    def dataset(self) -> tuple[str, str]:
        """Return name and identifier of the data that the model was measured on."""
        if self.settings.get("data_type") == "random":
            return "random tokens", "random-tokens"
        name = str(self.settings.get("corpus", "text"))
        return name, re.sub(r"[^\w./-]+", "-", name.lower())

    def with_settings(self, **settings: Any) -> Self:
        """Return a copy with more settings."""
        # every subclass is a dataclass
        return replace(self, settings={**self.settings, **settings})  # ty: ignore[invalid-argument-type]

    @classmethod
    def mismatch(cls, document: dict[str, Any]) -> str | None:
        """Return why a JSON object is not a result of this class; None if it is one."""
        metric = document.get("metric")
        return None if metric == cls.kind else f'this JSON is not a result of {cls.kind}: its "metric" is {metric!r}.'

    def to_json(self) -> str:
        """Return header and `document` as a JSON text. The same measurement gives the same text.

        Raises:
            ValueError: a number is NaN or infinite, which JSON does not have.
        """
        document = {"metric": self.kind, "format": self.version, **self.document()}
        return json.dumps(document, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Return the result that `to_json` wrote; see `from_document`.

        Raises:
            ValueError: the text is not a result of this class, lacks something, or has a newer format.
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
        """Write `to_json()` to a file, which appears when it is complete; `read_result` reads it.

        The file also says when it was saved (UTC), and by which commit of this package. The text does not, so that the
        same measurement gives the same text.
        """
        path, now = Path(path), datetime.now(UTC).isoformat(timespec="seconds")
        document = {**json.loads(self.to_json()), "saved": {"time": now, "commit": commit(Path(__file__).parents[2])}}
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        with writing(partial):
            partial.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
            partial.replace(path)


def plural(number: int, unit: str) -> str:
    """Write a count of something.

    >>> plural(1, "length"), plural(3, "length")
    ('1 length', '3 lengths')
    """
    return f"{number:,} {unit}{'s' * (number != 1)}"


def rounded(value: int | float | str) -> str:
    """Write a number to show: four digits, or all of an integer."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name the file in an OSError, such as a full disk, and remove the part that was written."""
    try:
        yield
    except OSError as error:
        path.unlink(missing_ok=True)
        error.filename = error.filename or str(path)
        raise


def commit(folder: Path) -> str | None:
    """Return the commit of a git checkout, "-dirty" after it if tracked files were changed; None elsewhere.

    Files that measurements write do not count: otherwise the second of two measurements would be "-dirty".
    """
    if not (folder / ".git").exists():  # installed, perhaps within the repository of something else
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
