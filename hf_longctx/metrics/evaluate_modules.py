"""Implement and register our modules for the evaluate library.

A module is a folder with a script `modules/NAME/NAME.py` and a card, as in a Hub Space. evaluate loads modules from a
path (`module_path`), a Space, or its own cache. For a name without a namespace, evaluate first searches its own
organization on the Hub, and then its cache. `register` writes small files to this cache. These files only import
the modules, so they remain valid when this package is upgraded.

The `compute` method of a module measures a model or scores given predictions, using the functions in this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..tokenization import encode_text
from .checks import as_int
from .curve.lengths import METHODS, CurvePoint
from .curve.protocol import scored_tokens
from .tasks.curve import ForgettingCurve


MODULES = Path(__file__).with_name("modules")
NAMES = ("forgetting_curve", "rope_base_check")


def module_path(name: str) -> str:
    """Return the folder of a module. `evaluate.load(module_path(NAME))` works offline and without `register`.

    Raises:
        ValueError: there is no module of this name.
    """
    if name not in NAMES:
        raise ValueError(f"the evaluate module must be one of {', '.join(NAMES)}, got {name!r}.")
    return str(MODULES / name)


def register() -> list[Path]:
    """Register our modules, so that `evaluate.load` finds them by name in this and all later processes.

    We write one file per module into evaluate's module cache (`HF_MODULES_CACHE`). Calling this function again is
    safe. If a firewall drops requests to the Hub, evaluate waits minutes before it searches its cache. In this case,
    set HF_EVALUATE_OFFLINE=1, or load the module from its `module_path`.

    Returns:
        paths of the written files.

    Raises:
        ImportError: evaluate is not installed.
    """
    try:
        from evaluate.loading import init_dynamic_modules
    except ImportError as error:
        raise ImportError("evaluate is not installed. Run: pip install 'hf-longctx[metrics]'") from error
    cache = Path(init_dynamic_modules()) / "metrics"  # evaluate stores modules of all types under "metrics"
    written = []
    for name in NAMES:
        class_name = name.title().replace("_", "")
        line = f"from {__package__}.modules.{name}.{name} import {class_name}\n"
        file = cache / f"evaluate-metric--{name}" / hashlib.sha256(line.encode()).hexdigest() / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{name}.{os.getpid()}.partial")
        partial.write_text(line)
        partial.replace(file)  # written atomically; rewritten each time, because evaluate loads the newest file
        written.append(file)
    return written


# The arguments of compute -------------------------------------------------------------------------------------------


def measures(module: Any, model: Any, *scored: Any) -> bool:
    """Return True if `compute` measures a model, and False if it scores predictions.

    Raises:
        ValueError: `compute` got both a model and predictions, or neither.
    """
    if (model is not None) == (len(module) > 0 or any(rows is not None for rows in scored)):
        got = "neither" if model is None else "both"
        raise ValueError(f"compute() takes either a model, or predictions and references, got {got}.")
    return model is not None


def read_text(corpus: str | os.PathLike | Sequence[str]) -> str:
    """Return the text of a corpus.

    Args:
        corpus: one of: a document; a list of documents; the path of a text file. Documents are joined by blank lines.

    Raises:
        ValueError: the path is not a plain text file.
    """
    if not isinstance(corpus, str | os.PathLike):
        return "\n\n".join(corpus)
    is_file = os.path.isfile(corpus)
    if not (is_file or isinstance(corpus, os.PathLike) or re.fullmatch(r"\S{1,999}\.\w{1,5}", corpus)):
        return str(corpus)
    path = Path(corpus)
    if not is_file or path.suffix in (".json", ".jsonl", ".csv", ".parquet", ".gz"):
        raise ValueError(
            f"corpus must be a document or the path of a plain text file, got {os.fspath(corpus)!r}. Load other "
            "formats with hf_longctx.corpus.load_text(PATH)."
        )
    return path.read_text(encoding="utf-8")


# The forgetting curve -----------------------------------------------------------------------------------------------


def score_predictions(
    predictions: Sequence[Sequence[Sequence[int]]], references: Sequence[Sequence[int]]
) -> ForgettingCurve:
    """Compute a forgetting curve from greedy predictions of another program.

    The program must follow the protocol of `curve`, with teacher forcing.

    Args:
        predictions: a pair [copy, lm] for each target S of n tokens. `copy` contains the n ids predicted for the last
            S in `[bos] S [bos] S [eos]`. `lm` contains the n ids predicted for S in `[bos] I [bos] S [eos]`. Only the
            second half of the ids is scored.
        references: token ids of each target S. Targets of equal length are repeats of the same point.

    Raises:
        ValueError: the lists are empty, or their shapes do not match.

    >>> score_predictions([[[9, 5, 6, 7], [9, 5, 0, 7]]], [[4, 5, 6, 7]]).points[0].copy_mean
    1.0
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(
            "predictions and references must be non-empty and of equal length, got "
            f"{len(predictions)} predictions and {len(references)} references."
        )
    counts = defaultdict(lambda: ([], []))
    for i, (pair, target) in enumerate(zip(predictions, references)):
        if len(pair) != 2 or not len(target) or any(len(row) != len(target) for row in pair):
            raise ValueError(
                f"predictions[{i}] must be two lists [copy, lm] of {len(target)} ids each, got lists of lengths "
                f"{[len(row) for row in pair]}. Each list must be as long as references[{i}]."
            )
        begin = len(target) - scored_tokens(len(target))
        for kind, row in zip(counts[len(target)], pair):
            kind.append(sum(int(a) == int(b) for a, b in zip(row[begin:], target[begin:])))
    return ForgettingCurve.of_points([CurvePoint(n, copy, lm) for n, (copy, lm) in counts.items()])


def measure_curve(
    model: Any,
    *,
    corpus: Any = None,
    tokenizer: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Measure the forgetting curve of a model for `evaluate`.

    Args:
        model: a causal language model, its name, or its folder.
        corpus: one of: a document; a list of documents; the path of a text file; token ids. None for
            data_type="random".
        tokenizer: tokenizer for the corpus, or its name. Default: the model's tokenizer.
        options: keywords of `forgetting_curve`, or fields of `Run`.

    Returns:
        the result as plain JSON types; see `curve_result`.

    Raises:
        ValueError: an argument is invalid, or the tokenizer of a text corpus is missing.
        TypeError: an argument is unknown.
    """
    from transformers import AutoTokenizer

    from . import forgetting_curve
    from .run.model import load_language_model
    from .run.runner import Run

    run = Run(**{field.name: options.pop(field.name) for field in fields(Run) if field.name in options})
    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", None)
    if isinstance(model, str):
        model = load_language_model(model)
    first = corpus[0] if isinstance(corpus, list | tuple) and corpus else corpus
    is_text = isinstance(first, str | os.PathLike)
    tokenizer = name if tokenizer is None and is_text else tokenizer
    if isinstance(tokenizer, str) and tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    if is_text:
        if not callable(tokenizer):
            raise ValueError(
                f"tokenizer must be a tokenizer or the name of a tokenizer, got {tokenizer!r}. Pass the model's tokenizer."
            )
        corpus = encode_text(tokenizer, read_text(corpus))
    return curve_result(forgetting_curve(model, corpus, tokenizer=tokenizer, run=run, **options))


def curve_result(curve: ForgettingCurve) -> dict[str, Any]:
    """Convert a curve to plain JSON types, with a summary, confidence intervals and the paper's memory lengths."""
    fine, coarse = curve.fine_length, curve.coarse_length
    intervals = {
        f"{method}_{end}": getattr(curve.interval(method), end) for method in METHODS for end in ("low", "high")
    }
    names = ("length", "scored_tokens", "copy_correct", "lm_correct", "begin_locs")
    names += ("copied", "copy_worst", "copy_mean", "copy_std", "lm_mean", "lm_std", "p_value")
    lengths = {
        name: {"length": int(length), "open_ended": length.open_ended, "next_tested": length.next_tested}
        for name, length in curve.memory_lengths.items()
    }
    return {
        "summary": curve.summary(),
        **intervals,
        "intervals_95": {method: curve.interval(method)._asdict() for method in METHODS},
        "fine_length": int(fine),
        "fine_open_ended": fine.open_ended,
        "coarse_length": int(coarse),
        "coarse_open_ended": coarse.open_ended,
        "memory_lengths": lengths,
        "points": json.loads(json.dumps([{name: getattr(p, name) for name in names} for p in curve.points])),
        **json.loads(curve.to_json()),
    }


# The RoPE bound -----------------------------------------------------------------------------------------------------


def check_model(model: Any, **options: Any) -> dict[str, Any]:
    """Return the `rope_report` of a model, a config or a name as plain JSON types.

    `holds` is None if the bound is inconclusive. Without RoPE, `holds` is None and a note gives the reason.
    """
    from .rope.config import NoRopeError
    from .rope.report import rope_report

    try:
        return rope_report(model, **options).to_dict()
    except NoRopeError as error:
        return {"verdict": "no RoPE", "holds": None, "groups": [], "notes": [str(error)]}


def check_bases(bases: Sequence[float], context_lengths: Sequence[int], head_dim: int) -> dict[str, Any]:
    """Check whether RoPE bases satisfy B_m >= 0 for m = 0 .. context length - 1 (arXiv 2405.14591, eq. 17 and 18).

    Args:
        bases: RoPE bases (rope_theta) to check.
        context_lengths: context length for each base, in tokens.
        head_dim: number of dimensions of a query or key head. All of them rotate.

    Returns:
        a dictionary of plain JSON types. `holds` is the share of bases that satisfy the bound. These entries are
        lists with one element per base:

        - `verdicts`: "holds" or "violated".
        - `context_bounds`: largest distance that the base supports; None if unlimited.
        - `minimum_bases`: smallest base with three significant digits that satisfies the bound at the context. Some
          larger bases fail.
        - `settled_bases`: smallest base S such that all bases with three significant digits from S to 16 times the
          minimum base satisfy the bound. None if there is no such base.

    Raises:
        ValueError: a number is out of range, or the two lists have different lengths.
    """
    from .rope.bound import rope_base_bound, rope_context_bound

    if len(bases) != len(context_lengths) or not len(bases):
        raise ValueError(
            f"bases and context_lengths must be non-empty and of equal length, got {len(bases)} bases and "
            f"{len(context_lengths)} context lengths."
        )
    context_lengths = [as_int("a context", n, 2) for n in context_lengths]
    bounds = [rope_context_bound(base=float(base), head_dim=head_dim) for base in bases]
    base_bounds = {n: rope_base_bound(n - 1, head_dim) for n in set(context_lengths)}
    holds = [bound is None or bound >= n - 1 for bound, n in zip(bounds, context_lengths)]
    return {
        "holds": sum(holds) / len(holds),
        "verdicts": ["holds" if good else "violated" for good in holds],
        "context_bounds": [None if bound is None else int(bound) for bound in bounds],
        "minimum_bases": [base_bounds[n].base for n in context_lengths],
        "settled_bases": [base_bounds[n].settled_base for n in context_lengths],
        "head_dim": head_dim,
    }
