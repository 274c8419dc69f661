"""Push a metric to the Hub as a Space, from where evaluate loads it.

The Space scores predictions where hf-longctx is not installed; to measure a model, it needs hf-longctx. Whoever calls
`evaluate.load` runs the code of the Space without a question, so give them the commit: revision="...".

Examples:
  hf-longctx push-metric forgetting_curve alice/forgetting_curve --dry-run
  hf-longctx push-metric position_loss alice/position_loss
"""

from . import push


def add_arguments(parser):
    parser.add_argument("name", metavar="NAME", help="forgetting_curve, position_loss or rope_base_check")
    push.add_destination(parser)


def run(args):
    from ..hub import build_space, check_destination

    check_destination(args.repo, args.revision, args.tag, args.create_pr)
    bundle = build_space(args.name)
    if not args.repo.endswith(f"/{args.name}"):
        raise ValueError(
            f"evaluate.load finds {args.name} in a repository of that name only; push to "
            f"{args.repo.partition('/')[0]}/{args.name}."
        )
    commit = push.send(bundle, args, repo_type="space")
    if commit is not None:
        print(f'evaluate.load("{args.repo}", revision="{commit.oid}")')
