"""Results in the formats in which others collect evaluations: Every Eval Ever, and the Hub's `.eval_results`.

A score is a number that tables sort by. So the upper end of a length is never a score, only an end of its interval: a
fine length "below 64" is no 64.

Source: https://github.com/evaleval/every_eval_ever (schema 0.3.0), https://huggingface.co/docs/hub/eval-results.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
from scipy.special import stdtrit

from ..curve.lengths import METHODS
from ..curve.result import ForgettingCurve
from ..loss.result import PositionLoss
from ..result import Result, rounded
from ..retrieval.answers import rate_interval
from .effective import effective_length
from .paired import interval
from .scores import by_length, unit


SCHEMA = "0.3.0"
RELATIONSHIPS = ("first_party", "third_party", "collaborative", "other")
TESTED = "tests of the repeats, closed over lengths"


class Score(NamedTuple):
    """A number to export, with what is known of its uncertainty.

    Attributes:
        task: what was measured, such as "copy_accuracy.64".
        metric, words: name of the number, as an identifier and in words.
        unit: of the number.
        value: the number.
        low, high: its interval at 95 %; None where an end is not known.
        method: how the interval was made.
        error: standard error; None if not known.
        samples: texts or questions.
        ends: the least and the largest value that the metric can have.
        lower_is_better: whether less is better.
    """

    task: str
    metric: str
    words: str
    unit: str
    value: float
    low: float | None = None
    high: float | None = None
    method: str = ""
    error: float | None = None
    samples: int | None = None
    ends: tuple[float, float | str] = (0, 1)
    lower_is_better: bool = False


def scores(result: Result) -> list[Score]:
    """Return the numbers of a forgetting curve, per-token loss, needle or line retrieval.

    Raises:
        ValueError: the result is of another metric, or nothing was measured.
    """
    if not result.measured:
        raise ValueError(f"nothing was measured: {result.summary()}")
    if isinstance(result, PositionLoss):
        return loss_scores(result)
    of_lengths = length_scores(result) if isinstance(result, ForgettingCurve) else []
    what = "copy_accuracy" if isinstance(result, ForgettingCurve) else result.kind
    rates = []
    for score in by_length(result):
        n, rate = len(score.shares), float(score.shares.mean())
        low, high, method = *interval(score.shares, 1 / score.questions), "t and sign-flip test over texts"
        if score.questions == 1:
            low, high = rate_interval(rate, n) or (-np.inf, np.inf)
            method = "Wilson"
        ends = (max(low, 0.0), min(high, 1.0)) if low > -np.inf else (None, None)
        error = float(score.shares.std(ddof=1) / n**0.5) if n > 1 else None
        words = f"accuracy at {score.length} {unit(result)}"
        rates.append(Score(f"{what}.{score.length}", "accuracy", words, "proportion", rate, *ends, method, error, n))
    return of_lengths + rates


def length_scores(curve: ForgettingCurve) -> list[Score]:
    """Return the lower ends of the fine, coarse and effective lengths, as far as something is known of them."""
    lengths = {f"{method}_length": (method, *curve.interval(method)[:2]) for method in METHODS}
    effective = effective_length(curve)
    lengths["effective_length"] = ("effective", effective.low, effective.high)
    samples, most = max(p.repeats for p in curve.points), curve.points[-1].length
    return [
        Score(
            *(name, f"hf_longctx.{name}", f"{words} length, 95 % sure to be at least", "tokens"),
            *(low, low if high else None, high),
            *(TESTED, None, samples, (0, most)),
        )
        for name, (words, low, high) in lengths.items()
        if low or high
    ]


def loss_scores(loss: PositionLoss) -> list[Score]:
    """Return the loss at the end of the context, and the perplexity."""
    end, value = loss.context_length, float(loss.smoothed()[-1])
    known: tuple = (None, None, "", None, loss.sequences)
    if loss.error is not None:
        width = float(stdtrit(loss.texts - 1, 0.975) * loss.error[-1])
        known = (value - width, value + width, "t over sequences", float(loss.error[-1]), loss.sequences)
    perplexity = Score(
        f"perplexity.{end}", "perplexity", f"perplexity of {end} tokens", "perplexity", float(loss.perplexity[-1])
    )
    ends: Any = dict(ends=(0, "Infinity"), lower_is_better=True)
    return [
        Score(f"loss.{end}", "hf_longctx.loss", f"loss at {end} tokens", "nats", value, *known)._replace(**ends),
        perplexity._replace(samples=loss.sequences, ends=(1, "Infinity"), lower_is_better=True),
    ]


def texts(values: dict[str, Any]) -> dict[str, str]:
    """Return values as texts, which is all that `additional_details` may hold; without those that are None."""
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in values.items() if v is not None}


def check_model_id(model_id: str) -> str:
    """Return a model's name on the Hub; raise ValueError if it is not one."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model_id):
        raise ValueError(f"{model_id!r} is no name of a model on the Hub; give one, such as alice/fox.")
    return model_id


def every_eval_ever(
    results: Sequence[Result],
    *,
    model_id: str,
    organization: str,
    relationship: str = "other",
    retrieved: datetime,
    measured: datetime | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return one record of Every Eval Ever, schema 0.3.0, and where it belongs in their collection.

    Args:
        results: of one model.
        model_id: its name on the Hub.
        organization: who reports.
        relationship: of the evaluator to the model: "first_party", "third_party", "collaborative" or "other".
        retrieved, measured: when the record was made, and when the model was measured, if that is known.

    Returns:
        the path, data/hf-longctx/DEVELOPER/MODEL/UUID.json, and the JSON object. Every score has its uncertainty, as
        far as the repeats show it.

    Raises:
        ValueError: nothing was measured, or an argument is not as above.
    """
    from ... import __version__

    if relationship not in RELATIONSHIPS:
        raise ValueError(f"relationship must be one of {', '.join(RELATIONSHIPS)}, got {relationship!r}.")
    developer, _, name = check_model_id(model_id).partition("/")
    entries = [entry(result, score) for result in results for score in scores(result)]
    settings = results[0].settings
    stamp = str(int(retrieved.timestamp()))
    versions = settings.get("versions", {})
    served = "endpoint" in settings
    details = {"deployment_type": "unknown" if served else "self_deployed", "model_availability": "unknown"}
    names = ("model", "dtype", "attention", "weights_sha256", "revision", "device")
    details |= texts({key: settings.get(key) for key in names})
    record = {
        "schema_version": SCHEMA,
        "evaluation_id": f"hf-longctx/{model_id}/{stamp}",
        "retrieved_timestamp": stamp,
        "source_metadata": {
            "source_name": "hf-longctx",
            "source_type": "evaluation_run",
            "source_organization_name": organization,
            "evaluator_relationship": relationship,
        },
        "eval_library": {"name": "hf-longctx", "version": versions.get("hf-longctx", __version__)},
        "model_info": {
            "name": results[0].model_name,
            "id": model_id,
            "developer": developer,
            "additional_details": details,
        },
        "evaluation_results": entries,
    }
    if measured is not None:
        record["evaluation_timestamp"] = str(int(measured.timestamp()))
    if not served:
        engine = {"name": "transformers", "version": versions.get("transformers", "unknown")}
        record["model_info"]["inference_engine"] = engine
    digest = hashlib.sha256(json.dumps(entries).encode() + model_id.encode()).digest()
    return f"data/hf-longctx/{developer}/{name}/{uuid.UUID(bytes=digest[:16], version=4)}.json", record


def entry(result: Result, score: Score) -> dict[str, Any]:
    """Return a score as an entry of `evaluation_results`."""
    dataset, _ = result.dataset()
    data = texts(
        {key: result.settings.get(key) for key in ("corpus_sha256", "corpus_tokens", "data_type", "tokenizer")}
    )
    uncertainty: dict[str, Any] = {} if score.samples is None else {"num_samples": score.samples}
    if score.error is not None:
        uncertainty["standard_error"] = {"value": score.error, "method": "analytic"}
    if score.low is not None and score.high is not None:
        ends = {"lower": score.low, "upper": score.high}
        uncertainty["confidence_interval"] = {**ends, "confidence_level": 0.95, "method": score.method}
    least, most = score.ends
    how = {k: v for k, v in result.settings.items() if k not in ("model", "device", "weights_sha256")}
    return {
        "evaluation_result_id": f"{result.kind}.{score.task}",
        "evaluation_name": f"hf_longctx.{result.kind}.{score.task}",
        "source_data": {"dataset_name": dataset, "source_type": "other", "additional_details": data},
        "metric_config": {
            "evaluation_description": result.explanation(),
            "metric_id": score.metric,
            "metric_name": score.words,
            "metric_unit": score.unit,
            "lower_is_better": score.lower_is_better,
            "score_type": "continuous",
            "min_score": least,
            "max_score": most,
        },
        "score_details": {"score": score.value, "uncertainty": uncertainty},
        "generation_config": {"additional_details": texts(how)},
    }


def hub_eval_results(
    results: Sequence[Result], benchmark: str, *, measured: datetime | None = None, source_url: str | None = None
) -> list[dict[str, Any]]:
    """Return the entries of a file `.eval_results/NAME.yaml` of a model's repository, for `yaml.dump`.

    Args:
        results: of one model; curves give their lengths, losses the perplexity, retrievals the rate at each length.
        benchmark: dataset on the Hub that is registered as a benchmark and has these tasks; others are not shown.
        measured: when.
        source_url: where the results can be seen.

    Raises:
        ValueError: nothing was measured, or the dataset's name is none.
    """
    entries = []
    for result in results:
        for score in length_scores(result) if isinstance(result, ForgettingCurve) else scores(result):
            notes = f"{score.words} ({score.unit}); {score.samples} samples"
            if score.low is not None and score.high is not None:
                notes += f"; 95 % interval {rounded(score.low)} to {rounded(score.high)}"
            entries.append(
                EvalResultEntry(
                    dataset_id=check_model_id(benchmark),
                    task_id=score.task,
                    value=score.value,
                    date=None if measured is None else measured.isoformat(timespec="seconds"),
                    source_url=source_url,
                    source_name=None if source_url is None else "hf-longctx",
                    notes=notes,
                )
            )
    return eval_result_entries_to_yaml(entries)
