"""Measure how far a causal language model remembers: its forgetting curve (Liu et al. 2024).

Writes OUTPUT.json and OUTPUT.png and prints the fine length (copying above 99 %) and the coarse length (copying at
least 1 % better than guessing from the language). An interrupted run keeps the lengths it has measured, and with
--journal goes on from there. Under torchrun or accelerate launch, the processes share the work.

Examples:
  hf-longctx curve gpt2 --text book.txt
  hf-longctx curve model_cards/fox-demo --max-length 64 --points 3 --repeats 2 --output fox
  hf-longctx curve MODEL --preset paper --dry-run
  hf-longctx curve MODEL --protocol adaptive --journal curve.jsonl
  hf-longctx curve MODEL --endpoint http://localhost:8000/v1
"""

import argparse
import os
from functools import partial
from typing import TYPE_CHECKING

from . import measuring, shared


if TYPE_CHECKING:
    from ..metrics import Reader


PAPER_POINTS = 32
DEFAULTS = {"log_lengths": False, "protocol": "reference", "repeats": 10}  # of options that may exclude others
TIMED_TOKENS = 512  # most in the input that --dry-run times, where a length is as short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    measuring.add_served(shared.add_model(parser))
    group = parser.add_argument_group("curve")
    measuring.add_text(group)
    group.add_argument(
        "--lengths",
        action=measuring.Numbers,
        nargs="+",
        metavar="TOKENS",
        help="the passages' lengths themselves, such as 500,1000,2000",
    )
    group.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="longest passage (default: half the claimed context)"
    )
    group.add_argument(
        "--points", type=int, metavar="N", help="lengths to measure (default: 16; 32 for the adaptive protocol)"
    )
    group.add_argument("--log-lengths", action="store_true", help="space the lengths logarithmically")
    group.add_argument(
        "--preset",
        choices=("paper",),
        help="paper: the lengths l/32, 2l/32 ... l of Liu et al., l being the claimed context or --max-length; the model "
        "reads twice as many tokens",
    )
    measuring.add_repeats(group, "passages per length")
    group.add_argument(
        "--data-type", choices=("order", "random"), default="order", help="running text or random tokens"
    )
    group.add_argument(
        "--id-range", type=int, nargs=2, metavar=("LOW", "HIGH"), help="of random tokens (default: 10 to the last id)"
    )
    group.add_argument(
        "--irrelevant-text",
        metavar="SOURCE",
        help="where the unrelated text comes from, named as --text is (default: the end of --text)",
    )
    group.add_argument(
        "--protocol",
        choices=("reference", "adaptive"),
        default="reference",
        help="reference: the paper's program, token for token (default); "
        "adaptive: measures only what its two lengths depend on",
    )
    group.add_argument("--confidence", type=float, metavar="P", help="of the adaptive protocol (default: 0.95)")
    measuring.add_train_length(group)
    run = measuring.add_run(parser, output="forgetting_curve")
    run.add_argument("--eos-token-id", type=int, metavar="ID", help="default: the tokenizer's")
    run.add_argument(
        "--tokens-per-pass", type=int, metavar="N", help="memory budget (default: 512 on a CPU, 4096 elsewhere)"
    )
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="measure nothing: print the lengths, the tokens to read, and the time, estimated from one timed input",
    )


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError where options exclude each other."""
    excluded = []
    if args.preset == "paper":
        excluded.append(("--preset paper", ("points", "log_lengths", "lengths", "protocol", "repeats")))
    if args.lengths is not None:
        excluded.append(("--lengths", ("points", "log_lengths", "max_length")))
    if args.data_type == "random":
        excluded.append(("--data-type random", ("text", "irrelevant_text")))
    if args.data_type == "order":
        excluded.append(("--data-type order", ("id_range",)))
    if args.protocol != "adaptive":
        excluded.append((f"--protocol {args.protocol}", ("confidence",)))
    for option, names in excluded:
        for name in names:
            if getattr(args, name) != DEFAULTS.get(name):
                raise ValueError(f"{option} and --{name.replace('_', '-')} exclude each other; drop one.")


def choose_lengths(args: argparse.Namespace, claimed: int | None, corpus_tokens: int | None) -> list[int]:
    """Return the lengths to measure; `corpus_tokens` is None for random data."""
    from ..metrics import linear_lengths, log_lengths
    from ..metrics.curve.protocol import default_lengths

    if args.lengths is not None:
        return args.lengths
    if args.preset is not None:
        longest = measuring.default(args.max_length, claimed)
        if longest is None:
            raise ValueError(
                f"{args.model} claims no context, which --preset paper measures up to: give --max-length."
            )
        return sorted({max(1, longest * i // PAPER_POINTS) for i in range(1, PAPER_POINTS + 1)})
    grid = log_lengths if args.log_lengths else linear_lengths
    points = measuring.default(args.points, 32 if args.protocol == "adaptive" else 16)
    if args.max_length is not None:
        return grid(args.max_length, points)
    lengths = default_lengths(claimed, corpus_tokens, points, grid, args.repeats)
    measuring.log(f"measuring up to {lengths[-1]} tokens (choose another end with --max-length or --lengths)")
    return lengths


def run(args: argparse.Namespace) -> None:
    from ..metrics import Run, forgetting_curve
    from ..metrics.checks import check_lengths
    from ..metrics.curve.measure import check_choices
    from ..metrics.curve.protocol import order_samples
    from ..metrics.run.distributed import process_rank

    measuring.check(args)
    check_options(args)
    confidence = measuring.default(args.confidence, 0.95)
    check_choices(args.data_type, args.protocol, confidence)
    if args.lengths is not None:
        check_lengths(args.lengths)
    tokenizer, claimed, open_reader = measuring.open_model(args)
    corpus = irrelevant = None
    if args.data_type == "order":
        longest = args.lengths[-1] if args.lengths else args.max_length or claimed
        corpus = measuring.load_corpus(args.text, tokenizer, longest)
        irrelevant = args.irrelevant_text and measuring.load_corpus(args.irrelevant_text, tokenizer, longest)
    lengths = choose_lengths(args, claimed, corpus and len(corpus.tokens))
    if corpus is not None:  # says now whether the texts are long enough
        order_samples(corpus.tokens, lengths, args.repeats, args.seed, irrelevant and irrelevant.tokens)
    reader = open_reader()
    if args.dry_run:
        text = dry_run(reader, lengths, args)
        if process_rank() == 0:
            print(text)
        return
    measure = partial(
        forgetting_curve,
        reader,
        corpus and corpus.tokens,
        lengths=lengths,
        repeats=args.repeats,
        seed=args.seed,
        bos_token_id=measuring.default(args.bos_token_id, tokenizer.bos_token_id),
        eos_token_id=measuring.default(args.eos_token_id, tokenizer.eos_token_id),
        data_type=args.data_type,
        irrelevant_tokens=irrelevant and irrelevant.tokens,
        irrelevant_name=irrelevant and irrelevant.name,
        id_range=args.id_range,
        protocol=args.protocol,
        confidence=confidence,
        tokenizer=tokenizer,
        corpus_name=corpus and corpus.name,
        train_length=args.train_length,
        run=Run(args.journal, args.tokens_per_pass, progress=True),
    )
    measuring.measure_and_write(args, measure, train_length=args.train_length)


def dry_run(reader: "Reader", lengths: list[int], args: argparse.Namespace) -> str:
    """Return what would be read, and how long that takes by the time of one input of a short length."""
    import time

    import numpy as np

    from ..metrics.curve.adaptive import BUDGET
    from ..metrics.curve.protocol import input_tokens, scored_logits

    tokens = 2 * args.repeats * sum(map(input_tokens, lengths))
    cost = 2 * args.repeats * sum(reader.cost(input_tokens(length)) for length in lengths)
    if args.protocol == "adaptive":
        tokens = min(tokens, BUDGET * input_tokens(lengths[-1]))
        cost = min(cost, BUDGET * reader.cost(input_tokens(lengths[-1])))
    length = max([n for n in lengths if input_tokens(n) <= TIMED_TOKENS], default=lengths[0])
    ids = np.random.default_rng(args.seed).integers(0, int(min(reader.vocab_size, 2**15)), input_tokens(length))
    with reader.reading(ids, args.tokens_per_pass):
        for _ in range(2):  # the first one warms up
            start = time.perf_counter()
            reader.predict(ids[None], 0, scored_logits(length))
            seconds = time.perf_counter() - start
    seconds *= cost / reader.cost(len(ids))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    return (
        f"lengths: {', '.join(map(str, lengths))}\n"
        f"tokens to read: at most {tokens:,}, as beginnings that inputs share are read once\n"
        f"time: at most about {duration(seconds / processes)}, estimated from one input of {len(ids):,} tokens"
    )


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(0.2), duration(200), duration(9000)
    ('1 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
