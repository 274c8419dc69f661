"""The Space of this module: measure a model of the Hub on a text of yours."""

from pathlib import Path

import gradio

from hf_longctx.metrics import PositionLoss
from hf_longctx.metrics.space import space


def measure(compute, model, text, context_length):
    return compute(model=model, corpus=text, context_length=int(context_length) or None)


demo = space(
    Path(__file__).resolve().with_name("position_loss.py"),
    measure,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text", lines=8),
        gradio.Number(0, label="Tokens per sequence (0: as many as the model claims to read)", precision=0),
    ],
    title="Per-token loss",
    result_class=PositionLoss,
)

if __name__ == "__main__":
    demo.launch()
