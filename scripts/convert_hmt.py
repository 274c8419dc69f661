"""Convert a checkpoint file of the official HMT or RMT code to an HMT folder.

    python -m scripts.convert_hmt weights_700.pth hmt --base facebook/opt-350m --segment-length 990 --sensory-tokens 32

The file is a model_weights_*.pth, as in OswaldHe123/hmt_pretrained. The folder is written atomically.
"""

import argparse
import re
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_longctx.fox.checkpoint_files import new_folder
from hf_longctx.hmt import HMTWrapper, from_official
from hf_longctx.hmt.convert import BACKBONE, OFFICIAL_NAMES


MEMORY_SIZE = 100  # default of the official command line; not saved in checkpoints
LORA_ALPHA = 32  # LoRA alpha in all official training runs, for any rank
LORA = re.compile(r"(.*)\.lora_(embedding_)?([AB])\.\w+(?:\.weight)?")
OF_ARMT = re.compile(r"\.W_m[qkvb]\.")
OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")  # saved by old versions of transformers


def main(argv: list[str] | None = None) -> None:
    """Convert a checkpoint file to a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="FILE", help="weight file")
    parser.add_argument("destination", metavar="DST", help="folder to create")
    parser.add_argument("--base", required=True, metavar="MODEL", help="folder or Hub name of the wrapped model")
    parser.add_argument(
        "--segment-length",
        type=int,
        required=True,
        metavar="TOKENS",
        help="new tokens per segment: the official segment_length (1024, 512 or 256) - 2 - num_sensory",
    )
    parser.add_argument(
        "--sensory-tokens", type=int, required=True, metavar="TOKENS", help="official num_sensory: 32, or 0 for RMT"
    )
    parser.add_argument(
        "--memory-size", type=int, default=MEMORY_SIZE, metavar="N", help="official mem_recall_context (default: 100)"
    )
    args = vars(parser.parse_args(argv))
    source, base = args.pop("source"), args.pop("base")
    with new_folder(Path(args.pop("destination"))) as folder:
        load_official(source, base, **args).eval().save_pretrained(folder)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(base)
            has_tokenizer = bool(
                tokenizer("word", add_special_tokens=False)["input_ids"]
            )  # an empty tokenizer does not count
        except (OSError, ValueError):
            has_tokenizer = False
        if has_tokenizer:
            tokenizer.save_pretrained(folder)
        else:
            print(f"{base} does not have a tokenizer, so the folder does not have one either.")


def load_official(
    path: str | Path,
    base: str | Path,
    *,
    segment_length: int,
    sensory_tokens: int,
    memory_size: int | None = MEMORY_SIZE,
) -> HMTWrapper:
    """Load a checkpoint of the official HMT or RMT code (`model_weights_*.pth`) around its backbone.

    A checkpoint without `mem` and `cross_attn` has a memory without recall: RMT, or stage 1 of HMT. LoRA weights are
    merged into their layers. Code in the file is not run (`torch.load(weights_only=True)`).

    If the width and h are at least 4096, the official code has divided scores by h since February 2025. Before, and in
    `generate`, it divided by sqrt(h), as we do. For newer checkpoints, multiply `memory.wq` by h ** -0.5.

    Args:
        path: the checkpoint; .safetensors is also supported. base: folder or Hub name of the wrapped model, for its
        config. Its weights are loaded if the checkpoint does not
            contain backbone weights.
        segment_length: *new* tokens per segment: the official segment_length - 2 m - num_sensory.
        sensory_tokens: the official num_sensory; 0 for RMT.
        memory_size: the official mem_recall_context.

    Raises:
        ValueError: the file is damaged, contains anything but tensors, or does not match `base`.
        OSError: the file or the base does not exist.
    """
    weights = read_state_dict(path)
    memory = {name: x for name, x in weights.items() if not name.startswith(BACKBONE)}
    backbone = {name.removeprefix(BACKBONE): x for name, x in weights.items() if name.startswith(BACKBONE)}
    if any(OF_ARMT.search(name) for name in weights):
        raise ValueError(
            f"{path} is a checkpoint of ARMT, whose layers have a memory each. HMT does not support them."
        )
    if backbone:
        model = build_backbone(path, base, merge_lora(backbone))
    else:
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    return from_official(
        model,
        memory,
        segment_length=segment_length,
        sensory_tokens=sensory_tokens,
        memory_size=memory_size,
        recall="mem" in memory,
        memory_tokens=len(memory.get("memory_cell.memory", [0])),
        recall_mode="paper",
    )


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """Load a state dict, without DDP's prefix and a trainer's extra entries; see `load_official`."""
    if Path(path).is_dir():
        raise ValueError(
            f"FILE must be a file of weights such as model_weights_700.pth, got the folder {path}. To make one from a "
            "folder of DeepSpeed, run its zero_to_fp32.py."
        )
    try:
        if Path(path).suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except FileNotFoundError:
        raise
    except Exception as error:  # PyTorch reads some bytes as a pickle that makes it raise anything
        reason = (str(error) or "it is empty").splitlines()[0]
        raise ValueError(f"{path} is damaged or holds more than tensors, so it is not loaded ({reason}).") from error
    content = content.get("model_state_dict", content) if isinstance(content, Mapping) else {}
    weights = {str(name).removeprefix("module."): x for name, x in content.items() if isinstance(x, Tensor)}
    if "memory_cell.memory" not in weights:
        raise ValueError(
            f"{path} must be the state dict of a RecurrentWrapper of HMT or RMT, with {', '.join(OFFICIAL_NAMES)} and "
            f"{BACKBONE}*, but it does not have memory_cell.memory."
        )
    return weights


def merge_lora(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge LoRA into the weights, W + alpha / r B A, and remove PEFT's prefixes from their names."""
    weights = {name.removeprefix("base_model.model."): x for name, x in weights.items()}
    factors: dict[str, dict[str, Tensor]] = {}
    for name, x in weights.items():
        if match := LORA.fullmatch(name):
            layer, of_embedding, letter = match.groups()
            if of_embedding:  # W (V, d) gets A^T B^T
                x, letter = x.mT, {"A": "B", "B": "A"}[letter]
            factors.setdefault(layer, {})[letter] = x
    merged = {name.replace(".base_layer.", "."): x for name, x in weights.items() if not LORA.fullmatch(name)}
    for layer, pair in factors.items():
        if pair.keys() != {"A", "B"} or f"{layer}.weight" not in merged:
            raise ValueError(f"The LoRA of {layer} must have A, B and the weight that they change.")
        old = merged[f"{layer}.weight"]
        product = pair["B"].float() @ pair["A"].float()
        merged[f"{layer}.weight"] = (old + LORA_ALPHA / len(pair["A"]) * product).to(old.dtype)
    return merged


def build_backbone(path: str | Path, base: str | Path, weights: dict[str, Tensor]):
    """Build the model from the config of `base` and the weights; raise ValueError if they do not match."""
    config = AutoConfig.from_pretrained(base)
    if config.tie_word_embeddings and not same(weights, "embed_tokens.weight", "lm_head.weight"):
        config.tie_word_embeddings = False  # LoRA has changed one of them
    weights = {name: x for name, x in weights.items() if not OLD_BUFFERS.search(name)}
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, found = model_class.from_pretrained(
        None, config=config, state_dict=weights, ignore_mismatched_sizes=True, output_loading_info=True
    )
    wrong = {kind: sorted(map(str, names)) for kind, names in found.items() if names}
    if wrong:
        words = "; ".join(f"{kind.replace('_', ' ')}: {', '.join(names[:3])}" for kind, names in wrong.items())
        raise ValueError(
            f"{path} does not hold the weights of {base} ({words}). --base must be the model that it was trained around."
        )
    return model


def same(weights, *ends):
    """Return whether the tensors with these name suffixes are equal, or one is missing."""
    tensors = [x for end in ends for name, x in weights.items() if name.endswith(end)]
    return len(tensors) < len(ends) or torch.equal(*tensors)


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
