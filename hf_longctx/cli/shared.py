"""What several commands have in common: naming a model, loading it, reading a text."""

import sys


def add_model(parser):
    """Arguments that name a model and how to run it; see `load_model`."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: an accelerator if there is one)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the weights")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")


def add_text(parser, default="pg19 where a hub can be reached, else stdlib"):
    """Argument that names a text for `hf_longctx.corpus`."""
    parser.add_argument(
        "--text",
        metavar="SOURCE",
        help="text file, folder of *.txt, dataset name, pg19, or stdlib for English from CPython "
        f"(default: {default})",
    )


def load_model(args):
    """The model, on its device, in eval mode, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.device is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        args.device = "cpu" if accelerator is None else accelerator.type
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=args.dtype, trust_remote_code=args.trust_remote_code
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    except ValueError as error:
        raise ValueError(
            f"{args.model} holds a model but no tokenizer that can be loaded ({str(error).splitlines()[0]}). "
            f"Put one there: tokenizer.save_pretrained({args.model!r})."
        ) from error
    return model.to(args.device).eval(), tokenizer


def load_tokens(args, tokenizer, longest=None):
    """Ids of the text that `add_text` names, without special tokens; says which text it is.

    From a dataset no more documents are read than make a million tokens, or ten times the `longest` stretch needed.
    """
    from ..corpus import load_tokens

    corpus = load_tokens(tokenizer, args.text, at_least=max(1_000_000, 10 * (longest or 0)))
    print(f"text: {corpus.name}, {len(corpus.tokens)} tokens", file=sys.stderr)
    return corpus.tokens
