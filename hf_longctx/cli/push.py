"""Push a model, an adapter, a saved memory or a metric to the Hub, in one commit.

DIR gives configuration, weights (safetensors), tokenizer, card, pictures and results; the code is the package's own,
so that the model loads where hf-longctx is not installed. Pickles, the state of a training, hidden files, links out of
DIR, and what looks like a token or a path of one machine are refused. A README.md of your own is pushed as it is;
without one, the card is written from the files: configuration, weights, results of `hf-longctx curve`, `loss` and so
on, benchmarks, training.yaml and training_log.jsonl. Your words for it come from card_notes.md, whose sections become
parts of the sections of the same name. --write-card writes it into DIR. The token is that of `hf auth login`, or of
the variable HF_TOKEN.

With --code-only, a push only updates the code in a repository, for a newer transformers; weights and card stay.

Instead of DIR, a file is that of `hf-longctx read`, whose card names model, commit and text. The name of a metric
(forgetting_curve, rope_base_check) stands for a Space, which scores predictions where hf-longctx is not installed.
`evaluate.load` runs its code without a question, so give others the commit: revision="...".

Examples:
  hf-longctx push model alice/fox --dry-run
  hf-longctx push model alice/fox --tag v1 --write-card
  hf-longctx push model alice/fox --private --verify
  hf-longctx push model alice/fox --tag v1
  hf-longctx push model alice/fox --code-only
  hf-longctx push state.safetensors alice/a-novel --tag v1
  hf-longctx push forgetting_curve alice/forgetting_curve --dry-run
"""


def add_arguments(parser):
    parser.add_argument(
        "folder", metavar="DIR", help="folder of a saved model or adapter, file of a memory, or name of a metric"
    )
    parser.add_argument(
        "repo", metavar="REPO", help="NAMESPACE/NAME on the Hub, which is created if it does not exist"
    )
    parser.add_argument("--private", action="store_true", help="create a private repository")
    parser.add_argument(
        "--revision", metavar="BRANCH", help="branch, which is created if it does not exist (default: main)"
    )
    parser.add_argument("--tag", help="name for the commit, which the card's loading lines then pin")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be pushed and removed, and send nothing"
    )
    parser.add_argument(
        "--write-card",
        action="store_true",
        help="write the card into DIR, say what it lacks, and send nothing; a README.md of your own stays",
    )
    parser.add_argument(
        "--code-only",
        action="store_true",
        help="replace only the code, its auto_map and its hashes; DIR is the model in REPO",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="load the commit back in a process without hf-longctx, its code and that of its base included, and compare "
        "files and logits",
    )


def run(args):
    from pathlib import Path

    from ..hub import (
        build_bundle,
        build_space,
        build_state,
        check_destination,
        code_only,
        loading_lines,
        pin_base,
        verify_push,
        with_card,
    )
    from ..metrics.evaluate_modules import NAMES

    check_destination(args.repo, args.revision, args.tag, args.create_pr)
    is_metric = args.folder in NAMES and not Path(args.folder).exists()
    if is_metric or Path(args.folder).is_file():
        if args.verify or args.write_card or args.code_only:
            raise ValueError("--verify, --write-card and --code-only must be left out; they are for models.")
        if not is_metric:
            commit, says = (
                send(build_state(args.folder, args.repo, args.tag), args),
                "hf-longctx read MODEL {}@{} QUESTION",
            )
        elif args.repo.endswith(f"/{args.folder}"):
            commit, says = send(build_space(args.folder), args, "space"), 'evaluate.load("{}", revision="{}")'
        else:
            raise ValueError(
                f"evaluate.load finds {args.folder} in a repository of that name only; push to "
                f"{args.repo.partition('/')[0]}/{args.folder}."
            )
        if commit is not None:
            print(says.format(args.repo, commit.oid))
        return
    given = build_bundle(args.folder)
    if args.write_card:
        write_card(args.folder, given, with_card(given, args.repo, args.tag))
        return
    if args.code_only:
        bundle = code_only(given, args.repo, args.revision)
    else:
        bundle = with_card(given if args.dry_run else pin_base(given), args.repo, args.tag)
    commit = send(bundle, args)
    if commit is None:
        return
    print(loading_lines(bundle, args.repo, commit.oid))
    if args.verify:
        contents = bundle.text("hf_longctx.json")
        print(verify_push(args.folder, contents, args.repo, commit.oid, bundle.auto_class))


def write_card(folder, given, bundle):
    """Write the card of a model, unless a person wrote it, and report what it lacks."""
    from pathlib import Path

    from ..hub import check, missing_fields

    path = Path(folder, "README.md")
    if bundle is given:
        print(f"{path} was written by hand and stays; move its text to card_notes.md, and remove it, for a new card")
    else:
        path.write_text(bundle.text("README.md"), encoding="utf-8")
        print(f"wrote {path}")
    for line in missing_fields(bundle):
        print(f"missing: {line}")
    check(bundle)


def send(bundle, args, repo_type="model"):
    """List the files that come and go, push, and print where they are; return the commit, or None after a dry run."""
    from ..hub import check, missing_fields, push, removed_files

    for path, content in sorted(bundle.files.items()):
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        print(f"{size:>14,}  {path}")
    if bundle.left_out:
        print(f"left out: {', '.join(bundle.left_out)}")
    try:
        for path in removed_files(bundle, args.repo, repo_type=repo_type, revision=args.revision):
            print(f"removes {path}, which {args.repo} has")
    except ConnectionError as error:
        if not args.dry_run:
            raise
        print(f"unknown which old files a push removes: {error}")
    for line in () if bundle.code_only else missing_fields(bundle):
        print(f"missing: {line}")
    if args.dry_run:
        check(bundle)
        print(f"nothing was sent to {args.repo}")
        return None
    options = {"private": args.private, "revision": args.revision, "create_pr": args.create_pr, "tag": args.tag}
    commit = push(bundle, args.repo, repo_type=repo_type, **options)
    print(commit.pr_url or commit.commit_url)
    return commit
