"""Read a text into the memory of an HMT, once, and save what it remembers.

Questions about the text then take as long as they are themselves: `hf-longctx ask MODEL FILE QUESTION`.
Only the weights that read the text understand the file, and others refuse it. FILE is saved every minute, and the same
command goes on from it. `hf-longctx push FILE NAMESPACE/NAME` shares it.

Examples:
  hf-longctx read MODEL novel.txt --output state.safetensors
  cat *.txt | hf-longctx read MODEL - --output state.safetensors
"""

import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

from . import shared


def add_arguments(parser: ArgumentParser) -> None:
    shared.add_model(parser)
    add_text(parser)
    parser.add_argument(
        "--output", default="state.safetensors", metavar="FILE", help="file to write (default: %(default)s)"
    )


def add_text(parser: ArgumentParser) -> None:
    """Add the text to read; see `read_source`."""
    help = "text file, folder of them, table or dataset, as for `hf-longctx loss --text`; - reads standard input"
    parser.add_argument("text", metavar="TEXT", help=help)


def read_source(source: str) -> tuple[str, str]:
    """Return a text and its name, which holds no folder."""
    from ..corpus import load_text

    if source != "-":
        return load_text(source), Path(source).name
    try:
        return sys.stdin.read() if sys.stdin else "", "standard input"
    except UnicodeError as error:
        raise ValueError(f"the text is not UTF-8 ({error}). Convert it, as by: iconv -t UTF-8.") from None


def run(args: Namespace) -> None:
    from ..hmt.reading import read_text

    text, name = read_source(args.text)
    model, tokenizer = shared.load_model(args)
    commit = getattr(model.config, "_commit_hash", None)
    state = read_text(model, tokenizer, text, args.output, name=name, revision=commit, progress=True)
    memories = len(state.segments()[0])
    print(f"{state.position:,} tokens of {name} in {memories:,} memories\nwrote {args.output}")
