"""The Space of this module: measure a model of the Hub on a text of yours."""

import json
from pathlib import Path
from tempfile import mkdtemp

import evaluate
import gradio

from hf_longctx.metrics import ForgettingCurve, log_lengths


HERE = Path(__file__).resolve().parent
module = evaluate.load(str(HERE / "forgetting_curve.py"))


def measure(model, text, max_length, points, repeats):
    """The picture of the curve, and the result in JSON types."""
    try:
        lengths = log_lengths(int(max_length), int(points))
        result = module.compute(model=model, corpus=text, lengths=lengths, repeats=int(repeats))
    except (ValueError, OSError) as error:  # shown to the visitor
        raise gradio.Error(str(error)) from error
    picture = str(Path(mkdtemp()) / "forgetting_curve.png")
    ForgettingCurve.from_json(json.dumps(result)).plot(picture)
    return picture, result


demo = gradio.Interface(
    measure,
    inputs=[
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text, at least three times as long as the longest passage", lines=8),
        gradio.Number(128, label="Longest passage (tokens)", precision=0),
        gradio.Number(6, label="Lengths", precision=0),
        gradio.Number(3, label="Passages per length", precision=0),
    ],
    outputs=[gradio.Image(label="Forgetting curve", type="filepath"), gradio.JSON(label="Result")],
    title="Forgetting curve",
    description=module.info.description,
    article=(HERE / "README.md").read_text(encoding="utf-8").split("---", 2)[2],
    flagging_mode="never",
)

if __name__ == "__main__":
    demo.launch()
