"""The Space "How far does it remember?": a RoPE explorer, forgetting curves side by side, and the gates of a FoX.

    python app.py

It runs on a CPU, needs no token, and runs no code of the models that it is asked about.
"""

import curves_tab
import gates_tab
import gradio
import rope_tab
from outputs import CSS


INTRODUCTION = """
# How far does it remember?
A language model claims a context of so many tokens. Three ways to look at what it does with them.
"""
SYSTEM_FONTS = {"font": ["system-ui", "sans-serif"], "font_mono": ["ui-monospace", "monospace"]}  # none is fetched

with gradio.Blocks(title="How far does it remember?", analytics_enabled=False) as demo:
    gradio.Markdown(INTRODUCTION)
    with gradio.Tab("RoPE"):
        first = rope_tab.build()
    with gradio.Tab("Forgetting curves"):
        curves_tab.build()
    with gradio.Tab("Gates"):
        gates_tab.build()
    demo.load(*first)
demo.queue(default_concurrency_limit=1)

if __name__ == "__main__":
    theme = gradio.themes.Default(primary_hue="orange", **SYSTEM_FONTS)
    demo.launch(theme=theme, css=CSS, max_file_size="1mb")
