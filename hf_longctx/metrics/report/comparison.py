"""Compare several models on one metric in a figure or a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from .. import style
from ..curve.lengths import METHODS
from ..curve.plot import logarithmic
from ..task import TaskResult
from ..tasks.curve import ForgettingCurve
from ..tasks.loss import PositionLoss, draw_losses
from .effective import effective_rows
from .paired import conclusion, paired_differences, unpaired_conclusion
from .units import interval_in_bytes, sizes_in_bytes


def compare(results: Mapping[str, Any], path: str | PathLike, *, title: str | None = None) -> str:
    """Compare the results of several models, and write a figure or a Markdown file.

    Args:
        results: results of one metric, keyed by model name. The metric is `curve`, `loss`, or any metric that counts
            correct answers by length.
        path: output file. A PNG, SVG or PDF contains the figure. A Markdown file (.md) contains the title and the
            returned text.
        title: title of the figure or the Markdown file (default: name of the metric).

    Returns:
        Markdown text: a comparison in sentences, a table of the results, warnings about settings that differ, paired
        tests, and effective lengths under three rules.

    Raises:
        ValueError: a result is empty, the results are from different metrics, or the metric cannot be compared.
        ImportError: matplotlib is missing.
    """
    kinds = {type(result) for result in results.values()}
    if len(kinds) != 1 or not issubclass(next(iter(kinds)), TaskResult):
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
        raise ValueError(f"`results` must be from one metric (curve, loss, needle or lines), got {names}.")
    check_measured(results)
    first = next(iter(results.values()))
    conclusions, tests = paired_text(results)
    text = "\n\n".join([*conclusions, table(results)])
    text += "".join(f"\nDifferent: {difference}.\n" for difference in differences(results)) + tests
    if not isinstance(first, PositionLoss):
        columns, rows, unknown = effective_rows(results)
        text += "".join([f"\n{markdown(columns, rows)}" * bool(rows), *(f"\n{sentence}\n" for sentence in unknown)])
    if Path(path).suffix == ".md":
        Path(path).write_text(f"# {title or first.title}\n\n{text}", encoding="utf-8")
    else:
        plot_comparison(results, path, title=title)
    return text


def table(results: Mapping[str, Any]) -> str:
    """Return the results of several models as a Markdown table."""
    first = next(iter(results.values()))
    if isinstance(first, ForgettingCurve):
        return comparison_table(results)
    if isinstance(first, PositionLoss):
        return loss_table(results)
    shares = {name: shares_by_length(result) for name, result in results.items()}
    lengths = sorted(set().union(*shares.values()))
    rows = [(name, *(f"{row[n]:.1%}" if n in row else "-" for n in lengths)) for name, row in shares.items()]
    columns, sizes = ("model", *(f"{n} {first.size_unit}" for n in lengths)), sizes_in_bytes(results)
    if sizes:
        columns, rows = (*columns, "bytes per token"), [(*row, sizes[row[0]]) for row in rows]
    return markdown(columns, rows)


def paired_text(results: Mapping[str, TaskResult]) -> tuple[list[str], str]:
    """Describe the paired tests of each model against the first model, in sentences and Markdown tables."""
    (name, first), *others = results.items()
    said, text = [], ""
    for other, second in others:
        try:
            differences = paired_differences(first, second)
        except ValueError as error:
            said.append(unpaired_conclusion(name, other, first, second))
            text += f"\nNot tested length by length, {other} against {name}: {error}\n"
            continue
        said.append(conclusion(name, other, first, second, differences))
        columns = (first.size_unit, name, other, "difference", "95 % CI", "p", "p (Holm)", "pairs")
        rows = [
            (
                *("mean" if d.length is None else d.length, f"{d.first:.1%}", f"{d.second:.1%}"),
                f"{d.second - d.first:+.1%}",
                "-" if d.low == -np.inf else f"{d.low:+.1%} to {d.high:+.1%}",
                *(f"{d.p:.2g}", f"{d.holm:.2g}", d.pairs),
            )
            for d in differences
        ]
        text += f"\n{markdown(columns, rows)}"
    return [sentence for sentence in said if sentence], text


def check_measured(results: Mapping[str, TaskResult]) -> None:
    """If there are no results, or a result does not contain measurements, raise ValueError."""
    empty = [name for name, result in results.items() if not result.measured]
    if empty or not results:
        raise ValueError(f"`results` must contain measurements, got none from {', '.join(empty) or 'an empty list'}.")


def named(results: Sequence[tuple[Path, Any]]) -> dict[str, Any]:
    """Return results keyed by model name, without the namespace. For a single model, use the names of its caches.

    If several results have the same model name, we append the file name to each of these names. If a result does not
    contain the name of its model, we use the file name.
    """
    names = [
        result.model_name.rpartition("/")[2] if result.settings.get("model") else path.stem or "a model"
        for path, result in results
    ]
    caches = [result.settings.get("cache") for _, result in results]
    if any(caches):
        one_model = len(set(names)) == 1
        names = [
            cache or "full" if one_model else f"{name}, {cache}" if cache else name
            for name, cache in zip(names, caches)
        ]
    unique = {}
    for name, (path, result) in zip(names, results):
        key = name if names.count(name) == 1 else f"{name} ({path.stem or result.model_name})"
        while key in unique:
            key += "'"
        unique[key] = result
    return unique


def conditions(result: TaskResult) -> dict[str, str]:
    """Return the settings of a result that must be equal in a fair comparison. Names of files are no evidence."""
    names = {"data_type": "data", "protocol": "protocols"}
    same = {words: result.settings[name] for name, words in names.items() if name in result.settings}
    same["caches"] = result.settings.get("cache", "full")
    return same | result.extent()


def differences(results: Mapping[str, TaskResult]) -> list[str]:
    """List the settings that differ between the results of several models.

    >>> def curve(data):
    ...     return PositionLoss.of_mean([1.0], 4, {"data_type": data, "tokenizer": "models/" + data})
    >>> differences({"fox": curve("order"), "llama": curve("random")})
    ['data (order, random)', 'tokenizers with tokens of different sizes (order, random)']
    """
    values: dict[str, dict[str, None]] = {}  # values of each setting; the inner dictionary serves as an ordered set
    for result in results.values():
        for words, value in conditions(result).items():
            values.setdefault(words, {})[value] = None
    data = {"data": values.pop("data", {})}
    found = {**data, **different_sources([*results.values()]), **values}
    return [f"{words} ({', '.join(several)})" for words, several in found.items() if len(several) > 1]


def different_sources(results: Sequence[TaskResult]) -> dict[str, dict[str, None]]:
    """Return the names of corpora and tokenizers that differ, in dictionaries that serve as ordered sets.

    Hashes take precedence over names. The hash of a corpus is that of its token ids, so if the tokenizers differ, it
    does not show whether the corpora differ.
    """
    found = {}
    texts, tokenizers = ([Source.of(result, name) for result in results] for name in ("corpus", "tokenizer"))
    unknown = any(tokenizer.sha256 is None for tokenizer in tokenizers)
    different = distinct(tokenizers, "sha256") > 1 or (unknown and distinct(tokenizers, "label") > 1)
    if distinct(texts, "label") > 1:
        found["texts"] = dict.fromkeys(text.label for text in texts if text.label)
    elif distinct(texts, "sha256") > 1 and not different:
        found["texts or tokenizers" if unknown else "texts"] = dict.fromkeys(text.marked for text in texts)
    if different and not all(results[0].same_tokens(result) for result in results):
        label = "label" if distinct(tokenizers, "label") > 1 else "marked"
        names = dict.fromkeys(getattr(tokenizer, label) for tokenizer in tokenizers if tokenizer.label)
        found["tokenizers with tokens of different sizes"] = names
    return found


class Source(NamedTuple):
    """The corpus or tokenizer of a result. `label` is its name, or the first digits of its hash."""

    label: str
    sha256: str | None

    @classmethod
    def of(cls, result: TaskResult, name: str) -> Source:
        sha256 = result.settings.get(f"{name}_sha256")
        return cls(PurePath(result.settings.get(name) or (sha256 or "")[:8]).name, sha256)

    @property
    def marked(self) -> str:
        """The label, with the first digits of the hash if they are known."""
        return f"{self.label} {self.sha256[:8]}" if self.sha256 and self.label != self.sha256[:8] else self.label


def distinct(sources: Sequence[Source], name: str) -> int:
    """Return the number of distinct values of an attribute. Unknown values are ignored."""
    return len({getattr(source, name) for source in sources} - {None, ""})


def markdown(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Format a Markdown table. Vertical bars in its cells are escaped."""
    lines = [[str(cell).replace("|", r"\|") for cell in row] for row in (columns, *rows)]
    header, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([header, "|---" * len(lines[0]) + "|", *body]) + "\n"


def comparison_table(curves: Mapping[str, ForgettingCurve]) -> str:
    """Return the memory lengths of several models in tokens, and in bytes if their tokens differ, as a Markdown table.

    Raises:
        ValueError: `curves` is empty, or a curve does not contain points.
    """
    check_measured(curves)
    rows = []
    sizes = sizes_in_bytes(curves)
    for name, curve in curves.items():
        row = {"model": name, "data": curve.settings.get("data_type", "-")}
        row |= {f"{method}, 95 % CI": curve.interval(method).in_words() for method in METHODS}
        if sizes:
            row |= {f"{method} in bytes": interval_in_bytes(curve.interval(method), sizes[name]) for method in METHODS}
        row["paper's fine, coarse"] = f"{curve.fine_length}, {curve.coarse_length}"
        row["measured"] = f"{curve.points[0].length} to {curve.points[-1].length}"
        row["training context"] = curve.settings.get("train_length", "-")
        row["bytes per token"] = curve.settings.get("bytes_per_token", "-")
        rows.append(row)
    return markdown(list(rows[0]), [row.values() for row in rows])


def loss_table(losses: Mapping[str, PositionLoss]) -> str:
    """Return a Markdown table of the smoothed per-token losses of several models, in nats with standard errors."""
    sizes = sizes_in_bytes(losses)
    columns = ("model", "loss in the middle", "loss at the end", "perplexity", "tokens")
    columns = (*columns, *["bytes"] * bool(sizes), "sequences")
    rows = [
        (
            *(name, loss.smoothed_at(loss.context_length // 2 + 1), loss.smoothed_at(loss.context_length)),
            *(f"{loss.perplexity[-1]:.2f}", loss.context_length),
            *([round(loss.context_length * sizes[name])] if sizes else []),
            loss.sequences,
        )
        for name, loss in losses.items()
    ]
    return markdown(columns, rows)


def shares_by_length(result: TaskResult) -> dict[int, float]:
    """Return the mean share of correct answers by length."""
    return {at.length: float(at.shares.mean()) for at in result.by_length(overlapping=True)}


def plot_comparison(results: Mapping[str, Any], path: str | PathLike, *, title: str | None = None) -> None:
    """Plot the share of correct answers by length, or the loss by position, for several models.

    The figure lists the settings that differ. If the tokens differ, lengths are in bytes. For forgetting curves,
    dotted lines show the LM accuracy. Vertical lines mark the length at which an input fills the training context of
    the model.

    Args:
        results: results of one metric, keyed by model name.
        path: path of a PNG, SVG or PDF.
        title: title of the figure (default: name of the metric).

    Raises:
        ImportError: matplotlib is missing.
        ValueError: matplotlib does not support the extension.
    """
    first: Any = next(iter(results.values()))
    different, title = differences(results), title or first.title
    if isinstance(first, PositionLoss):
        figure = style.figure(*first.inches)
        losses = [loss.with_settings(model=name) for name, loss in results.items()]
        draw_losses(figure, losses, title, differences=different)
        style.save(figure, path)
        return
    figure = style.figure(style.WIDTH, 4.6)
    axes = figure.add_subplot()
    shares = {name: shares_by_length(result) for name, result in results.items()}
    sizes = sizes_in_bytes(results) if first.size_unit == "tokens" else None
    unit = "bytes" if sizes else first.size_unit
    if sizes:
        shares = {name: {n * sizes[name]: share for n, share in row.items()} for name, row in shares.items()}
    across, up = f"length of the prompt ({unit})", "questions answered"
    for name, colour, marker in zip(results, cycle(style.MODELS), cycle(style.MARKERS)):
        line: dict[str, Any] = dict(color=colour, marker=marker, label=style.literal(name))
        axes.plot([*shares[name]], [*shares[name].values()], **line)
        if isinstance(first, ForgettingCurve):
            curve = results[name]
            axes.plot([*shares[name]], [p.lm_mean for p in curve.points], color=colour, linewidth=1, linestyle=":")
            filled = (curve.settings.get("train_length", 0) - 3) / 2
            if 0 < filled <= curve.points[-1].length:
                axes.axvline(filled * (sizes[name] if sizes else 1), color=colour, linewidth=1, linestyle="--")
    if isinstance(first, ForgettingCurve):
        across, up = f"length of the passage to copy ({unit})", "tokens copied correctly"
        style.small_print(figure, "dotted: LM accuracy", "dashed: both readings fill the training context")
    style.percent_axis(axes)
    style.grid(axes)
    if all(logarithmic([*row]) for row in shares.values()):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({n for row in shares.values() for n in row}))
    axes.xaxis.set_major_formatter(style.TOKENS)
    style.strip_frame(axes, across, up)
    axes.minorticks_off()
    style.name_differences(axes, different)
    style.titled_legend(figure, axes.get_legend_handles_labels()[0], title)
    style.save(figure, path)
