"""The Space of this module: measure a model of the Hub on a text of yours."""

from collections.abc import Callable
from pathlib import Path

import gradio

from hf_longctx.metrics import PositionLoss
from hf_longctx.metrics.space import TEXT, space


LONGEST = 4096  # tokens; more takes too long on the CPU of a free Space


def measure(compute: Callable[..., dict], model: str, text: str, context_length: float) -> dict:
    """Measure a model on a text."""
    return compute(model=model, corpus=text, context_length=int(context_length), progress=True)


demo = space(
    Path(__file__).resolve().with_name("position_loss.py"),
    measure,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Textbox(label="Text", lines=8, max_length=10**6),
        gradio.Number(512, label=f"Tokens per sequence (up to {LONGEST})", precision=0, minimum=1, maximum=LONGEST),
    ],
    title="Per-token loss",
    result_class=PositionLoss,
    examples=[("HuggingFaceTB/SmolLM2-135M", TEXT, 512), ("state-spaces/mamba-130m-hf", TEXT, 512)],
)

if __name__ == "__main__":
    demo.launch()
