"""Convert a checkpoint to FoX or HMT, or a FoX back.

official: the FoX of its authors. fla: flash-linear-attention. llama: a Llama, Mistral, Qwen2 or Qwen3, which gets open
forget gates and can then be fine-tuned. hmt: a file model_weights_*.pth of the official HMT code, such as those of
OswaldHe123/hmt_pretrained, or of RMT. Weights of a FoX pass through memory one tensor at a time. DST appears when it
is complete.

Examples:
  hf-longctx convert official_checkpoint fox --from official
  hf-longctx convert fox fla_checkpoint --to fla
  hf-longctx convert llama fox --from llama --decay-time 1e6
  hf-longctx convert weights_700.pth hmt --from hmt --base facebook/opt-350m --segment-length 990 --sensory-tokens 32
"""

import math
from argparse import ArgumentParser, Namespace
from pathlib import Path


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder with config.json and safetensors files; hmt: a file")
    parser.add_argument("destination", metavar="DST", help="folder to make")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from",
        dest="source_format",
        default="fox",
        choices=("official", "fla", "llama", "hmt"),
        help="make a FoX of this, or an HMT",
    )
    direction.add_argument(
        "--to", dest="destination_format", default="fox", choices=("official", "fla"), help="make this of a FoX"
    )
    parser.add_argument(
        "--decay-time",
        type=float,
        metavar="TOKENS",
        help="llama: how soon the new gates forget by a factor e (default: 1e5 contexts, hardly ever)",
    )
    group = parser.add_argument_group("hmt, whose files do not say with what they were trained")
    group.add_argument("--base", metavar="MODEL", help="folder or Hub name of the model that was wrapped")
    group.add_argument(
        "--segment-length",
        type=int,
        metavar="TOKENS",
        help="new tokens of a segment: the official segment_length, less 2, less num_sensory",
    )
    group.add_argument("--sensory-tokens", type=int, metavar="TOKENS", help="the official num_sensory; 0 for RMT")
    group.add_argument(
        "--memory-size", type=int, metavar="N", help="the official mem_recall_context (default: its default, 100)"
    )
    group.add_argument(
        "--text", metavar="TEXT", help="file whose perplexity is told, as published and without looking ahead"
    )


def run(args: Namespace) -> None:
    names = ("base", "segment_length", "sensory_tokens", "memory_size", "text")
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None]
    if args.decay_time is not None and args.source_format != "llama":
        raise ValueError("--decay-time is for --from llama; other checkpoints have gates of their own.")
    if args.source_format == "hmt":
        convert_hmt(args)
        return
    if given:
        raise ValueError(f"{', '.join(given)}: for --from hmt only.")
    from ..fox import convert_folder

    convert_folder(args.source, args.destination, args.source_format, args.destination_format, args.decay_time)
    print(f"wrote {args.destination}")


def convert_hmt(args: Namespace) -> None:
    if None in (args.base, args.segment_length, args.sensory_tokens):
        raise ValueError(
            "--from hmt needs --base, --segment-length and --sensory-tokens, which the file does not hold. The scripts of the "
            "official code have 1024, 512 or 256 less 2 less 32 tokens, and 32."
        )
    from transformers import AutoTokenizer

    from ..fox.checkpoint_files import new_folder
    from ..hmt import load_official

    sizes = {"segment_length": args.segment_length, "sensory_tokens": args.sensory_tokens}
    if args.memory_size is not None:
        sizes["memory_size"] = args.memory_size
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.base)
        words = tokenizer("word", add_special_tokens=False)  # ty: ignore[not-callable] - never None
        if not words["input_ids"]:  # an empty one, made of config.json
            tokenizer = None
    except (OSError, ValueError):
        tokenizer = None
    if tokenizer is None and args.text is not None:
        raise ValueError(f"--text needs a tokenizer, and {args.base} has none that can be loaded.")
    with new_folder(Path(args.destination)) as folder:
        model = load_official(args.source, args.base, **sizes).eval()
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    print(f"wrote {args.destination}" + " without a tokenizer, as its base has none" * (tokenizer is None))
    if args.text is not None:
        tell_perplexity(model, tokenizer, args.text)


def tell_perplexity(model, tokenizer, text: str) -> None:
    """Print the perplexity of a text in both modes that have the published parameters."""
    import torch

    from ..corpus import load_tokens

    ids = torch.as_tensor(load_tokens(tokenizer, text).tokens)[None].long()
    model.config.loss_scope = "all"
    for mode, words in {"paper": "as published, looking ahead", "three_pass": "without looking ahead"}.items():
        model.config.recall_mode = mode
        with torch.no_grad():
            loss = model(ids, labels=ids, logits_to_keep=1).loss
        print(f"perplexity of {ids.shape[1]:,} tokens, {mode} ({words}): {math.exp(loss):.4g}")
