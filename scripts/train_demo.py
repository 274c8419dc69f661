"""Regenerate model_cards/fox-demo: train the demo's model, save it in bfloat16 with its log, and measure its curve.

    python -m scripts.train_demo [--work FOLDER]

The training is that of `hf-longctx train-demo`; after an interruption, the same command continues at the last
checkpoint.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer

from hf_longctx import FoxForCausalLM
from hf_longctx.corpus import stdlib_text
from hf_longctx.metrics import Run, forgetting_curve, linear_lengths
from hf_longctx.training.copying import train_demo_model


ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "model_cards" / "fox-demo"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "demo_output" / "training", metavar="FOLDER")
    args = parser.parse_args()
    train_demo_model(stdlib_text("train"), args.work)
    publish(args.work)


def publish(work):
    tokenizer = AutoTokenizer.from_pretrained(work)
    tokenizer.save_pretrained(TARGET)
    FoxForCausalLM.from_pretrained(work, dtype=torch.bfloat16).save_pretrained(TARGET)
    for code in TARGET.glob("*.py"):  # in this repository, the package is the code of the model
        code.unlink()
    config = json.loads((TARGET / "config.json").read_text())
    config.pop("auto_map")
    (TARGET / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    history = json.loads((work / "trainer_state.json").read_text())["log_history"]
    lines = (json.dumps({name: entry[name] for name in ("step", "loss", "learning_rate")}) for entry in history[:-1])
    (TARGET / "training_log.jsonl").write_text("\n".join(lines) + "\n")

    model = FoxForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    model.config._name_or_path = TARGET.name
    tokens = tokenizer(stdlib_text("held_out"), add_special_tokens=False, verbose=False)["input_ids"]
    curve = forgetting_curve(model, tokens, lengths=linear_lengths(1600, 16), run=Run(progress=True))
    curve.save(TARGET / "forgetting_curve.json")
    curve.plot(TARGET / "forgetting_curve.png", train_length=model.config.max_position_embeddings)
    print(curve.summary())


if __name__ == "__main__":
    main()
