"""Read a document once, and answer questions about it from an HMT's memory.

MODEL is an HMT, or any other causal language model. The latter works without training: each question re-reads the
passage of the document that matches it best (--retriever recall_tokens). DOCUMENT can also be a saved memory: a file,
or NAMESPACE/NAME@REVISION on the Hub. A saved memory works only with the weights of the model that saved it.
`hf upload NAMESPACE/NAME FILE` shares a memory.

The memory of a document is cached, so that the next command about the same document and model answers in seconds.
While the model reads, the memory is saved every minute, and the same command resumes from it.

If the tokenizer has a chat template, a QUESTION is the user's turn. Otherwise, the model continues it.

Examples:
  hf-longctx read MODEL novel.txt "Who is Mr Darcy?" "Where does he live?"
  hf-longctx read MODEL novel.txt "The name of the ship is" --no-chat --temperature 0
  hf-longctx read MODEL novel.txt --output state.safetensors
  hf-longctx read MODEL state.safetensors "Who is Mr Darcy?"
  cat *.txt | hf-longctx read MODEL -
"""

import sys
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from pathlib import Path
from typing import Any

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    parser.add_argument(
        "document",
        metavar="DOCUMENT",
        help="one of: a text file, folder of text files, table or dataset (see `hf-longctx loss --help`); a saved "
        'memory; "-" for standard input',
    )
    parser.add_argument(
        "questions",
        nargs="*",
        metavar="QUESTION",
        help="questions about the document, or texts that continue the document. Each one is answered independently",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="file for the memory (default: a file in $HF_HOME/hf_longctx/read, named after the document, tokenizer, "
        "weights and settings)",
    )
    parser.add_argument(
        "--retriever",
        choices=("recall_tokens", "neural_cache", "bank"),
        help="what a model that is not an HMT recalls: tokens that match the question; predictions after similar "
        "tokens; the mean of memory embeddings (default: recall_tokens)",
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
        "--chat",
        action=BooleanOptionalAction,
        help="format QUESTION with the chat template, as the user's turn (default: if the tokenizer has a template)",
    )


def run(args: Namespace) -> None:
    import torch

    from ..corpus import load_text
    from ..hmt import HMTWrapper
    from ..hmt.reading import cache_path, load_state, read_text, wrap
    from ..tokenization import tokenizer_hash

    if args.temperature is not None and args.temperature < 0:
        raise ValueError(f"--temperature must be at least 0, got {args.temperature}.")
    saved = args.document.endswith(".safetensors") or ("@" in args.document and not Path(args.document).exists())
    if saved and (not args.questions or args.output is not None):
        raise ValueError(f"{args.document} is a saved memory. Give a QUESTION about it, and omit --output.")
    text = ""
    name = "standard input" if args.document == "-" else Path(args.document).name
    if not saved:
        text = sys.stdin.read() if args.document == "-" else load_text(args.document)
    model, tokenizer = shared.load_weights(args), shared.load_tokenizer(args)
    filler = None
    if args.retriever is not None or not isinstance(model, HMTWrapper):
        torch.manual_seed(args.seed)  # the memory's parameters are random
        model = wrap(model, args.retriever or "recall_tokens")
        filler = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    prompts = [encode(args, tokenizer, question) for question in args.questions]
    if saved:
        state = load_state(args.document, model)
    else:
        output = args.output or cache_path(model, tokenizer_hash(tokenizer), text)
        state = read_text(model, tokenizer, text, output, name=name, progress=True, filler=filler)
        if not prompts or args.output:
            print(f"{state.position:,} tokens of {name} in {len(state.segments()[0]):,} memories\nwrote {output}")
    for question, (inputs, searched) in zip(args.questions, prompts):
        answer(args, model, tokenizer, question, inputs, state, None if filler is None else searched)


def encode(args: Namespace, tokenizer: Any, question: str) -> tuple[Any, int]:
    """Tokenize a question: as a user's turn with a chat template, otherwise without special tokens.

    Returns:
        ids of the prompt (1, T), and the number of these ids up to the end of the question.
    """
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if args.chat and not has_template:
        raise ValueError(f"--chat needs a chat template, but the tokenizer of {args.model} does not have one.")
    args.chat = has_template if args.chat is None else args.chat
    if not args.chat:
        ids = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return ids, ids.shape[1]

    def turn(content: str) -> Any:
        message = [{"role": "user", "content": content}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        return tokenizer.apply_chat_template(message, **options)["input_ids"]

    ids = turn(question)
    pairs = zip(reversed(ids[0].tolist()), reversed(turn(f"{question} Why?")[0].tolist()))
    after = next((i for i, (x, y) in enumerate(pairs) if x != y), 0)  # the end of the template is the same
    return ids, max(1, ids.shape[1] - after)


def answer(
    args: Namespace, model: Any, tokenizer: Any, question: str, inputs: Any, state: Any, searched: int | None
) -> None:
    """Print the model's answer to a question about the document in `state`; see `encode` and `reading.ask`."""
    import torch
    from transformers import TextStreamer

    from ..hmt.reading import ask

    config, start = model.generation_config, time.monotonic()
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
    if args.chat:
        print(question)
    streamer = TextStreamer(
        tokenizer, skip_prompt=args.chat, clean_up_tokenization_spaces=False, skip_special_tokens=True
    )
    options = {"max_new_tokens": args.max_new_tokens, "logits_processor": [refuse_nan], "streamer": streamer}
    inputs = inputs.to(model.device)
    if searched is None:
        model.generate(inputs, state=state, **options)
    else:
        ask(model, state, inputs, searched, **options)
    shared.log(f"answered in {time.monotonic() - start:.1f} s")
