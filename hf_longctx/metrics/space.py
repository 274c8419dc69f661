"""A Space of the Hub around one of the evaluate modules: a form, the result in JSON types, and its picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

from .result import Result


def space(
    file: Path, measure: Callable[..., dict], inputs: Sequence, *, title: str, result_class: type[Result] | None = None
):
    """The gradio interface of a Space, to be launched by its app.py.

    Args:
        file: of the module. The README.md beside it, without its header, is shown below the form.
        measure: gets the `compute` of the module and the values of the inputs, returns a result in JSON types. Its
            ValueError, OSError or NotImplementedError is shown to the visitor.
        inputs: gradio components.
        result_class: draws the picture; None for a result without one.
    """
    import evaluate
    import gradio

    module = evaluate.load(str(file))

    def show(*values):
        try:
            result = measure(module.compute, *values)
        except (ValueError, OSError, NotImplementedError) as error:
            raise gradio.Error(str(error)) from error
        if result_class is None:
            return result
        picture = Path(mkdtemp()) / f"{result_class.kind}.png"
        result_class.from_json(json.dumps(result)).plot(picture)
        return str(picture), result

    image = [] if result_class is None else [gradio.Image(label=title, type="filepath")]
    return gradio.Interface(
        show,
        inputs=list(inputs),
        outputs=[*image, gradio.JSON(label="Result")],
        title=title,
        description=module.info.description,
        article=file.with_name("README.md").read_text(encoding="utf-8").split("---", 2)[2],
        flagging_mode="never",
    )
