"""The Space of this module: measure a model of the Hub on a text of yours."""

from pathlib import Path

import gradio

from hf_longctx.metrics import ForgettingCurve, log_lengths
from hf_longctx.metrics.space import space


def measure(compute, model, text, max_length, points, repeats):
    lengths = log_lengths(int(max_length), int(points))
    return compute(model=model, corpus=text, lengths=lengths, repeats=int(repeats))


demo = space(
    Path(__file__).resolve().with_name("forgetting_curve.py"),
    measure,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text, at least three times as long as the longest passage", lines=8),
        gradio.Number(128, label="Longest passage (tokens)", precision=0),
        gradio.Number(6, label="Lengths", precision=0),
        gradio.Number(3, label="Passages per length", precision=0),
    ],
    title="Forgetting curve",
    result_class=ForgettingCurve,
)

if __name__ == "__main__":
    demo.launch()
