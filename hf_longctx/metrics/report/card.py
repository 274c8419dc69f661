"""Convert results to the evaluation metadata of a model card (`model-index`), which the Hub shows with the model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from huggingface_hub import EvalResult

from ..result import Result


def eval_results(results: Sequence[Result]) -> list[EvalResult]:
    """Return an entry for each number with a metric name on the Hub: memory lengths, perplexity, answer rates."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=identifier,
            dataset_name=dataset,
            metric_type=number.metric,
            metric_name=number.name,
            metric_value=number.value,
            metric_args={key: result.settings[key] for key in ("seed", "repeats") if key in result.settings} or None,
        )
        for result in results
        for dataset, identifier in [result.dataset()]
        for number in result.numbers()
        if number.metric
    ]


def plain(text: str) -> str:
    """Escape a string so that Markdown renders it verbatim, on one line.

    >>> print(plain("a_b\\n--- <script>[x](y)"))
    a\\_b --- &lt;script>\\[x\\](y)
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)
