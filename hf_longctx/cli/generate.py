"""Continue a prompt, printing tokens as they come.

Examples:
  hf-longctx generate model_cards/fox-demo "The import statement" --max-new-tokens 20
  echo "The import statement" | hf-longctx generate model_cards/fox-demo - --temperature 0.8 --top-p 0.9
"""

import math
import sys

from . import shared


def add_arguments(parser):
    shared.add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from standard input")
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="share of probability sampled from")


def check(args, prompt):
    """Raise ValueError for what would fail, or be ignored, only after the model has been loaded."""
    if not prompt.strip():
        raise ValueError("the prompt is empty; give the text to continue in quotes.")
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {args.max_new_tokens}; it must be at least 1.")
    if not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise ValueError(
            f"--temperature is {args.temperature}; it must be 0 (greedy) or a positive number such as 0.8."
        )
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p is {args.top_p}; it must lie above 0 and be at most 1.")
    if args.top_p < 1 and args.temperature == 0:
        raise ValueError(f"--top-p {args.top_p} needs sampling; give a --temperature above 0.")


def run(args):
    prompt = sys.stdin.read().rstrip("\n") if args.prompt == "-" else args.prompt
    check(args, prompt)
    import torch
    from transformers import TextStreamer

    model, tokenizer = shared.load_model(args)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    sampling = {"do_sample": args.temperature > 0}
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_p": args.top_p}
    torch.manual_seed(args.seed)
    model.generate(
        **inputs,
        **sampling,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, clean_up_tokenization_spaces=False, skip_special_tokens=True),
    )
