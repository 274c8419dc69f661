"""Run the demo in the current environment: `python scripts/demo.py [TEXT]`. scripts/demo creates one first."""

import argparse
import shlex
import sys
import time
import warnings
from pathlib import Path

from transformers import AutoTokenizer, pipeline, set_seed
from transformers.utils.logging import disable_progress_bar

from hf_longctx import cli
from hf_longctx.corpus import load_text


ROOT = Path(__file__).resolve().parents[1]
CARDS = ROOT / "model_cards"
FOX = CARDS / "fox-demo"
MODELS = {"FoX (Pro)": FOX, "Transformer (Pro)": CARDS / "transformer-pro-demo", "Llama": CARDS / "llama-demo"}
PROMPT = "She looked at him, and"
TITLE = "Three models of equal size and training"
INTRODUCTION = """Three models of equal size, trained on the same sequences of 512 tokens:
  FoX (Pro)          a Forgetting Transformer
  Transformer (Pro)  the same with RoPE instead of forget gates: what differs from the FoX is due to the gates
  Llama              the same as Transformer (Pro) without token shift, QK-norm, output gate and output norm"""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "text", nargs="?", default=CARDS / "held_out.txt.gz", help="text file, folder or dataset (default: a novel)"
    )
    parser.add_argument(
        "--max-length", type=int, default=1024, metavar="TOKENS", help="longest copied passage (default: 1024)"
    )
    parser.add_argument(
        "--output", type=Path, default=ROOT / "demo_output", metavar="FOLDER", help="folder (default: demo_output)"
    )
    args = parser.parse_args()
    began, out = time.perf_counter(), args.output.resolve()
    warnings.filterwarnings("ignore", message=".*claims to support only 512")  # the point of the demo
    disable_progress_bar()

    tokens = AutoTokenizer.from_pretrained(FOX)(load_text(str(args.text)), verbose=False)["input_ids"]
    longest = min(args.max_length, len(tokens) // 3)
    lengths = ",".join(str(longest * i // 8) for i in range(1, 9))
    text = ("--text", args.text)
    measure = (*text, "--lengths", lengths, "--train-length", 512, "--dtype", "float32")
    curves, gates = out / "forgetting_curves.png", out / "gates.png"

    print(f"{INTRODUCTION}\n\nThe FoX generates:")
    set_seed(0)
    print(pipeline("text-generation", str(FOX))(PROMPT, max_new_tokens=60)[0]["generated_text"], flush=True)
    run("How fast each of its heads forgets", "gates", FOX, *text, "--output", gates)
    for name, folder in MODELS.items():
        run(f"How far the {name} remembers", "curve", folder, *measure, "--output", out / folder.name)
    results = [out / f"{folder.name}.json" for folder in MODELS.values()]
    run("All three models", "compare", *results, "--names", *MODELS, "--title", TITLE, "--output", curves)
    print(f"\nForgetting curves:  {curves}\nForget gates:       {gates}\nTook {time.perf_counter() - began:.0f} s")


def run(title, *command):
    command = list(map(str, command))
    print(f"\n{title}:\n  hf-longctx {shlex.join(command)}".replace(f"{ROOT}/", ""), flush=True)
    if status := cli.main(command):
        sys.exit(status)


if __name__ == "__main__":
    main()
