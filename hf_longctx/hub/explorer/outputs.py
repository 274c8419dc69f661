"""What visitors see: pictures that the package draws into files."""

import tempfile
from collections.abc import Callable

import gradio
from PIL import Image


def picture(draw: Callable[[str], object]) -> Image.Image:
    """What `draw(path)` writes to a PNG file."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/picture.png"
        draw(path)
        with Image.open(path) as image:
            return image.copy()


def image(alt_text: str) -> gradio.Image:
    """The place of a picture."""
    return gradio.Image(show_label=False, format="png", buttons=["download", "fullscreen"], alt_text=alt_text)
