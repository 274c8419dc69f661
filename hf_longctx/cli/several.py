"""Hide several facts in long texts, ask for all of them, and count how many the model names, as RULER does.

The task `needles` hides numbers of one name in a text (RULER's niah_multivalue), `variables` chains of assignments,
VAR B = VAR A, among a few sentences over and over (RULER's variable tracking), after a solved example. The model
replies, and a fact is found if it stands in the reply. The wording is not RULER's. Writes OUTPUT.json and OUTPUT.png.

Examples:
  hf-longctx several gpt2 --text book.txt
  hf-longctx several MODEL --task variables --hops 4 --lengths 4096 8192 --chat-template
  hf-longctx several model_cards/fox-demo --task variables --lengths 700 --repeats 2
"""

import argparse
from functools import partial

from . import measuring, shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_served(shared.add_model(parser))
    group = parser.add_argument_group("facts")
    group.add_argument("--task", choices=("needles", "variables"), default="needles", help="(default: %(default)s)")
    measuring.add_text(group)
    group.add_argument("--needles", type=int, default=4, metavar="N", help="numbers to find (default: %(default)s)")
    group.add_argument("--chains", type=int, default=1, metavar="N", help="of variables (default: %(default)s)")
    group.add_argument(
        "--hops", type=int, default=4, metavar="N", help="assignments in a chain (default: %(default)s)"
    )
    group.add_argument(
        "--lengths",
        action=measuring.Numbers,
        nargs="+",
        metavar="TOKENS",
        help="of prompt and reply (default: a quarter, half and all of the claimed context)",
    )
    measuring.add_repeats(group, "prompts of each length")
    measuring.add_chat_template(group)
    measuring.add_train_length(group)
    measuring.add_run(parser, output="several")


def run(args: argparse.Namespace) -> None:
    from ..metrics import Run, several_facts
    from ..metrics.report.defaults import NO_CLAIM

    measuring.check(args)
    tokenizer, claimed, open_reader = measuring.open_model(args)
    lengths = args.lengths or [(claimed or NO_CLAIM) // part for part in (4, 2, 1)]
    tokens = corpus_name = None
    if args.text is not None or args.task == "needles":
        tokens, corpus_name = measuring.load_corpus(args.text, tokenizer, lengths[-1])
    measure = partial(
        several_facts,
        open_reader(),
        tokenizer,
        tokens,
        lengths=lengths,
        needles=args.needles if args.task == "needles" else None,
        chains=args.chains,
        hops=args.hops,
        repeats=args.repeats,
        chat_template=args.chat_template,
        seed=args.seed,
        bos_token_id=measuring.default(args.bos_token_id, tokenizer.bos_token_id),
        corpus_name=corpus_name,
        train_length=args.train_length,
        run=Run(args.journal, progress=True),
    )
    measuring.measure_and_write(args, measure, train_length=args.train_length)
