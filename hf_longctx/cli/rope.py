"""Does a model's RoPE base support the context that it claims? (arXiv 2405.14591)

Reads the configuration only. A screening number: many good models violate the bound at their claimed length.

Examples:
  hf-longctx rope meta-llama/Llama-3.1-8B
  hf-longctx rope MODEL --context-length 65536 --json
"""

from . import shared


def add_arguments(parser):
    parser.add_argument("model", metavar="MODEL", help="folder or Hub name of a model, or of its config.json")
    parser.add_argument(
        "--context-length", type=int, metavar="TOKENS", help="default: the context that the model claims"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    shared.add_remote_code(parser)


def run(args):
    from transformers import AutoConfig

    from ..metrics import rope_report

    config = AutoConfig.from_pretrained(args.model, **shared.source(args))
    report = rope_report(config, context_length=args.context_length)
    print(report.to_json(indent=1) if args.json else report)
