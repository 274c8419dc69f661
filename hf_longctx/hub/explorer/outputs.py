"""Outputs for visitors: pictures that the package draws into files, texts of strangers, and messages."""

import functools
import html
import tempfile
from collections.abc import Callable

import gradio
from PIL import Image


# A wide table is scrolled on a telephone; words stay whole.
CSS = """
.prose table {display: block; overflow-x: auto; width: fit-content; max-width: 100%; border: none}
.prose :is(td, th) {overflow-wrap: normal; word-break: normal}
"""


def picture(draw: Callable[[str], object]) -> Image.Image:
    """Return the picture that `draw(path)` writes to a PNG file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/picture.png"
        draw(path)
        with Image.open(path) as drawing:
            return drawing.copy()


def image(alt_text: str) -> gradio.Image:
    """Return the component for a picture."""
    return gradio.Image(show_label=False, format="png", buttons=["download", "fullscreen"], alt_text=alt_text)


def harmless(markdown: str) -> str:
    """Return Markdown without tags, links and pictures: names in a result or configuration are those of strangers."""
    return markdown.replace("<", "&lt;").replace("[", r"\[")


def connect(button, function, inputs, outputs) -> None:
    """Show at a click the outputs of the function, or its error in place of earlier outputs."""

    @functools.wraps(function)
    def shown(*values):
        try:
            return function(*values)
        except Exception as error:  # of libraries, of many types
            raise gradio.Error(html.escape(str(error))) from error

    (place,) = (output for output in outputs if isinstance(output, gradio.Image))
    event = button.click(shown, inputs, outputs, show_progress_on=place)
    event.failure(lambda: [None] * len(outputs), None, outputs, show_progress="hidden")
