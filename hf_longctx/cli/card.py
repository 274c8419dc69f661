"""Write the card of a model or adapter, README.md, from the files in its folder.

Facts, contexts, results, memory and speed, training, loading lines, limits, provenance and the model-index come from
config.json, the weights, results of `hf-longctx curve`, `loss`, `rope` and so on, benchmarks of scripts/bench,
training.yaml and training_log.jsonl (settings and losses of a training). What people have to say comes from
card_notes.md: its sections become parts of the sections of the same name, and its beginning follows the title. The
licence, language and tags of a card that is written again are kept. A README.md of your own is not overwritten. Then
the command lists what the card lacks and what is wrong with it, and exits with 2 if something is wrong.

Examples:
  hf-longctx card model --repo alice/fox --tag v1
  hf-longctx card model
"""


def add_arguments(parser):
    parser.add_argument("folder", metavar="DIR", help="folder of a saved model or adapter")
    parser.add_argument("--repo", help="NAMESPACE/NAME that the loading lines name (default: as the card has it)")
    parser.add_argument("--tag", help="revision that they pin, with --repo")


def run(args):
    from pathlib import Path

    from ..hub import build_bundle, check, check_destination, missing_fields, with_card

    if args.tag is not None and args.repo is None:
        raise ValueError("--tag needs --repo.")
    if args.repo is not None:
        check_destination(args.repo, tag=args.tag)
    given = build_bundle(args.folder)
    bundle = with_card(given, args.repo, args.tag)
    path = Path(args.folder, "README.md")
    if bundle is given:
        print(f"{path} was written by hand and stays; move its text to card_notes.md, and remove it, for a new card")
    else:
        path.write_text(bundle.text("README.md"), encoding="utf-8")
        print(f"wrote {path}")
    for line in missing_fields(bundle):
        print(f"missing: {line}")
    check(bundle)
