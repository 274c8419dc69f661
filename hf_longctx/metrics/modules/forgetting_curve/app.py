"""The Space of this module: measure a model of the Hub on a text of yours."""

from collections.abc import Callable
from pathlib import Path

import gradio

from hf_longctx.metrics import ForgettingCurve, log_lengths
from hf_longctx.metrics.space import TEXT, space


LONGEST = 1024  # tokens; more takes too long on the CPU of a free Space


def measure(
    compute: Callable[..., dict], model: str, text: str, max_length: float, points: float, repeats: float
) -> dict:
    """Measure a model on a text."""
    lengths = log_lengths(int(max_length), int(points))
    return compute(model=model, corpus=text, lengths=lengths, repeats=int(repeats), progress=True)


demo = space(
    Path(__file__).resolve().with_name("forgetting_curve.py"),
    measure,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text, at least three times as long as the longest passage", lines=8, max_length=10**6),
        gradio.Number(
            128, label=f"Longest passage (tokens, up to {LONGEST})", precision=0, minimum=9, maximum=LONGEST
        ),
        gradio.Number(6, label="Lengths (up to 32)", precision=0, minimum=2, maximum=32),
        gradio.Number(3, label="Passages per length (up to 20)", precision=0, minimum=1, maximum=20),
    ],
    title="Forgetting curve",
    result_class=ForgettingCurve,
    examples=[
        ("HuggingFaceTB/SmolLM2-135M", TEXT, 128, 6, 3),
        ("state-spaces/mamba-130m-hf", TEXT, 128, 6, 3),
    ],
)

if __name__ == "__main__":
    demo.launch()
