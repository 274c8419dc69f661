"""What a card shows of a model is what it generates, and can be repeated."""

import json
import shutil

from demo_model import DEMO
from transformers import AutoTokenizer


PROMPT = "The import statement"


def test_a_sample_repeats_and_is_english(load_script, tmp_path):
    """The demo's tokenizer adds the BOS without which the model stutters, and the model samples."""
    sample = load_script("sample")

    folder = shutil.copytree(DEMO, tmp_path / "demo")
    sample.write(folder, str(folder), PROMPT, max_new_tokens=20)
    document = json.loads((folder / "sample.json").read_text())
    assert document["text"] == AutoTokenizer.from_pretrained(DEMO).decode(document["tokens"], skip_special_tokens=True)
    assert len(set(document["text"].split())) > 6 and "<s>" not in document["text"]
    assert {"model": str(folder), "seed": 0, "do_sample": True, "device": "cpu"}.items() <= document[
        "settings"
    ].items()
    assert sample.sample(str(folder), PROMPT, 20)["tokens"] == document["tokens"]
    assert sample.sample(str(folder), PROMPT, 20, seed=3)["tokens"] != document["tokens"]
