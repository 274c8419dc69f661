"""The Gradio page that evaluate generates for this module: a table of predictions and their scores."""

from pathlib import Path

import evaluate
from evaluate.utils import launch_gradio_widget


launch_gradio_widget(evaluate.load(str(Path(__file__).with_name("rope_base_check.py"))))
