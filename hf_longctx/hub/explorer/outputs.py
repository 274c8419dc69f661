"""What visitors see: pictures that the package draws into files, and nothing of before where something failed."""

import tempfile
from collections.abc import Callable

import gradio
from PIL import Image


def picture(draw: Callable[[str], object]) -> Image.Image:
    """What `draw(path)` writes to a PNG file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/picture.png"
        draw(path)
        with Image.open(path) as drawing:
            return drawing.copy()


def image(alt_text: str) -> gradio.Image:
    """The place of a picture."""
    return gradio.Image(show_label=False, format="png", buttons=["download", "fullscreen"], alt_text=alt_text)


def connect(button, function, inputs, outputs) -> None:
    """At a click, show what the function returns; where it raises, nothing, as gradio shows the message."""
    (place,) = (output for output in outputs if isinstance(output, gradio.Image))
    event = button.click(function, inputs, outputs, show_progress_on=place)
    event.failure(lambda: [None] * len(outputs), None, outputs, show_progress="hidden")
