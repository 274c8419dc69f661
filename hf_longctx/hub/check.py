"""What was pushed, loaded back by its commit: the bytes of every file, and the logits.

This file is also a program that runs without hf_longctx, as those who load the model do:

    python check.py REPO COMMIT HASHES.json LOGITS.safetensors
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


TOKENS = 64


def check_pushed(folder, hashes: dict[str, str], repo: str, commit: str) -> str:
    """Load a commit in a fresh process, into an empty cache, and compare it with the folder that was pushed.

    Args:
        folder: of a causal language model, or of an adapter of one.
        hashes: sha256 of every file.

    Returns:
        what was compared, in a line.

    Raises:
        RuntimeError: the commit cannot be loaded, or it differs.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(TOKENS)[None] % model.config.get_text_config().vocab_size
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        save_file({"ids": ids, "logits": model(ids).logits}, f"{temporary}/logits.safetensors")
        Path(temporary, "hashes.json").write_text(json.dumps(hashes))
        caches = ("HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE")
        environment = os.environ | {name: f"{temporary}/{name}" for name in caches}
        # -P: the folder of this file, the package's, is not searched for modules
        command = [sys.executable, "-P", __file__, repo, commit, "hashes.json", "logits.safetensors"]
        done = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{repo} at {commit} was pushed and does not load: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def main(repo, commit, hashes, logits):
    copy = Path(snapshot_download(repo, revision=commit))
    hashes = json.loads(Path(hashes).read_text())
    for name, digest in hashes.items():
        if hashlib.sha256((copy / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{name} has other bytes on the Hub than in the folder.")
    saved = load_file(logits)
    model = AutoModelForCausalLM.from_pretrained(repo, revision=commit, trust_remote_code=True).eval()
    assert "hf_longctx" not in sys.modules
    with torch.no_grad():
        difference = (model(saved["ids"]).logits - saved["logits"]).abs().max().item()
    if difference:
        raise ValueError(f"the logits differ by {difference}.")
    print(f"{len(hashes)} files have the same bytes, and the logits of {saved['ids'].shape[1]} tokens are the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
