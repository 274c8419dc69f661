"""The Space of this module: measure a model of the Hub on a text of yours."""

from pathlib import Path

import evaluate
import gradio

from hf_longctx.metrics import PositionLoss
from hf_longctx.metrics.space import space


HERE = Path(__file__).resolve().parent
module = evaluate.load(str(HERE / "position_loss.py"))


def measure(model, text, context_length):
    return module.compute(model=model, corpus=text, context_length=int(context_length) or None)


demo = space(
    HERE,
    measure,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text", lines=8),
        gradio.Number(0, label="Tokens per sequence (0: as many as the model claims to read)", precision=0),
    ],
    title="Per-token loss",
    description=module.info.description,
    result_class=PositionLoss,
)

if __name__ == "__main__":
    demo.launch()
