"""Ask an HMT about a text: read it into the memory, then answer.

TEXT may be the file that `hf-longctx read` has saved, or such a file on the Hub, NAMESPACE/NAME@REVISION; then nothing
is read. With --chat the question is the user's turn in the model's chat template; without, the model continues it.

Examples:
  hf-longctx ask MODEL novel.txt "Who is Mr Darcy?" --chat
  hf-longctx ask MODEL state.safetensors "The name of the ship is" --temperature 0
"""

from argparse import ArgumentParser, Namespace

from . import generate, read, shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    read.add_text(parser)
    parser.add_argument("prompt", metavar="QUESTION", help="- reads it from standard input")
    generate.add_generation(parser)
    parser.set_defaults(json=False, state=None)


def run(args: Namespace) -> None:
    from pathlib import Path

    from ..hmt.reading import load_state, read_text

    if args.text == args.prompt == "-":
        raise ValueError("TEXT and QUESTION cannot both be read from standard input; put one of them in a file.")
    question = generate.read_prompt(args)
    generate.check(args, question)
    saved = args.text.endswith(".safetensors") or ("@" in args.text and not Path(args.text).exists())
    text, name = ("", "") if saved else read.read_source(args.text)
    model, tokenizer = shared.load_model(args)
    state = load_state(args.text, model) if saved else read_text(model, tokenizer, text, name=name, progress=True)
    generate.respond(args, model, tokenizer, question, state)
