"""The Space of this module: measure a model of the Hub on a text of yours."""

import json
from pathlib import Path
from tempfile import mkdtemp

import evaluate
import gradio

from hf_longctx.metrics import PositionLoss


HERE = Path(__file__).resolve().parent
module = evaluate.load(str(HERE / "position_loss.py"))


def measure(model, text, context_length):
    """The picture of the loss, and the result in JSON types."""
    try:
        result = module.compute(model=model, corpus=text, context_length=int(context_length) or None)
    except (ValueError, OSError) as error:  # shown to the visitor
        raise gradio.Error(str(error)) from error
    picture = str(Path(mkdtemp()) / "position_loss.png")
    PositionLoss.from_json(json.dumps(result)).plot(picture)
    return picture, result


demo = gradio.Interface(
    measure,
    inputs=[
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text", lines=8),
        gradio.Number(0, label="Tokens per sequence (0: as many as the model claims to read)", precision=0),
    ],
    outputs=[gradio.Image(label="Per-token loss", type="filepath"), gradio.JSON(label="Result")],
    title="Per-token loss",
    description=module.info.description,
    article=(HERE / "README.md").read_text(encoding="utf-8").split("---", 2)[2],
    flagging_mode="never",
)

if __name__ == "__main__":
    demo.launch()
