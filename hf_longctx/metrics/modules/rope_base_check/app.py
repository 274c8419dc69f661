"""The Space of this module: check the RoPE base of a model of the Hub."""

from pathlib import Path

import gradio

from hf_longctx.metrics.space import space


def check(compute, model, context_length):
    return compute(model=model, context_length=int(context_length) or None)


demo = space(
    Path(__file__).resolve().with_name("rope_base_check.py"),
    check,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Number(0, label="Context in tokens (0: what the model claims)", precision=0),
    ],
    title="RoPE base check",
)

if __name__ == "__main__":
    demo.launch()
