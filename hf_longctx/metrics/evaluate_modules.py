"""The modules for the evaluate library: `evaluate.load("forgetting_curve")` after `register()`.

A module is a folder `modules/NAME/NAME.py` with its card, as the Hub keeps it in a Space. evaluate takes one from
three places: a path (`module_path`), a Space, or its own cache. A bare name means a Space of evaluate's organisation,
and where there is none evaluate looks into its cache; so `register` writes one line there, which imports the module.
The line needs no renewal when this package is upgraded.

What the modules share is here too: how `compute` measures a model, and how it scores predictions.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections import defaultdict
from dataclasses import fields
from pathlib import Path

import numpy as np

from .checks import positive_int
from .curve.protocol import default_lengths, scored_tokens
from .curve.result import CurvePoint, ForgettingCurve
from .loss.result import PositionLoss


MODULES = Path(__file__).with_name("modules")
NAMES = ("forgetting_curve", "position_loss", "rope_base_check")
# Keywords of from_pretrained that say which files of a repository are read, by whom, and whether its code may run.
SOURCE = ("revision", "code_revision", "token", "trust_remote_code", "cache_dir", "local_files_only", "subfolder")


def module_path(name: str) -> str:
    """The folder of a module: `evaluate.load(module_path("forgetting_curve"))` needs neither `register` nor a network.

    Raises:
        ValueError: there is no module of that name.
    """
    if name not in NAMES:
        raise ValueError(f"there is no evaluate module {name!r}; there are {', '.join(NAMES)}.")
    return str(MODULES / name)


def register() -> list[Path]:
    """Let `evaluate.load` find our modules by their bare names, in this and all later processes of this user.

    Writes one file for each into evaluate's cache of modules (`HF_MODULES_CACHE`). Calling it again changes nothing.
    Where the Hub is behind a firewall that answers nothing, evaluate itself waits minutes before it looks into its
    cache: set HF_EVALUATE_OFFLINE=1 there, or load by `module_path`.

    Returns:
        the files.

    Raises:
        ImportError: evaluate is not installed.
    """
    try:
        from evaluate.loading import init_dynamic_modules
    except ImportError as error:
        raise ImportError("the evaluate library is missing: pip install 'hf-longctx[metrics]'") from error
    cache = Path(init_dynamic_modules()) / "metrics"  # "metrics" whatever the type of the module
    written = []
    for name in NAMES:
        class_name = name.title().replace("_", "")
        line = f"from {__package__}.modules.{name}.{name} import {class_name}\n"
        file = cache / f"evaluate-metric--{name}" / hashlib.sha256(line.encode()).hexdigest() / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{name}.{os.getpid()}.partial")
        partial.write_text(line)
        partial.replace(file)  # at once, as another process may be loading it; and anew, as evaluate takes the newest
        written.append(file)
    return written


def options_for(name: str, options: dict) -> dict:
    """Those options that `compute` of the module `name` takes beside model, corpus and tokenizer.

    `evaluate.combine` passes every keyword to all its modules, so each ignores those of another.

    Raises:
        TypeError: one of them belongs to no module.
    """
    if not options:  # scoring needs no model's code
        return {}
    names = _option_names()
    unknown = sorted(options.keys() - set().union(*names.values()))
    if unknown:
        takes = ", ".join(["model", "corpus", "tokenizer", *names[name]])
        raise TypeError(
            f"compute() has no argument {', '.join(unknown)}; {name} takes {takes} (what perplexity calls model_id and "
            "data is model and corpus here)."
        )
    return {option: value for option, value in options.items() if option in names[name]}


def measures(module, model, corpus, options: dict, **scored) -> bool:
    """Whether compute() is to measure a model, and not to score what is given as `scored` or was added before.

    Raises:
        ValueError: it is told to do both, or neither, or gets for the one what is for the other.
    """
    names = " and ".join(scored)
    to_score = any(value is not None for value in scored.values()) or len(module) > 0
    if model is not None:
        if to_score:
            raise ValueError(f"compute() takes a model, or {names}, not both.")
        return True
    if corpus is not None or options:
        options = ["corpus"] * (corpus is not None) + list(options)
        raise ValueError(f"{', '.join(options)} came without a model: these are for measuring one, model=...")
    if not to_score:
        raise ValueError(f"compute() has nothing to do: give model=... (and corpus=...), or {names}.")
    return False


def _option_names():
    """The options of each module: keywords of the function that measures, the fields of `Run`, head_dim of bounds."""
    from .curve.measure import forgetting_curve
    from .loss.measure import position_loss
    from .rope.measure import rope_report
    from .run.distributed import Run

    names = {}
    for name, function in zip(NAMES, (forgetting_curve, position_loss, rope_report)):
        keywords = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
        names[name] = [keyword for keyword in keywords if keyword not in ("tokenizer", "run")]
        names[name] += [field.name for field in fields(Run)] if "run" in keywords else []
        names[name].append("model_kwargs")
    names["rope_base_check"].append("head_dim")
    return names


def source_of(model, model_kwargs: dict | None) -> dict:
    """Those of `model_kwargs` that configuration and tokenizer need as well.

    Raises:
        ValueError: there are such keywords, and the model is not given by its name.
        TypeError: they are no dictionary.
    """
    if model_kwargs is not None and not isinstance(model_kwargs, dict):
        raise TypeError(f"model_kwargs is {model_kwargs!r}; it must be a dictionary of keywords of from_pretrained.")
    if model_kwargs and not isinstance(model, str):
        raise ValueError(f"model_kwargs are for a model given by its name, and this one is a {type(model).__name__}.")
    return {key: value for key, value in (model_kwargs or {}).items() if key in SOURCE}


def load(model, corpus=None, tokenizer=None, model_kwargs: dict | None = None):
    """A reader of a model, by name or as an object, and the ids of a corpus.

    Args:
        model: a causal language model, or its name or folder.
        corpus: a text, a list of texts (joined by blank lines), token ids, or None.
        tokenizer: for a text; by default, that of the model's name.
        model_kwargs: keywords of `from_pretrained` for a model given by its name, such as revision, token or
            trust_remote_code, which its tokenizer gets too.

    Returns:
        the reader, the ids (None without a corpus), and the tokenizer (None if the corpus is ids, and none was given).

    Raises:
        ValueError: a text came without a tokenizer.
        TypeError: the model is no model.
    """
    from transformers import AutoTokenizer

    from .run.model import load_language_model
    from .run.reader import reader_for

    name = model if isinstance(model, str) else getattr(getattr(model, "config", None), "_name_or_path", None)
    source = source_of(model, model_kwargs)
    options = {"dtype": "auto", **(model_kwargs or {})}
    reader = reader_for(load_language_model(model, **options) if isinstance(model, str) else model)
    if isinstance(corpus, (list, tuple)) and corpus and isinstance(corpus[0], str):
        corpus = "\n\n".join(corpus)
    if not isinstance(corpus, str):
        return reader, corpus, tokenizer
    if tokenizer is None:
        if not name:
            raise ValueError("corpus is a text, and the model has no name to find a tokenizer by: give tokenizer=...")
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    ids = tokenizer(corpus, add_special_tokens=False, verbose=False)["input_ids"]
    return reader, ids, tokenizer


def complete(options: dict, tokenizer, name: str) -> dict:
    """The keywords for the function that measures: `run` made of its fields, BOS and EOS of the tokenizer where known.

    The journal gets the module's name appended, because `evaluate.combine` passes the same path to all its modules.
    """
    from .run.distributed import Run

    run = {field.name: options[field.name] for field in fields(Run) if field.name in options}
    options = {option: value for option, value in options.items() if option not in run}
    if run.get("journal") is not None:
        run["journal"] = f"{os.fspath(run['journal'])}.{name}"
    for token in ("bos_token_id", "eos_token_id"):
        if token in _option_names()[name] and getattr(tokenizer, token, None) is not None:
            options.setdefault(token, getattr(tokenizer, token))
    return options | {"run": Run(**run)}


# The forgetting curve -----------------------------------------------------------------------------------------------


def score_predictions(predictions, references) -> ForgettingCurve:
    """The curve of greedy predictions that were made elsewhere, by the protocol of `curve`.

    Args:
        predictions: per target S of n tokens a pair [copy, lm]: the ids predicted for the n tokens of the last S in
            `[bos] S [bos] S [eos]` and in `[bos] I [bos] S [eos]`, by teacher forcing. The second half counts.
        references: per target its ids, S. Targets of one length are the repeats of a point.

    Raises:
        ValueError: there is no target, or some row has another form.

    >>> score_predictions([[[9, 5, 6, 7], [9, 5, 0, 7]]], [[4, 5, 6, 7]]).points[0].copy_mean
    1.0
    """
    if len(predictions) != len(references) or not len(references):
        raise ValueError(
            f"got {len(predictions)} predictions for {len(references)} references; there must be one pair of "
            "predictions [copy, lm] for each reference, and at least one."
        )
    counts = defaultdict(lambda: ([], []))
    for i, (pair, target) in enumerate(zip(predictions, references)):
        if len(pair) != 2 or not len(target) or any(len(row) != len(target) for row in pair):
            raise ValueError(
                f"predictions[{i}] has rows of {[len(row) for row in pair]} ids and references[{i}] has {len(target)}; "
                "there must be two rows, [copy, lm], with one predicted id for each id of the target."
            )
        begin = len(target) - scored_tokens(len(target))
        for kind, row in zip(counts[len(target)], pair):
            kind.append(sum(int(a) == int(b) for a, b in zip(row[begin:], target[begin:])))
    return ForgettingCurve([CurvePoint(n, copy, lm) for n, (copy, lm) in sorted(counts.items())])


def measure_curve(
    model, corpus=None, tokenizer=None, *, lengths=None, model_kwargs: dict | None = None, **options
) -> ForgettingCurve:
    """`forgetting_curve` for what `load` takes; the corpus is not used for data_type="random".

    Args:
        lengths: by default, `default_lengths` for the model and the corpus.
        options: of `forgetting_curve`, and the fields of `Run`.
    """
    from .curve.measure import forgetting_curve

    if corpus is None and options.get("data_type", "order") == "order":
        raise ValueError('the forgetting curve needs a text: corpus=..., or random ids: data_type="random".')
    reader, tokens, tokenizer = load(model, corpus, tokenizer, model_kwargs)
    if lengths is None:
        lengths = default_lengths(reader.claimed_context, None if tokens is None else len(tokens))
    options = complete(options, tokenizer, "forgetting_curve")
    return forgetting_curve(reader, tokens, lengths=lengths, tokenizer=tokenizer, **options)


def curve_result(curve: ForgettingCurve) -> dict:
    """A curve in plain JSON types: summary, the paper's lengths, then what `ForgettingCurve.from_json` reads again."""
    fine, coarse = curve.fine_length, curve.coarse_length
    return {
        "summary": curve.summary(),
        "fine_length": int(fine),
        "fine_open_ended": fine.open_ended,
        "coarse_length": int(coarse),
        "coarse_open_ended": coarse.open_ended,
        **json.loads(curve.to_json()),
    }


# The per-token loss -------------------------------------------------------------------------------------------------


def average_log_probs(predictions) -> PositionLoss:
    """The per-token loss of log-probabilities that were computed elsewhere.

    Args:
        predictions: per sequence the log-probability (natural logarithm) that the model gave to each of its tokens,
            the first included; all sequences of one length.

    Raises:
        ValueError: there is no sequence, or their lengths differ, or a number is above 0 or not finite.

    >>> average_log_probs([[-1.0, -0.5], [-2.0, -0.5]]).loss
    (1.5, 0.5)
    """
    lengths = {len(row) for row in predictions}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"the sequences have lengths {sorted(lengths)}; a loss per position needs one or more sequences of one length."
        )
    log_probs = np.asarray(predictions, dtype=np.float64)
    if not (log_probs <= 0).all():  # NaN is not
        raise ValueError("predictions must be natural logarithms of probabilities: none above 0, none NaN.")
    return PositionLoss.of_sequences(-log_probs, {})


def measure_loss(
    model, corpus=None, tokenizer=None, *, context_length=None, model_kwargs: dict | None = None, **options
) -> PositionLoss:
    """`position_loss` for what `load` takes.

    Args:
        context_length: default: the context that the model claims, as far as the corpus reaches.
        options: of `position_loss`, and the fields of `Run`.

    Raises:
        ValueError: there is no corpus.
    """
    from .loss.measure import position_loss

    if corpus is None:
        raise ValueError("the per-token loss needs a text: corpus=...")
    reader, tokens, tokenizer = load(model, corpus, tokenizer, model_kwargs)
    if context_length is None:
        context_length = min(reader.claimed_context or len(tokens), len(tokens))
    options = complete(options, tokenizer, "position_loss")
    return position_loss(reader, tokens, context_length=context_length, tokenizer=tokenizer, **options)


def loss_result(result: PositionLoss) -> dict:
    """A per-token loss in plain JSON types: the perplexity of all tokens, then what `PositionLoss.from_json` reads."""
    perplexity = float(result.perplexity[-1])
    return {"final_perplexity": perplexity, "summary": result.summary(), **json.loads(result.to_json())}


# The RoPE bound -----------------------------------------------------------------------------------------------------


def check_model(model, *, model_kwargs: dict | None = None, **options) -> dict:
    """`rope_report` in plain JSON types, for a model, its configuration, or the name of either.

    `holds` is None where the bound is inconclusive, and of a model without RoPE, which may be measured by other
    modules in the same call; a note says so then.
    """
    from .rope.config import NoRopeError
    from .rope.measure import rope_report

    source = source_of(model, model_kwargs)
    if isinstance(model, str):
        from transformers import AutoConfig

        model = AutoConfig.from_pretrained(model, **source)
    try:
        return rope_report(model, **options).to_dict()
    except NoRopeError as error:
        return {"verdict": "no RoPE", "holds": None, "groups": [], "notes": [str(error)]}


def check_bases(bases, context_lengths, head_dim: int) -> dict:
    """Whether RoPE bases satisfy B_m >= 0 for m = 0 .. context length - 1 (arXiv 2405.14591, eq. 17 and 18).

    Args:
        bases: RoPE bases (rope_theta).
        context_lengths: as many contexts, in tokens.
        head_dim: dimensions of a query or key head, all of them rotating.

    Returns:
        plain JSON types: `holds`, the share of pairs that do, and per pair `verdicts`, `context_bounds` (how far the
        base reaches; None if it never ends), `minimum_bases` (the smallest base for the context, above which others
        may fail) and `settled_bases` (above which none does, as far as 16 times the minimum; None if some does there).

    Raises:
        ValueError: a number is out of its range, or the lists differ in length.
    """
    from .rope.base import rope_base_bound
    from .rope.bounds import rope_context_bound

    if len(bases) != len(context_lengths) or not len(bases):
        raise ValueError(
            f"got {len(bases)} bases for {len(context_lengths)} contexts; need as many, and at least one."
        )
    context_lengths = [positive_int("a context", n, 2) for n in context_lengths]
    bounds = [rope_context_bound(base=float(base), head_dim=head_dim) for base in bases]
    base_bounds = {n: rope_base_bound(int(n) - 1, head_dim) for n in set(context_lengths)}
    holds = [bound is None or bound >= n - 1 for bound, n in zip(bounds, context_lengths)]
    return {
        "holds": sum(holds) / len(holds),
        "verdicts": ["holds" if good else "violated" for good in holds],
        "context_bounds": [None if bound is None else int(bound) for bound in bounds],
        "minimum_bases": [base_bounds[n].base for n in context_lengths],
        "settled_bases": [base_bounds[n].settled_base for n in context_lengths],
        "head_dim": head_dim,
    }
