"""Train and measure the models of the demo: a FoX (Pro), a Transformer (Pro) and a Llama of equal size.

    python -m scripts.train_demo [--work FOLDER | --measure-only]

Collects the corpus (`scripts.demo_corpus`), trains a tokenizer, and trains each model in three stages. The commands
are printed and saved in `training.txt` of each card; `training.yaml` contains all settings of the last stage. After an
interruption, the same command resumes. The models are saved in bfloat16, with their logs, a generated sample, their
losses by position and their forgetting curves on a held-out novel. --measure-only measures the saved models again.
"""

import argparse
import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_text
from hf_longctx.fox.plot import plot_forget_gates
from hf_longctx.metrics import Run, comparison_table, forgetting_curve, plot_comparison, position_loss, read_result
from hf_longctx.training.data import TokenDataset, pack
from scripts.demo_tokenizer import train_tokenizer

from . import copy_data, demo_corpus, sample


ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
HELD_OUT = CARDS / "held_out.txt.gz"
VOCABULARY = 4096
MODELS = {"fox-demo": "fox-pro-5m", "transformer-pro-demo": "transformer-pro-5m", "llama-demo": "llama-5m"}
STAGES = (  # language is learned first; copying without mistakes takes a growing share of repetitions
    "train --model {preset} --learning_rate 3e-3 --data copies-0.4.npy --max_steps 1024 --warmup_steps 64",
    "finetune --model {before}/model --use_peft false --weight_decay 0.1 --data copies-0.7.npy --max_steps 512 "
    "--learning_rate 1e-3",
    "finetune --model {before}/model --use_peft false --weight_decay 0.1 --data copies-0.9.npy --max_steps 384 "
    "--learning_rate 1e-3 --seed 1",
)
COPIES = {0.4: 0, 0.7: 0, 0.9: 1}  # share of sequences with repeated passages, and their seed
ROW = 512  # tokens
SIZES = f"--max_length {ROW} --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --bf16"
TEXTS = "--eval_data corpus/held_out.txt --eval_steps 128 --tokenizer tokenizer"
LAUNCHER = "torchrun --nproc-per-node 2 -m hf_longctx"
LOGGED = 8  # steps between entries in the log of the card
FIELDS = ("step", "loss", "grad_norm", "learning_rate", "eval_loss")
SAMPLING = {
    "do_sample": True,
    "temperature": 0.8,
    "top_p": 0.9,
}  # with greedy decoding, such a small model repeats itself
LENGTHS, REPEATS = range(64, 1025, 64), 20
PROMPT = "She looked at him, and"
GATES = 512  # tokens in the heat map of the gates
TITLE = "Three models of equal size and training"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work",
        type=Path,
        default=ROOT / "demo_output" / "training",
        metavar="FOLDER",
        help="folder of the runs (default: demo_output/training)",
    )
    parser.add_argument("--measure-only", action="store_true", help="measure the saved models again, without training")
    args = parser.parse_args()
    if not args.measure_only:
        train_all(args.work)
    for name in MODELS:
        measure(CARDS / name)
    curves = {name: read_result(CARDS / name / "forgetting_curve.json") for name in MODELS}
    plot_comparison(curves, CARDS / "forgetting_curves.png", title=TITLE)
    print(comparison_table(curves))


def train_all(work):
    """Train all models, and save them in the folders of their cards."""
    if not (work / "corpus").exists():
        demo_corpus.write(work / "corpus")
    if not (work / "tokenizer").exists():
        documents = (file.read_text() for file in sorted((work / "corpus" / "train").iterdir()))
        train_tokenizer(documents, VOCABULARY).save_pretrained(work / "tokenizer")
    write_copies(work)
    held_out = (work / "corpus" / "held_out.txt").read_bytes()
    HELD_OUT.write_bytes(gzip.compress(held_out, mtime=0))
    for name, preset in MODELS.items():
        publish(train(name, preset, work), CARDS / name)


def write_copies(work):
    """Write the token files of all stages: sequences of text, and sequences with repeated passages."""
    tokenizer, tokens = AutoTokenizer.from_pretrained(work / "tokenizer"), work / "tokens.npy"
    if not tokens.exists():
        pack(str(work / "corpus" / "train"), tokenizer, tokens)
    rows = TokenDataset(tokens, ROW, tokenizer.eos_token_id, len(tokenizer))
    for share, seed in COPIES.items():
        if not (file := work / f"copies-{share}.npy").exists():
            copy_data.write(copy_data.CopyDataset(rows, share, tokenizer, seed), file)


def train(name, preset, work):
    """Train one model, and return {folder of a stage: its command}."""
    commands, before = {}, None
    for number, stage in enumerate(STAGES, start=1):
        output = f"{name}/stage-{number}"
        stage = stage.format(preset=preset, before=before)
        commands[work / output] = f"{LAUNCHER} {stage} {SIZES} {TEXTS} --output_dir {output}"
        before = output
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in commands.values():
        print(command, flush=True)
        arguments = shlex.split(command.removeprefix("torchrun"))
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        subprocess.run([*torchrun, *arguments], cwd=work, env=environment, check=True)
    return commands


def publish(stages, card):
    """Save a trained model, its settings and log, {folder: command}, in its card's folder."""
    trained = list(stages)[-1] / "model"
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    model.config.use_cache = True  # Trainer disabled it
    model.config.max_position_embeddings = ROW  # a preset claims a longer context
    model.generation_config.update(**SAMPLING)
    model.save_pretrained(card)
    AutoTokenizer.from_pretrained(trained).save_pretrained(card)
    for code in card.glob("*.py"):  # in this repository, the model's code is the package
        code.unlink()
    config = json.loads((card / "config.json").read_text())
    config.pop("auto_map", None)
    (card / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    (card / "training.txt").write_text("\n".join(stages.values()) + "\n")
    shutil.copy(list(stages)[-1] / "config.yaml", card / "training.yaml")
    with (card / "training_log.jsonl").open("w") as log:
        for number, stage in enumerate(stages, start=1):
            for entry in json.loads((stage / "trainer_state.json").read_text())["log_history"]:
                if "eval_loss" in entry or ("loss" in entry and entry["step"] % LOGGED == 0):
                    logged = {field: entry[field] for field in FIELDS if field in entry}
                    log.write(json.dumps({"stage": number} | logged) + "\n")


def measure(card):
    """Save a model's sample, losses and forgetting curve in its card's folder."""
    sample.write(card, str(card.relative_to(ROOT)), PROMPT, max_new_tokens=60)
    model = AutoModelForCausalLM.from_pretrained(card, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(card)
    model.config._name_or_path = tokenizer.name_or_path = card.name
    tokens = tokenizer(load_text(str(HELD_OUT)), add_special_tokens=False, verbose=False)["input_ids"]
    options = {"tokenizer": tokenizer, "corpus_name": "Persuasion", "train_length": ROW}
    options["run"] = Run(progress=True)
    loss = position_loss(model, tokens, context_length=LENGTHS[-1], **options)
    loss.save(card / "position_loss.json")
    loss.plot(card / "position_loss.png", train_length=ROW)
    curve = forgetting_curve(model, tokens, lengths=LENGTHS, repeats=REPEATS, **options)
    if getattr(model.config, "forget_gate", "none") != "none":
        plot_forget_gates(model, tokens[:GATES], card / "gates.png")
    curve.save(card / "forgetting_curve.json")
    curve.plot(card / "forgetting_curve.png", train_length=ROW)
    print(f"{card.name}: {curve.summary()}")


if __name__ == "__main__":
    main()
