"""The Space of this module: check the RoPE base of a model of the Hub."""

from pathlib import Path

import evaluate
import gradio


HERE = Path(__file__).resolve().parent
module = evaluate.load(str(HERE / "rope_base_check.py"))


def check(model, context_length):
    """The report in JSON types."""
    try:
        return module.compute(model=model, context_length=int(context_length) or None)
    except (ValueError, OSError, NotImplementedError) as error:  # shown to the visitor
        raise gradio.Error(str(error)) from error


demo = gradio.Interface(
    check,
    inputs=[
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Number(0, label="Context in tokens (0: what the model claims)", precision=0),
    ],
    outputs=gradio.JSON(label="Report"),
    title="RoPE base check",
    description=module.info.description,
    article=(HERE / "README.md").read_text(encoding="utf-8").split("---", 2)[2],
    flagging_mode="never",
)

if __name__ == "__main__":
    demo.launch()
