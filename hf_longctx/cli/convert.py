"""Convert a checkpoint to FoX, or a FoX back.

official: the FoX of its authors. fla: flash-linear-attention. llama: a Llama, Mistral, Qwen2 or Qwen3, which gets open
forget gates and can then be fine-tuned. Weights pass through memory one tensor at a time. DST appears when it is
complete.

Examples:
  hf-longctx convert official_checkpoint fox --from official
  hf-longctx convert fox fla_checkpoint --to fla
  hf-longctx convert llama fox --from llama --decay-time 1e6
"""

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument("destination", metavar="DST", help="folder to make")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from",
        dest="source_format",
        default="fox",
        choices=("official", "fla", "llama"),
        help="make a FoX of this",
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


def run(args: Namespace) -> None:
    if args.decay_time is not None and args.source_format != "llama":
        raise ValueError("--decay-time is for --from llama; other checkpoints have gates of their own.")
    from ..fox import convert_folder

    convert_folder(args.source, args.destination, args.source_format, args.destination_format, args.decay_time)
    print(f"wrote {args.destination}")
