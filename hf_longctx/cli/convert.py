"""Convert a checkpoint to FoX, or a FoX to another format.

Formats:
  official  checkpoint from FoX's authors
  fla       flash-linear-attention checkpoint
  llama     Llama, Mistral, Qwen2 or Qwen3 checkpoint; adds open forget gates, for fine-tuning

Weights are converted one tensor at a time. DST is written atomically.

Examples:
  hf-longctx convert official_checkpoint fox --from official
  hf-longctx convert fox fla_checkpoint --to fla
  hf-longctx convert llama fox --from llama --decay-time 1e6
"""

from argparse import ArgumentParser, Namespace


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="folder with config.json and safetensors files")
    parser.add_argument("destination", metavar="DST", help="folder to create")
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--from",
        dest="source_format",
        default="fox",
        choices=("official", "fla", "llama"),
        help="format of SRC (DST is always a FoX model)",
    )
    direction.add_argument(
        "--to",
        dest="destination_format",
        default="fox",
        choices=("official", "fla"),
        help="format of DST (SRC is always a FoX model)",
    )
    parser.add_argument(
        "--decay-time",
        type=float,
        metavar="TOKENS",
        help="for --from llama: tokens until the new gates decay to 1/e (default: 1e5 times the context)",
    )


def run(args: Namespace) -> None:
    if args.decay_time is not None and args.source_format != "llama":
        raise ValueError("--decay-time is for --from llama; other checkpoints already have gates.")
    from ..fox import convert_folder

    convert_folder(args.source, args.destination, args.source_format, args.destination_format, args.decay_time)
    print(f"wrote {args.destination}")
