"""An experiment in parts, each of which is kept when it is done: the same command continues after an interruption."""

from pathlib import Path

import torch

from hf_longctx.metrics import Journal
from hf_longctx.metrics.result import commit
from scripts.bench import common


PICTURES = common.ROOT / "model_cards" / "evidence"
PREPARE = "python -m scripts.fetch_model smollm2-135m && python -m scripts.demo_corpus demo_output/corpus"
ADD_PARTS = "seeds methods models bases contexts lines needles learning_rates ablation"
NOT_OF_PARTS = {*ADD_PARTS.split(), "minutes", "at_once"}  # options that change no part


def make_parser(module, description, name, **defaults):
    """The parser of a benchmark, with a folder to keep parts in, and a picture."""
    parser = common.make_parser(module, description, name, **defaults)
    work = common.ROOT / "demo_output" / "evidence"
    parser.add_argument("--work", type=Path, default=work, metavar="FOLDER", help="keeps what is done")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"default: model_cards/evidence/{name}.png")
    return parser


def run(parser, measure, table, draw, arguments=None):
    """Measure, write and print as `common.run` does, and draw the picture."""
    result = common.run(parser, measure, table, arguments)
    args = parser.parse_args(arguments)
    draw(result, args.picture or PICTURES / f"{common.result_name(args)}.png")


def require(*paths):
    """Raise a FileNotFoundError, with the command that makes it, for the first path that does not exist."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing. Make it by\n    {PREPARE}")


def settings_of(args):
    """The options on which the figures of a part depend."""
    return {name: x for name, x in vars(args).items() if name not in {*common.NO_SETTINGS, *NOT_OF_PARTS}}


def measure_parts(measure, keys, args, so_far=False):
    """Yield measure(*key, args) for every key, measured or from the journal of the same settings in args.work.

    Each is a dictionary, and says at which commit it was measured: those of a journal may be older than the result.
    `so_far` leaves out the keys that are not in the journal.

    Raises:
        ValueError: `so_far`, and none of the keys is in the journal.
    """
    torch.set_num_threads(1)
    settings = settings_of(args) | {"machine": common.machine(args.device)["device"], "torch": torch.__version__}
    args.work.mkdir(parents=True, exist_ok=True)
    with Journal(args.work / f"{common.result_name(args)}.jsonl", settings) as journal:
        if so_far and journal.done.keys().isdisjoint(keys):
            raise ValueError(f"{journal.path} has none of these parts yet. Leave out --so-far to measure them.")
        for key in dict.fromkeys(keys):
            if key not in journal.done and not so_far:
                journal.append(key, {"commit": commit(common.ROOT)} | measure(*key, args))
            if key in journal.done:
                yield journal.done[key]
