"""Read a document once into an HMT's memory, and answer a question about it.

Without QUESTION, the memory is saved to --output every minute, and the same command resumes from this file. TEXT can
also be a saved memory: a file, or NAMESPACE/NAME@REVISION on the Hub. A saved memory works only with the
weights of the model that saved it. `hf upload NAMESPACE/NAME FILE` shares a memory.

With --chat, QUESTION is the user's turn in the model's chat template. Without --chat, the model continues QUESTION.

Examples:
  hf-longctx read MODEL novel.txt --output state.safetensors
  hf-longctx read MODEL state.safetensors "Who is Mr Darcy?" --chat
  hf-longctx read MODEL novel.txt "The name of the ship is" --temperature 0
  cat *.txt | hf-longctx read MODEL -
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    parser.add_argument(
        "text",
        metavar="TEXT",
        help="one of: a text file, folder of text files, table or dataset (see `hf-longctx loss --help`); a saved "
        'memory; "-" for standard input',
    )
    parser.add_argument(
        "question",
        nargs="?",
        metavar="QUESTION",
        help="question about the document, or text that continues the document",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file for the memory. Without QUESTION, the default is state.safetensors. With QUESTION, the memory is "
        "not saved by default",
    )
    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum answer length, in tokens (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="sampling temperature; 0 decodes greedily (default: from generation_config.json)",
    )
    group.add_argument(
        "--chat", action="store_true", help="format QUESTION with the chat template, as the user's turn"
    )


def run(args: Namespace) -> None:
    from ..corpus import load_text
    from ..hmt.reading import load_state, read_text

    if args.temperature is not None and args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}.")
    saved = args.text.endswith(".safetensors") or ("@" in args.text and not Path(args.text).exists())
    if saved and (args.question is None or args.output is not None):
        raise ValueError(f"{args.text} is a saved memory. Give a QUESTION about it, and omit --output.")
    output = args.output or ("state.safetensors" if args.question is None else None)
    text, name = "", "standard input" if args.text == "-" else Path(args.text).name
    if not saved:
        text = sys.stdin.read() if args.text == "-" else load_text(args.text)
    model, tokenizer = shared.load_weights(args), shared.load_tokenizer(args)
    inputs = None if args.question is None else encode(args, tokenizer)
    if saved:
        state = load_state(args.text, model)
    else:
        state = read_text(model, tokenizer, text, output, name=name, progress=True)
        if output is not None:
            print(f"{state.position:,} tokens of {name} in {len(state.segments()[0]):,} memories\nwrote {output}")
    if inputs is not None:
        answer(args, model, tokenizer, inputs, state)


def encode(args: Namespace, tokenizer: Any) -> Any:
    """Tokenize the question: as a user's turn with --chat, otherwise without special tokens."""
    if not args.chat:
        return tokenizer(args.question, return_tensors="pt", add_special_tokens=False)
    turn = [{"role": "user", "content": args.question}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def answer(args: Namespace, model: Any, tokenizer: Any, inputs: Any, state: Any) -> None:
    """Print the model's answer to a question about the document in `state`."""
    import torch
    from transformers import TextStreamer

    config = model.generation_config
    if args.temperature == 0:
        config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
    elif args.temperature is not None:
        config.update(do_sample=True, temperature=args.temperature)

    def refuse_nan(ids, logits):
        if logits.isnan().any():
            raise ValueError(
                f"{args.model} returned NaN logits after {ids.shape[1]} tokens. Look for damaged weights, or give "
                "--dtype float32."
            )
        return logits

    torch.manual_seed(args.seed)
    model.generate(
        **inputs.to(model.device),
        state=state,
        max_new_tokens=args.max_new_tokens,
        logits_processor=[refuse_nan],
        streamer=TextStreamer(
            tokenizer, skip_prompt=args.chat, clean_up_tokenization_spaces=False, skip_special_tokens=True
        ),
    )
