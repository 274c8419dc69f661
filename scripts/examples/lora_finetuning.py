"""Fine-tune a model with LoRA, and compare its loss at the beginning and the end."""

import json
import tempfile

from transformers import AutoModelForCausalLM

import hf_longctx  # noqa: F401 - registers FoX with the Auto classes
from hf_longctx.training import FinetuneConfig, train


config = FinetuneConfig(
    model="model_cards/fox-demo",
    data="stdlib",  # a file, a folder, or the name of a dataset
    max_length=128,
    max_steps=8,
    logging_steps=1,
    lora_r=8,
    output_dir=tempfile.mkdtemp() + "/run",
)
train(config)

with open(f"{config.output_dir}/trainer_state.json") as file:
    losses = [entry["loss"] for entry in json.load(file)["log_history"] if "loss" in entry]
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
model = AutoModelForCausalLM.from_pretrained(f"{config.output_dir}/model")
print(type(model).__name__, "loaded from", f"{config.output_dir}/model")
