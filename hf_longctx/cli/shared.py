"""What several commands have in common: naming a model, loading it, reading a text."""


def add_model(parser):
    """Arguments that name a model and how to run it; see `load_model`."""
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a causal language model")
    parser.add_argument("--dtype", default="auto", help="auto (the checkpoint's), float32, bfloat16, float16")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps ... (default: an accelerator if there is one)")
    parser.add_argument("--trust-remote-code", action="store_true", help="run model code that comes with the weights")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed (default: %(default)s)")


def add_text(parser):
    """Argument that names a text for `hf_longctx.corpus.load_text`."""
    parser.add_argument(
        "--text", metavar="SOURCE", help="text file, folder of *.txt or dataset name (default: English from CPython)"
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


def tokenize(tokenizer, text, source):
    """Ids of a text, without special tokens; `source` names it in the error if the tokenizer does not know its language."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if len(set(tokens)) < 2:
        raise ValueError(
            f"the tokenizer turns {source or 'the text'} into {len(tokens)} tokens with {len(set(tokens))} distinct ids; "
            "it does not seem to know this language."
        )
    return tokens
