"""Convert results to the `model-index` metadata of a model card. The Hub displays it with the model."""

from __future__ import annotations

import re
from collections.abc import Sequence

from huggingface_hub import EvalResult

from ..result import Result


def eval_results(results: Sequence[Result]) -> list[EvalResult]:
    """Return a model-index entry for each number that has a metric name on the Hub, such as "perplexity".

    Results of a cache are skipped, because they are not results of the model itself.
    """
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
        if number.metric and result.settings.get("cache") is None
    ]


def plain(text: str) -> str:
    """Escape a string for Markdown, and join its lines.

    >>> print(plain("a_b\\n--- <script>[x](y)"))
    a\\_b --- &lt;script>\\[x\\](y)
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)
