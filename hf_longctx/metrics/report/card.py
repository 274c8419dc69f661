"""Results as the evaluation metadata of a model card, which the Hub shows beside the model (`model-index`).

print(card_snippet("fox-demo", [curve, loss]))
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from huggingface_hub import EvalResult, ModelCardData

from ..result import Result


def eval_results(results: Sequence[Result]) -> list[EvalResult]:
    """Return one entry for each number that the Hub has a name for: memory lengths, perplexity, rates of answers."""
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


def card_snippet(model: str, results: Sequence[Result], picture: str | None = None) -> str:
    """Return Markdown with its YAML header, to be merged into a model card.

    Args:
        model: name of the model. Its line breaks become spaces, and characters that Markdown or HTML would read are
            escaped, as in all texts that come from a result.
        results: of one model, each listed by its summary.
        picture: file name or address of a picture to show.

    Raises:
        ValueError: the results are without a number for a card.
    """
    entries = eval_results(results)
    if not entries:
        raise ValueError("these results are without a number for a model card: nothing was measured on a dataset.")
    header = ModelCardData(model_name=" ".join(model.split()), eval_results=entries).to_yaml()
    lines = [f"- {result.title}: {plain(result.summary())}" for result in results if result.measured]
    image = "" if picture is None else f"\n![How far {plain(model)} remembers]({picture})\n"
    return f"---\n{header}\n---\n\n## How far it remembers\n\n" + "\n".join(lines) + "\n" + image


def plain(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged, on one line.

    >>> print(plain("a_b\\n--- <script>[x](y)"))
    a\\_b --- &lt;script>\\[x\\](y)
    """
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", text)
