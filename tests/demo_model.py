"""The model of scripts/demo, whose tokenizer most tests take."""

import json
from pathlib import Path


DEMO = Path(__file__).resolve().parents[1] / "model_cards" / "fox-demo"
VOCABULARY = json.loads((DEMO / "config.json").read_text())["vocab_size"]
