"""Push the Triton kernels of forgetting attention to the Hub, as a kernel that transformers loads by its name.

The source goes to the branch main, and what is loaded to the branch of the version. Whoever loads it runs its code:
give them the commit, attn_implementation="REPO@COMMIT". The Hub asks for its approval before it
publishes a new kernel.

Examples:
  hf-longctx push-kernel alice/forgetting-attention --dry-run
  hf-longctx push-kernel alice/forgetting-attention --private
"""

from . import push


def add_arguments(parser):
    push.add_destination(parser, branch=False)


def run(args):
    from ..hub import build_kernel, check_destination

    check_destination(args.repo, args.revision, args.tag, args.create_pr)
    for branch, bundle in build_kernel(args.repo).items():
        args.revision = branch
        commit = push.send(bundle, args, repo_type="kernel")
    if commit is not None:
        print(f'attn_implementation="{args.repo}@{commit.oid}"')
