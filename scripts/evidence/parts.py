"""Experiments in parts, each saved when finished, so that the same command resumes after an interruption."""

import contextlib
import time
from pathlib import Path

import torch

from hf_longctx.metrics import Journal
from hf_longctx.metrics.result import commit
from scripts.bench import common


PICTURES = common.ROOT / "model_cards" / "evidence"
PREPARE = "python -m scripts.fetch_model smollm2-135m && python -m scripts.demo_corpus demo_output/corpus"
ADD_PARTS = "caches contexts lengths seeds methods models lines learning_rates ablation"
NOT_OF_PARTS = {*ADD_PARTS.split(), "minutes", "at_once"}  # options that do not affect a part
DAY = 24 * 60.0  # minutes


def make_parser(module, description, name, **defaults):
    """Return a benchmark's parser with options for the folder of finished parts and the figure."""
    parser = common.make_parser(module, description, name, **defaults)
    work = common.ROOT / "demo_output" / "evidence"
    parser.add_argument("--work", type=Path, default=work, metavar="FOLDER", help="folder of finished parts")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="figure (default: in model_cards/evidence)")
    return parser


def run(parser, measure, table, draw, arguments=None):
    """Measure, write and print as `common.run` does, and draw the figure."""

    def table_of_rows(result):
        return table(result) if result["rows"] else "Nothing was measured within --minutes."

    result = common.run(parser, measure, table_of_rows, arguments)
    args = parser.parse_args(arguments)
    if result["rows"]:
        draw(result, args.picture or PICTURES / f"{common.result_name(args)}.png")


def require(*paths):
    """Raise FileNotFoundError for the first missing path, with the command that creates it."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing. Make it with\n    {PREPARE}")


def settings_of(args):
    """Return the options that affect a part's results."""
    return {name: x for name, x in vars(args).items() if name not in {*common.NO_SETTINGS, *NOT_OF_PARTS}}


class OutOfTime(Exception):
    """Signal that --minutes are over. Unfinished trainings are saved, and the same command resumes them."""


def check_time(args):
    """Raise OutOfTime if --minutes are over."""
    if time.monotonic() > args.until:
        raise OutOfTime


def measure_parts(measure, keys, args):
    """Yield measure(*key, args) for every key, measured or from args.work's journal with the same settings.

    Each result is a dictionary with the commit at which it was measured, which may be older for journal entries. After
    --minutes, only journal entries are yielded.
    """
    vars(args).setdefault("until", time.monotonic() + 60 * getattr(args, "minutes", DAY))
    torch.set_num_threads(1)
    settings = settings_of(args) | {"machine": common.machine(args.device)["device"], "torch": torch.__version__}
    args.work.mkdir(parents=True, exist_ok=True)
    with Journal(args.work / f"{common.result_name(args)}.jsonl", settings) as journal:
        for key in dict.fromkeys(keys):
            with contextlib.suppress(OutOfTime):
                if key not in journal.done:
                    check_time(args)
                    journal.append(key, {"commit": commit(common.ROOT)} | measure(*key, args))
                yield journal.done[key]
