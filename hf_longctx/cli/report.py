"""Measure all there is to measure of a model, and put it on one page.

Forgetting curve, per-token loss, needle in a haystack, line retrieval and RoPE bound; what cannot be measured of this
model is named with the reason. Writes into FOLDER: report.html, which needs nothing beside itself; the results as JSON with their pictures;
model_card.md, numbers and picture for a model card. Run again after an interruption, it goes on; where the weights or
the text have changed since, it refuses. Under torchrun or accelerate launch, the processes share the work.
"""

import argparse
import json
from pathlib import Path

from . import lines, needle, shared


TITLES = {
    "curve": "Forgetting curve",
    "loss": "Per-token loss",
    "needle": "Needle in a haystack",
    "lines": "Line retrieval",
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
    import torch

    from ..metrics.report.card import card_snippet
    from ..metrics.report.page import write_report
    from ..metrics.result import read_result

    rank = shared.join_processes()
    folder = Path(args.output)
    arguments = {name: value for name, value in vars(args).items() if name not in ("run", "command", "output")}
    arguments |= {
        name: str(Path(arguments[name]).resolve()) for name in ("model", "text") if is_local(arguments[name])
    }
    compare(folder, arguments)
    args.loaded = shared.load_model(args)
    args.loaded_text = load_text(args)
    arguments |= content(args)
    compare(folder, arguments)
    todo = [name for name in TITLES if not (folder / f"{name}.json").exists()]
    wait = torch.distributed.barrier if torch.distributed.is_initialized() else lambda: None
    wait()  # until all have looked
    if rank == 0:
        begin(folder, arguments)
    wait()
    missing = {}
    for name, title in TITLES.items():
        if name not in todo:
            shared.say(f"{title}: measured before")
            continue
        shared.say(f"{title}:")
        try:
            if name != "rope":
                measure(name, args, folder, rank)
            elif rank == 0:
                write_rope(args, folder / "rope.json")
        except EXPECTED as error:
            missing[title] = str(error)
            shared.say(f"{title}: {error}")
    if rank > 0:
        return

    files = {name: folder / f"{name}.json" for name in TITLES}
    # of a measurement that failed on the way, show how far it came
    files = {name: file if file.exists() else folder / "unfinished" / file.name for name, file in files.items()}
    results = [read_result(file) for file in files.values() if file.exists()]
    if not results:
        raise ValueError("nothing could be measured. " + " ".join(f"{title}: {why}" for title, why in missing.items()))
    name = Path(args.model).resolve().name if Path(args.model).is_dir() else args.model
    write_report(results, folder / "report.html", title=f"How far {name} remembers", missing=missing)
    picture = "curve.png" if (folder / "curve.png").exists() else None
    written = [folder / "report.html"]
    if any(file.exists() for metric, file in files.items() if metric != "rope"):
        written.append(folder / "model_card.md")
        written[1].write_text(card_snippet(name, results, picture), encoding="utf-8")
    print(f"wrote {' and '.join(map(str, written))}")


def is_local(name):
    return name is not None and Path(name).exists()


def load_text(args):
    """The text that all parts of the report are measured on."""
    from ..corpus import Corpus

    tokens = shared.load_tokens(args, args.loaded[1], context(args))
    return Corpus(tokens, args.corpus)


def context(args):
    """The longest input to measure with."""
    from ..metrics.run.reader import reader_for

    if args.context_length is not None:
        return args.context_length
    return reader_for(args.loaded[0]).claimed_context or 4096


def content(args):
    """What a name may stand for today, and for something else tomorrow."""
    from ..metrics.run.journal import content_hash
    from ..metrics.run.reader import reader_for

    weights = reader_for(args.loaded[0]).identity().get("weights_sha256")  # of a served model there are none to see
    return {"weights_sha256": weights, "corpus_sha256": content_hash(args.loaded_text.tokens)}


WORDS = {
    "weights_sha256": "state of the model (its weights or its configuration changed)",
    "corpus_sha256": "text (its content or its tokenizer changed)",
}


def compare(folder, arguments):
    """ValueError if the folder holds measurements of something else."""
    file = folder / "arguments.json"
    if not file.exists() or not begun(folder):
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [WORDS.get(name, name) for name, value in arguments.items() if before.get(name) != value]
    if changed:
        raise ValueError(
            f"{folder} holds a report with another {' and '.join(changed)}. Take another folder: --output FOLDER"
        )


def begun(folder):
    """Whether anything has been measured: there is a result, or a journal with more than its first line."""
    journals = (folder / "unfinished").glob("*.jsonl*")
    return any((folder / f"{name}.json").exists() for name in TITLES) or any(
        journal.read_bytes().count(b"\n") > 1 for journal in journals
    )


def begin(folder, arguments):
    """Write down what the folder is a report of."""
    if not begun(folder):  # what a run left that failed at once is of other arguments, perhaps
        for journal in (folder / "unfinished").glob("*.jsonl*"):
            journal.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "arguments.json").write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")


def measure(name, args, folder, rank):
    """Run another command on the loaded model and text; its files appear in `folder` once it is through."""
    from . import COMMANDS

    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    options = parser.parse_args([args.model])
    unfinished = folder / "unfinished"
    chosen = {**vars(args), "output": str(unfinished / name), "log_lengths": True}
    chosen["journal"] = str(unfinished / f"{name}.jsonl")
    if name != "curve":
        del chosen["repeats"]
    if args.context_length is not None:
        chosen["max_length"] = (args.context_length - 3) // 2
    if name == "needle":
        chosen["lengths"] = needle.default_lengths(context(args), args.loaded[1], options.mode)
    if name == "lines":
        chosen["lines"] = lines.default_lines(args.loaded[1], context(args))
        if args.context_length is not None and lines.needed(args.loaded[1], 5) > args.context_length:
            raise ValueError(f"{args.context_length} tokens are too few for a record of 5 lines.")
    for option, value in chosen.items():
        if hasattr(options, option) or option.startswith("loaded"):
            setattr(options, option, value)
    COMMANDS[name].run(options)
    if rank == 0:
        for ending in ("png", "json"):  # the JSON last: it says that all is there
            (unfinished / f"{name}.{ending}").replace(folder / f"{name}.{ending}")
    Path(f"{chosen['journal']}.{rank}" if rank else chosen["journal"]).unlink(missing_ok=True)


def write_rope(args, file):
    from transformers import AutoConfig

    from ..metrics import rope_report
    from ..metrics.result import save_document

    config = AutoConfig.from_pretrained(args.model, trust_remote_code=args.trust_remote_code)
    save_document(file, rope_report(config, context_length=args.context_length).to_json())
