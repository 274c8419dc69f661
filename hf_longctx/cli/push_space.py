"""Push the Space "How far does it remember?": RoPE bounds, forgetting curves side by side, the gates of a FoX.

The Space runs on a CPU, needs no token, and runs no code of a model. Its visitors can choose from the examples:
results of `curve` or `loss`, and folders of models with a forgetting_curve.json or, of a FoX, with gates.

Examples:
  hf-longctx push-space alice/how-far --dry-run
  hf-longctx push-space alice/how-far --examples model_cards/fox-demo gpt2.json
"""

from . import push


def add_arguments(parser):
    push.add_destination(parser)
    parser.add_argument(
        "--examples", nargs="+", default=[], metavar="PATH", help="results (JSON), or folders of models"
    )


def run(args):
    from ..hub import build_explorer, check_destination

    check_destination(args.repo, args.revision, args.tag, args.create_pr)
    push.send(build_explorer(args.examples), args, repo_type="space")
