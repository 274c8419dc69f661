"""A Space of the Hub around one of the evaluate modules: a form, the result in JSON types, and its picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from .result import Result


def space(
    folder: Path,
    measure: Callable[..., dict],
    inputs: Sequence[Any],
    *,
    title: str,
    description: str,
    result_class: type[Result] | None = None,
):
    """The gradio interface of a Space, to be launched by its app.py.

    Args:
        folder: of the Space; its README.md, without the header, is shown below the form.
        measure: gets the values of the inputs, returns a result in JSON types. Its ValueErrors, OSErrors and
            NotImplementedErrors are shown to the visitor.
        inputs: gradio components.
        title, description: above the form.
        result_class: draws the picture; None for a result without one.
    """
    import gradio

    def show(*values):
        try:
            result = measure(*values)
        except (ValueError, OSError, NotImplementedError) as error:
            raise gradio.Error(str(error)) from error
        if result_class is None:
            return result
        picture = Path(mkdtemp()) / f"{result_class.kind}.png"
        result_class.from_json(json.dumps(result)).plot(picture)
        return str(picture), result

    outputs = [gradio.JSON(label="Result")]
    if result_class is not None:
        outputs.insert(0, gradio.Image(label=title, type="filepath"))
    return gradio.Interface(
        show,
        inputs=list(inputs),
        outputs=outputs,
        title=title,
        description=description,
        article=(folder / "README.md").read_text(encoding="utf-8").split("---", 2)[2],
        flagging_mode="never",
    )
