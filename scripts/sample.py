"""Write a model's sample.json: a generated sample for its card.

    python -m scripts.sample model_cards/fox-demo "She looked at him, and" --max-new-tokens 60

The model's generation_config.json determines whether it samples.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_longctx  # noqa: F401 (registers FoX and HMT)


def sample(name: str, prompt: str, max_new_tokens: int, seed: int = 0) -> dict:
    """Return the prompt, the generated text and tokens, and the settings to reproduce them on a CPU."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(name).eval(), AutoTokenizer.from_pretrained(name)
    config = model.generation_config
    config.update(max_new_tokens=max_new_tokens, max_length=None)
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    inputs = tokenizer(prompt, return_tensors="pt")
    torch.manual_seed(seed)
    new = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
    computed = {"model": name, "dtype": str(model.dtype).removeprefix("torch."), "device": "cpu", "seed": seed}
    return {
        "prompt": prompt,
        "text": tokenizer.decode(new, clean_up_tokenization_spaces=False, skip_special_tokens=True),
        "tokens": new.tolist(),
        "settings": computed | config.to_diff_dict(),
    }


def write(folder: Path, name: str, prompt: str, max_new_tokens: int) -> None:
    """Write the sample.json of model `name` to `folder`."""
    document = sample(name, prompt, max_new_tokens)
    (folder / "sample.json").write_text(json.dumps(document, ensure_ascii=False) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", help="folder of the model, where sample.json is written")
    parser.add_argument("prompt", metavar="PROMPT", help="prompt")
    parser.add_argument(
        "--max-new-tokens", type=int, default=60, metavar="N", help="number of tokens to generate (default: 60)"
    )
    args = parser.parse_args()
    write(Path(args.folder), args.folder, args.prompt, args.max_new_tokens)


if __name__ == "__main__":
    main()
