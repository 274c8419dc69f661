"""Count the package's functions that run in six typical uses, and the calls and returns that cross files.

    python -m scripts.hops

Each use runs twice with tiny models; the second run is counted, without lambdas and comprehensions. The counts inform
refactoring; no test bounds them.
"""

import contextlib
import io
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_longctx
from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper, cli
from hf_longctx.metrics import forgetting_curve


PACKAGE = str(Path(hf_longctx.__file__).parent) + os.sep
DEMO = Path(__file__).resolve().parents[1] / "model_cards" / "fox-demo"
SIZES = dict(vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


class FirstStep(Exception):
    """An exception that is raised at the first optimizer step."""


def count(walk: Callable[[], object]) -> tuple[int, int]:
    """Return the numbers of package functions that run in `walk()`, and of calls and returns that cross files."""
    functions, files, moves = set(), [], 0

    def profile(frame, event, _):
        nonlocal moves
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE) or code.co_name.startswith("<"):
            return
        if event == "call":
            moves += bool(files) and files[-1] != code.co_filename
            files.append(code.co_filename)
            functions.add((code.co_filename, code.co_qualname))
        elif event == "return" and files:
            moves += files.pop() != (files[-1] if files else code.co_filename)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        walk()  # imports and caches
        sys.setprofile(profile)
        try:
            walk()
        finally:
            sys.setprofile(None)
    return len(functions), moves


def walks(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the walks by name, with `folder` for their output."""
    torch.manual_seed(0)
    llama, fox = LlamaForCausalLM(LlamaConfig(**SIZES)).eval(), FoxForCausalLM(FoxConfig(**SIZES)).eval()
    hmt = HMTWrapper.from_backbone(llama, HMTConfig(segment_length=24, sensory_tokens=4)).eval()
    ids, words = torch.randint(3, 90, (1, 61)), np.random.default_rng(0).integers(3, 90, 2000)
    fox.save_pretrained(folder / "fox")
    (folder / "text.txt").write_text("The fox forgets what it no longer needs. " * 40)
    numbers = itertools.count()

    def train():
        sizes = ["num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "intermediate_size=64"]
        arguments = ["--data", str(folder / "text.txt"), "--max_length", "32", "--tokenizer", str(DEMO)]
        output = ["--output_dir", str(folder / f"run-{next(numbers)}")]
        with mock.patch("torch.optim.AdamW.step", side_effect=FirstStep), contextlib.suppress(FirstStep):
            cli.main(["train", "--model", "fox-tiny", "--set", *sizes, *arguments, *output])

    def push():
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            cli.main(["push", str(folder / "fox"), "someone/fox", "--dry-run"])

    return {
        "a FoX of one layer": lambda: fox(ids, use_cache=False),
        "one segment of HMT": lambda: hmt(ids[:, :24]),
        "two segments of HMT": lambda: hmt(ids[:, :48]),
        "a curve of one length": lambda: forgetting_curve(
            llama, words, lengths=[8], repeats=2, bos_token_id=1, eos_token_id=2
        ),
        "push --dry-run": push,
        "train, up to the first optimizer step": train,
    }


def main() -> None:
    """Print a table of all walks."""
    print("| walk | functions | changes of file |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, walk in walks(Path(folder)).items():
            with torch.set_grad_enabled(name.startswith("train")):
                print(f"| {name} | {' | '.join(map(str, count(walk)))} |", flush=True)


if __name__ == "__main__":
    main()
