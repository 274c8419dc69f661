"""Verify a push: load the commit back, and compare the bytes of every file and the outputs.

This file is also a program that runs without hf_longctx, in the environment of a user of the model:

    python verify.py REPO COMMIT HASHES.json OUTPUTS.safetensors AUTO_CLASS
"""

import hashlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file


TOKENS = 64


def verify_push(folder: str | os.PathLike, contents: str, repo: str, commit: str, auto_class: str) -> str:
    """Load a commit in a new process with an empty cache, and compare it with the pushed folder.

    Args:
        folder: folder of the model or adapter.
        contents: content of hf_longctx.json, with the sha256 of every other file.
        repo: NAMESPACE/NAME.
        commit: commit hash.
        auto_class: name of the Auto class of transformers or PEFT that loads the model. The first output, usually the
            logits, is compared.

    Returns:
        A one-line summary of the comparison.

    Raises:
        RuntimeError: the commit cannot be loaded, or differs from the folder.
    """
    path = str(Path(folder).resolve())  # absolute, because PEFT looks up relative names on the Hub
    model = load(path, auto_class)
    hashes = json.loads(contents)["sha256"] | {"hf_longctx.json": hashlib.sha256(contents.encode()).hexdigest()}
    ids = torch.arange(TOKENS)[None] % model.config.get_text_config().vocab_size
    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        save_file({"ids": ids, "output": model(input_ids=ids)[0]}, f"{temporary}/outputs.safetensors")
        Path(temporary, "hashes.json").write_text(json.dumps(hashes))
        caches = ("HF_HUB_CACHE", "HF_MODULES_CACHE", "HF_XET_CACHE")
        environment = os.environ | {name: f"{temporary}/{name}" for name in caches}
        # -P: do not import modules from the folder of this file
        command = [sys.executable, "-P", __file__, repo, commit, "hashes.json", "outputs.safetensors", auto_class]
        done = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"{repo} at {commit} was pushed, but cannot be loaded back: {reason}")
    return done.stdout.strip()


def load(name, auto_class, **options):
    library = importlib.import_module("peft" if "Peft" in auto_class else "transformers")
    return getattr(library, auto_class).from_pretrained(name, trust_remote_code=True, **options).eval()


def main(repo, commit, hashes, outputs, auto_class):
    copy = Path(snapshot_download(repo, revision=commit))
    hashes = json.loads(Path(hashes).read_text())
    for name, digest in hashes.items():
        if hashlib.sha256((copy / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{name} has other bytes on the Hub than in the folder.")
    saved = load_file(outputs)
    model = load(repo, auto_class, revision=commit)
    assert "hf_longctx" not in sys.modules
    with torch.no_grad():
        difference = (model(input_ids=saved["ids"])[0] - saved["output"]).abs().max().item()
    if difference:
        raise ValueError(f"the outputs differ by {difference}.")
    print(f"{len(hashes)} files have the same bytes, and the outputs for {TOKENS} tokens are the same")


if __name__ == "__main__":
    main(*sys.argv[1:])
