"""A Space of the Hub around one of the evaluate modules: a form, and the result as words, picture and numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import mkdtemp
from typing import Any

from .result import Result


# For examples: English that comes with every Python, its language reference.
TEXT = "\n\n".join(topics[name].strip() for name in sorted(topics))[:20_000]


def space(
    file: Path,
    measure: Callable[..., dict],
    inputs: Sequence[Any],
    *,
    title: str,
    result_class: type[Result],
    examples: Sequence[Sequence[Any]],
) -> Any:
    """Return the gradio interface of a Space, to be launched by its app.py.

    Args:
        file: of the module. The README.md beside it, without its header, is shown below the form.
        measure: gets the `compute` of the module and the values of the inputs, returns a result in JSON types. Its
            ValueError, OSError or RuntimeError is shown to the visitor.
        inputs: gradio components.
        result_class: reads what `measure` returns.
        examples: rows of values for the inputs, to be chosen by the visitor.
    """
    import evaluate
    import gradio

    module = evaluate.load(str(file))

    def show(progress: Any = gradio.Progress(track_tqdm=True), *values: Any) -> tuple[str, str, dict, dict]:  # noqa: B008 (gradio looks for this default)
        picture = Path(mkdtemp()) / f"{result_class.kind}.png"
        try:
            document = measure(module.compute, *values)
            result = result_class.from_json(json.dumps(document))
            result.plot(picture)
        except (ValueError, OSError, RuntimeError) as error:
            raise gradio.Error(str(error)) from error
        columns, rows = result.table()
        numbers = {"headers": list(columns), "data": [list(row) for row in rows]}
        return "\n\n".join((result.summary(), *result.remarks())), str(picture), numbers, document

    return gradio.Interface(
        show,
        inputs=list(inputs),
        outputs=[
            gradio.Textbox(label="Result", lines=2, max_lines=40),
            gradio.Image(label=title, show_label=False, type="filepath"),  # a label would cover the picture's title
            gradio.Dataframe(label="Numbers"),
            gradio.JSON(label="JSON", max_height=240),
        ],
        title=title,
        description=module.info.description,
        article=file.with_name("README.md").read_text(encoding="utf-8").split("---", 2)[2],
        examples=[list(row) for row in examples],
        cache_examples=False,
        flagging_mode="never",
    )
