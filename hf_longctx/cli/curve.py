"""Measure how far a causal language model remembers: its forgetting curve (Liu et al. 2024).

Writes OUTPUT.json and OUTPUT.png and prints the fine length (copying above 99 %) and the coarse length (copying at
least 1 % better than guessing from the language). An interrupted run keeps the lengths it has measured, and with
--journal goes on from there. Under torchrun or accelerate launch, the processes share the work.

Examples:
  hf-longctx curve gpt2 --text book.txt
  hf-longctx curve model_cards/fox-demo --max-length 64 --points 3 --repeats 2 --output fox
  hf-longctx curve MODEL --protocol adaptive --journal curve.jsonl
  hf-longctx curve MODEL --endpoint http://localhost:8000/v1
"""

from functools import partial

from . import shared


def add_arguments(parser):
    shared.add_served(shared.add_model(parser))
    group = parser.add_argument_group("curve")
    shared.add_text(group)
    group.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="longest passage (default: half the claimed context)"
    )
    group.add_argument(
        "--points", type=int, metavar="N", help="lengths to measure (default: 16; 32 for the adaptive protocol)"
    )
    group.add_argument("--log-lengths", action="store_true", help="space the lengths logarithmically")
    shared.add_repeats(group, "passages per length")
    group.add_argument(
        "--data-type", choices=("order", "random"), default="order", help="running text or random tokens"
    )
    group.add_argument(
        "--protocol",
        choices=("reference", "nested", "adaptive"),
        default="reference",
        help="reference: the paper's program, token for token (default); nested: faster, another estimate of the curve; "
        "adaptive: measures only what its two lengths depend on",
    )
    shared.add_train_length(group)
    run = shared.add_run(parser, output="forgetting_curve")
    run.add_argument("--eos-token-id", type=int, metavar="ID", help="default: the tokenizer's")
    run.add_argument(
        "--tokens-per-pass", type=int, metavar="N", help="memory budget (default: 512 on a CPU, 4096 elsewhere)"
    )


def run(args):
    from ..metrics import Run, forgetting_curve, linear_lengths, log_lengths
    from ..metrics.curve.protocol import default_lengths

    reader, tokenizer = shared.load_reader(args)
    tokens = corpus_name = None
    if args.data_type == "order":
        tokens, corpus_name = shared.load_corpus(args, tokenizer, args.max_length or reader.claimed_context)
    grid = log_lengths if args.log_lengths else linear_lengths
    points = shared.coalesce(args.points, 32 if args.protocol == "adaptive" else 16)
    if args.max_length is None:
        lengths = default_lengths(reader.claimed_context, None if tokens is None else len(tokens), points, grid)
        shared.say(f"measuring up to {lengths[-1]} tokens (choose another end with --max-length)")
    else:
        lengths = grid(args.max_length, points)

    measure = partial(
        forgetting_curve,
        reader,
        tokens,
        lengths=lengths,
        repeats=args.repeats,
        seed=args.seed,
        bos_token_id=shared.coalesce(args.bos_token_id, tokenizer.bos_token_id),
        eos_token_id=shared.coalesce(args.eos_token_id, tokenizer.eos_token_id),
        data_type=args.data_type,
        protocol=args.protocol,
        tokenizer=tokenizer,
        corpus_name=corpus_name,
        train_length=args.train_length,
        run=Run(args.journal, args.tokens_per_pass, progress=True),
    )
    shared.write_measured(args, measure, train_length=args.train_length)
