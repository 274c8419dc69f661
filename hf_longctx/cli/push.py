"""Push a model, an adapter or a metric to the Hub, in one commit.

Pushes DIR's config, safetensors weights, tokenizer, card, figures and results. The package's modeling code is pushed
too, so that the model loads without hf-longctx. These raise an error: pickles, training state, hidden files, access
tokens, local paths, and links to files outside DIR. The Hub token comes from `hf auth login` or HF_TOKEN.

A hand-written README.md is pushed unchanged. If there is none, the card is generated from the files. Each section of
card_notes.md is then added to the card's section of the same name. --write-card writes the card into DIR.

A metric (forgetting_curve, rope_base_check) is pushed as a Space. The Space scores predictions without hf-longctx.
`evaluate.load` runs a Space's code without asking, so ask users to pin the commit: revision="...".

Examples:
  hf-longctx push model alice/fox --dry-run
  hf-longctx push model alice/fox --tag v1 --write-card
  hf-longctx push model alice/fox --private
  hf-longctx push model alice/fox --tag v1
  hf-longctx push forgetting_curve alice/forgetting_curve --dry-run
"""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="folder of a saved model or adapter, or a metric name")
    parser.add_argument("repo", metavar="REPO", help="NAMESPACE/NAME on the Hub, created if it does not exist")
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument("--revision", metavar="BRANCH", help="branch, created if it does not exist (default: main)")
    parser.add_argument("--tag", help="tag for the commit, which the example in the card loads")
    parser.add_argument(
        "--create-pr", action="store_true", help="open a pull request instead of committing to the branch"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list the files to push and to remove, and push nothing"
    )
    parser.add_argument(
        "--write-card",
        action="store_true",
        help="write the card into DIR unless it is hand-written, list its missing fields, and push nothing",
    )


def run(args: Namespace) -> None:
    from ..hub import build_bundle, build_space, check_destination, loading_lines, pin_base, with_card
    from ..metrics.evaluate_modules import NAMES

    check_destination(args.repo, args.revision, args.tag, args.create_pr)
    if args.folder in NAMES and not Path(args.folder).exists():
        if args.write_card:
            raise ValueError("--write-card writes the card of a model. Omit it for a metric.")
        if not args.repo.endswith(f"/{args.folder}"):
            raise ValueError(
                f"evaluate.load finds {args.folder} only in a repository named {args.folder}. Push to "
                f"{args.repo.partition('/')[0]}/{args.folder}."
            )
        commit = send(build_space(args.folder), args, "space")
        if commit is not None:
            print(f'evaluate.load("{args.repo}", revision="{commit.oid}")')
        return
    given = build_bundle(args.folder)
    if args.write_card:
        write_card(args.folder, given, with_card(given, args.repo, args.tag))
        return
    bundle = with_card(given if args.dry_run else pin_base(given), args.repo, args.tag)
    commit = send(bundle, args)
    if commit is not None:
        print(loading_lines(bundle, args.repo, commit.oid))


def write_card(folder: str, given: Any, bundle: Any) -> None:
    """Write a model's card unless it is hand-written, and print its missing fields."""
    from ..hub import check, missing_fields

    path = Path(folder, "README.md")
    if bundle is given:
        print(
            f"{path} is hand-written and is not changed. To generate a card, move the text to card_notes.md, and "
            f"delete {path.name}"
        )
    else:
        path.write_text(bundle.text("README.md"), encoding="utf-8")
        print(f"wrote {path}")
    for line in missing_fields(bundle):
        print(f"missing: {line}")
    check(bundle)


def send(bundle: Any, args: Namespace, repo_type: str = "model") -> Any:
    """List the files to push, and the files to remove. Then push, and print the URL.

    Return the commit. In a dry run, do not push, and return None.
    """
    from ..hub import check, missing_fields, push, removed_files

    for path, content in sorted(bundle.files.items()):
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"{size:>14,}  {path}")
    if bundle.left_out:
        print(f"left out: {', '.join(bundle.left_out)}")
    try:
        for path in removed_files(bundle, args.repo, repo_type=repo_type, revision=args.revision):
            print(f"removes {path} from {args.repo}")
    except ConnectionError as error:
        if not args.dry_run:
            raise
        print(f"cannot list the old files that a push removes: {error}")
    for line in missing_fields(bundle):
        print(f"missing: {line}")
    if args.dry_run:
        check(bundle)
        print(f"nothing was sent to {args.repo}")
        return None
    options = {"private": args.private, "revision": args.revision, "create_pr": args.create_pr, "tag": args.tag}
    commit = push(bundle, args.repo, repo_type=repo_type, **options)
    print(commit.pr_url or commit.commit_url)
    return commit
