"""Continue a prompt, printing tokens as they come.

Examples:
  hf-longctx generate model_cards/fox-demo "The import statement" --max-new-tokens 20
"""

from . import shared


def add_arguments(parser):
    shared.add_model(parser)
    parser.add_argument("prompt", metavar="PROMPT")
    group = parser.add_argument_group("generation")
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="default: %(default)s")
    group.add_argument("--temperature", type=float, default=0.0, help="0 = greedy (default)")


def run(args):
    import torch
    from transformers import TextStreamer

    model, tokenizer = shared.load_model(args)
    if not args.prompt.strip():
        raise ValueError("the prompt is empty; give the text to continue in quotes.")
    inputs = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    sampling = dict(do_sample=True, temperature=args.temperature) if args.temperature > 0 else dict(do_sample=False)
    torch.manual_seed(args.seed)
    model.generate(
        **inputs,
        **sampling,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, clean_up_tokenization_spaces=False),
    )
