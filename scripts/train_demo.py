"""Regenerate model_cards/fox-demo and model_cards/llama-demo: a FoX (Pro) and a Llama of its size, for scripts/demo.

    python -m scripts.train_demo [--work FOLDER]

Collects the text (`scripts.demo_corpus`), trains a tokenizer and both models by `hf-longctx train`, and saves each in
bfloat16 with its log and its forgetting curve on a novel that was held out. After an interruption, the same command
goes on.
"""

import argparse
import gzip
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx import cli
from hf_longctx.corpus import load_text
from hf_longctx.metrics import Run, forgetting_curve, linear_lengths
from hf_longctx.training.tokenizer import train_tokenizer

from . import demo_corpus


CARDS = Path(__file__).resolve().parents[1] / "model_cards"
MODELS = {"fox-demo": ["--pro"], "llama-demo": ["--architecture", "llama"]}
VOCABULARY = 4096
TRAINING = "--preset 5M --repeated-rows 0.4 --rows-at-once 4 --steps 1024 --dtype bfloat16"
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}  # greedy, a model this small repeats itself
LOGGED = 8  # of so many steps, one is kept in the log of the card


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=CARDS.parent / "demo_output" / "training", metavar="FOLDER")
    work = parser.parse_args().work
    corpus, tokenizer = work / "corpus", work / "tokenizer"
    if not corpus.exists():
        demo_corpus.write(corpus)
    if not tokenizer.exists():
        documents = (file.read_text() for file in sorted((corpus / "train").iterdir()))
        train_tokenizer(documents, VOCABULARY).save_pretrained(tokenizer)
    for name, options in MODELS.items():
        data = ["--data", str(corpus / "train"), "--eval-data", str(corpus / "held_out.txt")]
        places = ["--tokenizer", str(tokenizer), "--output", str(work / name)]
        if status := cli.main(["train", *TRAINING.split(), *options, *data, *places]):
            sys.exit(status)
        publish(work / name, CARDS / name, corpus / "held_out.txt")


def publish(run, card, held_out):
    card.mkdir(exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(run / "model", dtype=torch.bfloat16)
    model.generation_config.update(**SAMPLING)
    model.save_pretrained(card)
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    tokenizer.save_pretrained(card)
    for code in card.glob("*.py"):  # in this repository, the package is the code of the model
        code.unlink()
    config = json.loads((card / "config.json").read_text())
    config.pop("auto_map", None)
    (card / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if "eval_loss" in line or json.loads(line)["step"] % LOGGED == 0]
    (card / "training_log.jsonl").write_text("".join(kept))
    shutil.copy(run / "config.yaml", card / "training.yaml")
    (CARDS / "held_out.txt.gz").write_bytes(gzip.compress(held_out.read_bytes(), mtime=0))

    model = model.float()
    model.config._name_or_path = card.name
    tokens = tokenizer(load_text(str(held_out)), add_special_tokens=False, verbose=False)["input_ids"]
    curve = forgetting_curve(model, tokens, lengths=linear_lengths(1600, 16), run=Run(progress=True))
    curve.save(card / "forgetting_curve.json")
    curve.plot(card / "forgetting_curve.png", train_length=model.config.max_position_embeddings)
    print(f"{card.name}: {curve.summary()}")


if __name__ == "__main__":
    main()
