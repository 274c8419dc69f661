"""The part of scripts/demo that runs in its environment; in another one: `python scripts/demo.py [TEXT]`."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx import cli
from hf_longctx.corpus import load_text
from hf_longctx.metrics import ForgettingCurve


ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "model_cards" / "fox-demo"
PROMPT = "The following sections describe the standard way to"
# A process that cannot import hf_longctx, so that the model depends on the files in its folder alone.
WITHOUT_PACKAGE = """
import sys; sys.modules["hf_longctx"] = None
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
with torch.no_grad():
    print(model(torch.arange(3, 35)[None]).logits.double().sum().item())
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", help="text file, folder of *.txt or dataset name")
    parser.add_argument("--max-length", type=int, default=1600, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "demo_output", metavar="FOLDER")
    args = parser.parse_args()
    began = time.perf_counter()

    print(f"1. Load {CHECKPOINT.relative_to(ROOT)} with AutoModelForCausalLM", flush=True)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    print(f"   {type(model).__name__}, {model.num_parameters() / 1e6:.2f} M parameters")

    folder = args.output.resolve() / "fox"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"2. Save it with its code to {folder} and load it where hf_longctx cannot be imported")
    with torch.no_grad():
        checksum = model(torch.arange(3, 35)[None]).logits.double().sum().item()
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder.with_name("modules"))}
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(folder)]
    other = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    if other.returncode or float(other.stdout) != checksum:
        sys.exit(f"the saved model differs: {other.stdout} instead of {checksum}\n{other.stderr}")
    print("   same logits, with trust_remote_code=True", flush=True)

    print("3. Continue a prompt")
    ids = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    new = model.generate(**ids, max_new_tokens=40)
    text = tokenizer.decode(new[0], skip_special_tokens=True)
    print("   " + text.replace("\n", "\n   "), flush=True)

    print("4. Measure its forgetting curve")
    output = folder.with_name("forgetting_curve")
    tokens = len(tokenizer(load_text(args.text), add_special_tokens=False, verbose=False)["input_ids"])
    command = ["curve", str(folder), "--output", str(output), "--max-length", str(min(args.max_length, tokens // 3))]
    command += ["--text", args.text or "stdlib", "--train-length", str(model.config.max_position_embeddings)]
    status = cli.main(command)
    if status:
        sys.exit(status)
    curve = ForgettingCurve.from_json(output.with_suffix(".json").read_text())
    print(f"\nGenerated:      {text!r}")
    print(f"Fine length:    {curve.interval('fine')} tokens (copied with more than 99 % accuracy, 95 % sure)")
    print(f"Coarse length:  {curve.interval('coarse')} tokens (copied at least 1 % better than guessed, 95 % sure)")
    print(f"Picture:        {output}.png")
    print(f"Numbers:        {output}.json")
    print(f"Took {time.perf_counter() - began:.0f} s on {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
