"""Run lm-eval with our tasks. Our model type hf-longctx supports FoX and HMT.

All arguments after `lm-eval` are passed to lm-eval; see `hf-longctx lm-eval run --help`. --metadata accepts a JSON
object with the options of the task's command, such as "lengths" or "text".

--tasks-folder prints the folder of our tasks. For lm-eval's own model types, such as hf, vllm and local-completions,
pass this folder to the command `lm_eval` with --include_path.

Examples:
  hf-longctx lm-eval run --model hf-longctx --model_args pretrained=model_cards/fox-demo --tasks forgetting_curve,lines
  hf-longctx lm-eval --tasks-folder
"""

import argparse
import re
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks-folder", action="store_true", help="print the folder of our tasks and exit")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="run ...", help="arguments for lm-eval")


def run(args: argparse.Namespace) -> None:
    from ..lm_eval import tasks_folder

    if args.tasks_folder:
        print(tasks_folder())
        return
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ImportError("lm-eval is missing: pip install 'hf-longctx[lm-eval]'") from error
    from ..lm_eval import model  # noqa: F401 - importing the model registers its type

    # lm-eval spells its options with underscores
    words = [re.sub("^--[a-z0-9-]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in args.words]
    if words[:1] == ["run"] and not {"-h", "--help", "--include_path"} & set(words):
        words += ["--include_path", str(tasks_folder())]
    before = sys.argv
    sys.argv = ["lm_eval", *words]
    try:
        cli_evaluate()
    finally:
        sys.argv = before
