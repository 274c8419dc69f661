"""Five walks through the package stay short: how many of its functions run, and how often the file changes.

They are counted on tiny models along all calls and returns. Lambdas and comprehensions are not counted; that is no
reason to write them.
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_longctx
from hf_longctx import FoxConfig, FoxForCausalLM, HMTConfig, HMTWrapper, cli
from hf_longctx.fox.compat_fox import CACHE
from hf_longctx.metrics import forgetting_curve


PACKAGE = str(Path(hf_longctx.__file__).parent) + os.sep
BOTH_NAMES = pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24 two names take more functions")
SIZES = dict(vocab_size=90, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)


def count(walk):
    """Return how many functions of the package ran in `walk()`, and how many calls and returns changed the file."""
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

    walk()  # imports and caches
    sys.setprofile(profile)
    try:
        walk()
    finally:
        sys.setprofile(None)
    return len(functions), moves


@pytest.fixture
def check(record_property):
    """Count a walk, print the counts at the end of the run (conftest.py), and compare them with what is allowed."""

    def check(walk, functions, moves):
        counted = count(walk)
        record_property("hops", counted)
        assert counted[0] <= functions and counted[1] <= moves, f"{counted}; {functions, moves} are allowed"

    return check


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture
def fox():
    torch.manual_seed(0)
    return FoxForCausalLM(FoxConfig(**SIZES)).eval()


@BOTH_NAMES
@torch.no_grad()
def test_a_layer_of_fox(fox, check):
    ids = torch.randint(3, 90, (1, 61))
    check(lambda: fox(ids, use_cache=False), functions=24, moves=20)


@BOTH_NAMES
@torch.no_grad()
@pytest.mark.parametrize("segments, functions, moves", [(1, 36, 40), (2, 48, 72)])
def test_segments_of_hmt(llama, check, segments, functions, moves):
    """The second recalls the first."""
    hmt = HMTWrapper.from_backbone(llama, HMTConfig(segment_length=24, sensory_tokens=4)).eval()
    ids = torch.randint(3, 90, (1, 24 * segments))
    check(lambda: hmt(ids), functions, moves)


def test_a_curve_of_one_length(llama, check):
    words = np.random.default_rng(0).integers(3, 90, 2000)
    options = dict(lengths=[8], repeats=2, bos_token_id=1, eos_token_id=2)
    check(lambda: forgetting_curve(llama, words, **options), functions=93, moves=184)


def test_a_dry_run_of_push(fox, check, tmp_path, capsys, monkeypatch):
    """19 of the functions build the model without memory, whose tensors are compared with those of the files."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # what the Hub has is unknown then
    fox.save_pretrained(tmp_path)
    check(lambda: cli.main(["push", str(tmp_path), "someone/fox", "--dry-run"]), functions=60, moves=170)


@BOTH_NAMES
def test_a_training_up_to_its_first_step(check, tmp_path, monkeypatch):
    """From the words of the command; the model's own functions are those of the walk of FoX."""
    pytest.importorskip("peft", reason="training needs accelerate and peft: pip install 'hf-longctx[training]'")
    (tmp_path / "text.txt").write_text("The fox forgets what it no longer needs. " * 40)
    sizes = ["num_hidden_layers=1", "hidden_size=32", "num_attention_heads=2", "intermediate_size=64"]
    words = [
        "train",
        "--model",
        "fox-tiny",
        "--set",
        *sizes,
        "--data",
        str(tmp_path / "text.txt"),
        "--max_length",
        "32",
    ]
    tokenizer = str(Path(__file__).resolve().parents[1] / "model_cards" / "fox-demo")

    class FirstStep(Exception):
        pass

    def stop(*args, **kwargs):
        raise FirstStep

    monkeypatch.setattr(torch.optim.AdamW, "step", stop)
    folders = iter(range(9))

    def walk():
        with pytest.raises(FirstStep):
            cli.main([*words, "--tokenizer", tokenizer, "--output_dir", str(tmp_path / str(next(folders)))])

    check(walk, functions=126, moves=316)
