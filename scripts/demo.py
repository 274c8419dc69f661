"""The part of scripts/demo that runs in its environment; in another one: `python scripts/demo.py [TEXT]`."""

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
FOX, LLAMA = CARDS / "fox-demo", CARDS / "llama-demo"
PROMPT = "She looked at him, and"
TITLE = "A FoX and a Llama of equal size and training"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", nargs="?", default=CARDS / "held_out.txt.gz", help="default: a novel by Jane Austen")
    parser.add_argument("--max-length", type=int, default=1024, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=ROOT / "demo_output", metavar="FOLDER")
    args = parser.parse_args()
    began, out = time.perf_counter(), args.output.resolve()
    warnings.filterwarnings("ignore", message=".*more than the 512 .* claims to support")  # that is what is shown
    disable_progress_bar()

    tokens = AutoTokenizer.from_pretrained(FOX)(load_text(str(args.text)), verbose=False)["input_ids"]
    longest = min(args.max_length, len(tokens) // 3)
    lengths = ",".join(str(longest * i // 8) for i in range(1, 9))
    text = ("--text", args.text)
    measure = (*text, "--lengths", lengths, "--train-length", 512, "--dtype", "float32")
    curves, gates = out / "forgetting_curves.png", out / "gates.png"

    print("Two language models, trained alike on rows of 512 tokens: a Forgetting Transformer (FoX) and a Llama.")
    print("\nThe FoX writes:")
    set_seed(0)
    print(pipeline("text-generation", str(FOX))(PROMPT, max_new_tokens=60)[0]["generated_text"], flush=True)
    run("Its heads forget, each at its own pace", "gates", FOX, *text, "--output", gates)
    run("What the FoX remembers of a text", "curve", FOX, *measure, "--output", out / "fox")
    run("What the Llama remembers", "curve", LLAMA, *measure, "--output", out / "llama")
    both = (out / "fox.json", out / "llama.json", "--names", "FoX", "Llama")
    run("Both", "compare", *both, "--title", TITLE, "--output", curves)
    print(f"\nPicture of both:   {curves}\nPicture of gates:  {gates}\nTook {time.perf_counter() - began:.0f} s")


def run(title, *command):
    command = list(map(str, command))
    print(f"\n{title}:\n  hf-longctx {shlex.join(command)}".replace(f"{ROOT}/", ""), flush=True)
    if status := cli.main(command):
        sys.exit(status)


if __name__ == "__main__":
    main()
