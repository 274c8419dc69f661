"""Measure all there is to measure of a model, and put it on one page.

Forgetting curve, per-token loss, needle in a haystack and RoPE bound; what cannot be measured of this model is named with
the reason. Writes into FOLDER: report.html, which needs nothing beside itself; the results as JSON with their pictures;
model_card.md, numbers and picture for a model card. Run again after an interruption, it goes on.
"""

import argparse
import json
import sys
from pathlib import Path

from . import shared


TITLES = {
    "curve": "Forgetting curve",
    "loss": "Per-token loss",
    "needle": "Needle in a haystack",
    "rope": "RoPE bound",
}
EXPECTED = (ValueError, OSError, ImportError, RuntimeError, NotImplementedError)


def add_arguments(parser):
    shared.add_model(parser)
    shared.add_endpoint(parser)
    shared.add_text(parser)
    parser.add_argument(
        "--context-length",
        type=int,
        metavar="TOKENS",
        help="the longest input to measure with (default: the claimed context)",
    )
    parser.add_argument(
        "--train-length", type=int, metavar="TOKENS", help="context of training, marked in the pictures"
    )
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="of the curve (default: %(default)s)")
    parser.add_argument("--output", default="report", metavar="FOLDER", help="default: %(default)s")


def run(args):
    from ..metrics.model_card import card_snippet
    from ..metrics.report_html import write_report
    from ..metrics.results import read_result

    folder = Path(args.output)
    keep_arguments(args, folder / "arguments.json")
    loaded = None
    missing = {}
    for name, title in TITLES.items():
        if (folder / f"{name}.json").exists():
            print(f"{title}: measured before", file=sys.stderr)
            continue
        print(f"{title}:", file=sys.stderr)
        try:
            if name == "rope":
                write_rope(args, folder / "rope.json")
            else:
                loaded = loaded or shared.load_model(args)
                measure(name, args, loaded, folder)
        except EXPECTED as error:
            missing[title] = str(error)
            print(f"{title}: {error}", file=sys.stderr)

    files = [folder / f"{name}.json" for name in TITLES]
    # of a measurement that failed on the way, show how far it came
    files = [file if file.exists() else folder / "unfinished" / file.name for file in files]
    results = [read_result(file) for file in files if file.exists()]
    if not results:
        raise ValueError("nothing could be measured. " + " ".join(f"{title}: {why}" for title, why in missing.items()))
    name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    write_report(results, folder / "report.html", title=f"How far {name} remembers", missing=missing)
    picture = "curve.png" if (folder / "curve.png").exists() else None
    written = [folder / "report.html"]
    if any(file.exists() for file in files[:3]):
        written.append(folder / "model_card.md")
        written[1].write_text(card_snippet(name, results, picture), encoding="utf-8")
    print(f"wrote {' and '.join(map(str, written))}")


def keep_arguments(args, file):
    """Remember what the folder is a report of; ValueError if it is one of something else."""
    arguments = {name: value for name, value in vars(args).items() if name not in ("run", "command", "output")}
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        changed = [name for name in arguments if before.get(name) != arguments[name]]
        if changed:
            raise ValueError(
                f"{file.parent} holds a report with another {' and '.join(changed)}. Take another folder: --output FOLDER"
            )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")


def measure(name, args, loaded, folder):
    """Run another command on a loaded model; its files appear in `folder` once it is through."""
    from . import COMMANDS

    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    options = parser.parse_args([args.model])
    unfinished = folder / "unfinished"
    chosen = {**vars(args), "loaded": loaded, "output": str(unfinished / name), "log_lengths": True}
    chosen["journal"] = str(unfinished / f"{name}.jsonl")
    if name != "curve":
        del chosen["repeats"]
    if args.context_length is not None:
        chosen["max_length"] = (args.context_length - 3) // 2
    if name == "needle":
        chosen["lengths"] = needle_lengths(args.context_length, *loaded)
    for option, value in chosen.items():
        if hasattr(options, option) or option == "loaded":
            setattr(options, option, value)
    COMMANDS[name].run(options)
    for ending in ("png", "json"):  # the JSON last: it says that all is there
        (unfinished / f"{name}.{ending}").replace(folder / f"{name}.{ending}")
    Path(chosen["journal"]).unlink(missing_ok=True)


def needle_lengths(context_length, model, tokenizer):
    """Eight lengths up to the context, without those too short for needle and question."""
    from ..metrics.haystack import needle_pieces
    from .needle import ROOM_FOR_REPLIES

    longest = (context_length or shared.claimed_context(model) or 4096) - ROOM_FOR_REPLIES
    needed = needle_pieces(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], 0, "easy").tokens
    return [length for length in (longest * i // 8 for i in range(1, 9)) if length > needed] or [longest]


def write_rope(args, file):
    from transformers import AutoConfig

    from ..metrics import rope_report
    from ..metrics.documents import save_document

    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    save_document(file, rope_report(config, context_length=args.context_length).to_json())
