"""Measure how far a causal language model remembers: its forgetting curve (Liu et al. 2024).

Writes OUTPUT.json and OUTPUT.png and prints the fine length (copying above 99 %) and the coarse length (copying at
least 1 % better than guessing from the language). An interrupted run keeps the lengths it has measured, and with
--journal goes on from there. Under torchrun or accelerate launch, the processes share the work.
"""

from pathlib import Path

from . import shared


def add_arguments(parser):
    shared.add_model(parser)
    shared.add_endpoint(parser)
    shared.add_text(parser)
    parser.add_argument(
        "--max-length", type=int, metavar="TOKENS", help="longest passage (default: half the claimed context)"
    )
    parser.add_argument(
        "--points", type=int, metavar="N", help="lengths to measure (default: 16; 32 for the adaptive protocol)"
    )
    parser.add_argument("--log-lengths", action="store_true", help="space the lengths logarithmically")
    parser.add_argument(
        "--repeats", type=int, default=10, metavar="N", help="passages per length (default: %(default)s)"
    )
    parser.add_argument(
        "--data-type", choices=("order", "random"), default="order", help="running text or random tokens"
    )
    parser.add_argument(
        "--protocol",
        choices=("reference", "nested", "adaptive"),
        default="reference",
        help="reference: the paper's program, token for token (default); nested: faster, another estimate of the curve; "
        "adaptive: measures only what its two lengths depend on",
    )
    parser.add_argument(
        "--tokens-per-pass", type=int, metavar="N", help="memory budget (default: 512 on a CPU, 4096 elsewhere)"
    )
    parser.add_argument(
        "--journal", metavar="FILE", help="keep every finished part there; with the same FILE, a killed run goes on"
    )
    parser.add_argument("--bos-token-id", type=int, metavar="ID", help="default: the tokenizer's")
    parser.add_argument("--eos-token-id", type=int, metavar="ID", help="default: the tokenizer's")
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="context of training, marked in the picture"
    )
    parser.add_argument(
        "--output", default="forgetting_curve", metavar="PATH", help="without ending (default: %(default)s)"
    )


def run(args):
    from ..metrics import Run, forgetting_curve, linear_lengths, log_lengths
    from ..metrics.run.reader import reader_for

    rank = shared.join_processes()
    model, tokenizer = shared.load_model(args)
    claimed = reader_for(model).claimed_context
    tokens = None
    if args.data_type == "order":
        tokens = shared.load_tokens(args, tokenizer, args.max_length or claimed)
    longest = _default_max_length(claimed, tokens) if args.max_length is None else args.max_length
    grid = log_lengths if args.log_lengths else linear_lengths
    if args.points is None:
        args.points = 32 if args.protocol == "adaptive" else 16
    output = Path(args.output)
    output.parent.mkdir(parents=True, exist_ok=True)

    def write(result):
        if rank > 0:
            return
        result = shared.described(args, result)
        result.save(output.with_name(output.name + ".json"))
        result.plot(output.with_name(output.name + ".png"), train_length=args.train_length)
        print(result.summary())
        print(f"wrote {output}.png and {output}.json")

    try:
        result = forgetting_curve(
            model,
            tokens,
            lengths=grid(longest, args.points),
            repeats=args.repeats,
            seed=args.seed,
            bos_token_id=args.bos_token_id if args.bos_token_id is not None else tokenizer.bos_token_id,
            eos_token_id=args.eos_token_id if args.eos_token_id is not None else tokenizer.eos_token_id,
            data_type=args.data_type,
            protocol=args.protocol,
            tokenizer=tokenizer,
            run=Run(args.journal, args.tokens_per_pass, progress=True),
        )
    except BaseException as error:
        if getattr(error, "result", None) is not None and error.result.points:
            write(error.result)
        raise
    write(result)


def _default_max_length(claimed, corpus):
    """Half of the context that the model claims, as far as the corpus reaches."""
    ends = ([] if claimed is None else [(claimed - 3) // 2]) + ([] if corpus is None else [len(corpus) // 3])
    if not ends:
        raise ValueError("the model claims no context, and random data have no end: give --max-length.")
    longest = min(ends)
    shared.say(f"measuring up to {longest} tokens (choose another end with --max-length)")
    return longest
