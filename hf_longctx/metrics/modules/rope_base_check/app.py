"""The Space of this module: check the RoPE base of a model of the Hub."""

from collections.abc import Callable
from pathlib import Path

import gradio

from hf_longctx.metrics import RopeReport
from hf_longctx.metrics.space import space


LONGEST = 1 << 20  # tokens


def check(compute: Callable[..., dict], model: str, context_length: float) -> dict:
    """Check the RoPE base of a model."""
    report = compute(model=model, context_length=int(context_length) or None)
    if not report["groups"]:
        raise ValueError(" ".join(report["notes"]))  # the model has no RoPE
    return report


demo = space(
    Path(__file__).resolve().with_name("rope_base_check.py"),
    check,
    [
        gradio.Textbox(label="Model (a name on the Hub)"),
        gradio.Number(
            0,
            label=f"Context in tokens (up to {LONGEST}; 0: what the model claims)",
            precision=0,
            minimum=0,
            maximum=LONGEST,
        ),
    ],
    title="RoPE base check",
    result_class=RopeReport,
    examples=[("Qwen/Qwen3-8B", 0), ("HuggingFaceTB/SmolLM3-3B", 0), ("EleutherAI/pythia-6.9b", 0)],
)

if __name__ == "__main__":
    demo.launch()
