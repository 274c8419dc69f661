"""The Space of this module: check the RoPE base of a model of the Hub."""

from pathlib import Path

import evaluate
import gradio

from hf_longctx.metrics.space import space


HERE = Path(__file__).resolve().parent
module = evaluate.load(str(HERE / "rope_base_check.py"))


def check(model, context_length):
    return module.compute(model=model, context_length=int(context_length) or None)


demo = space(
    HERE,
    check,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Number(0, label="Context in tokens (0: what the model claims)", precision=0),
    ],
    title="RoPE base check",
    description=module.info.description,
)

if __name__ == "__main__":
    demo.launch()
