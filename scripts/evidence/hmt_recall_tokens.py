"""Do tokens of an earlier segment, read again, help an untrained SmolLM2 where a memory could?

    python -m scripts.evidence.hmt_recall_tokens

With `recall_tokens`, HMT keeps the tokens of its segments. Once the first half of a segment is known, it reads those
of one of them again, and the segment behind them. Here an untrained HMT around SmolLM2 remembers one segment: the one
that shares most tokens with the first half, of all before it in the book (`own book`), a random one of these, or the
best one of another book. Beside it, SmolLM2 reads a window of as many tokens: those just before (`longer window`).
Only the second half of each segment is scored. A memory can matter where a token has occurred earlier in the book and
not within the longer window: these tokens are counted apart.

Segments are drawn from two novels, other ones for each seed. Every segment is kept when it is done.
"""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.search_hmt import find_tokens
from scripts.bench import common
from scripts.evidence.hmt_training import BACKBONES, TEXT, load_backbone
from scripts.evidence.parts import make_parser, measure_parts, require


BOOKS = ("Moby Dick", "Emma")
READINGS = ("longer window", "own book", "random", "other book")  # in the order of `one_segment`
SCORED = ("far", "all")
FORM = """
| read again | tokens of earlier segments | all tokens |
| {name} | {far} | {all} |
"""


@functools.cache
def tokens_of(book, backbone):
    """The tokens of a book, (N,)."""

    def number(file):
        return [int(x) for x in file.stem.split("_") if x.isdigit()], file.stem

    files = sorted((TEXT / "train").glob(f"{book}*.txt"), key=number)
    text = "\n\n".join(file.read_text() for file in files)
    tokenizer = AutoTokenizer.from_pretrained(BACKBONES[backbone])
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def found_by_tokens(query, book, count, args):
    """The segment of the first `count` of a book, or of all, that shares most tokens with a query (n,); (L',)."""
    length = args.segment_length
    segments = tokens_of(book, args.backbone).split(length)[:count]
    ids = torch.stack([x for x in segments if len(x) == length])[None]
    return find_tokens(query[None], ids, torch.ones(ids.shape[:2], dtype=torch.bool), length)[0]


def segments_of(book, args):
    """Numbers of the book's segments in a random order, of those behind at least `args.earliest` others."""
    count, generator = len(tokens_of(book, args.backbone)) // args.segment_length, torch.Generator().manual_seed(0)
    return (args.earliest + torch.randperm(count - args.earliest, generator=generator)).tolist()


@torch.no_grad()
def one_segment(number, book, seed, model, args):
    """Sums of -log p over the scored tokens of a segment, by reading, and how many there are."""
    length, sensory, book_tokens = args.segment_length, args.sensory_tokens, tokens_of(book, args.backbone)
    place = segments_of(book, args)[number * 3 + seed]  # seeds 0, 1 and 2 share no segment
    begin, scored = place * length, length // 2
    segment, query = book_tokens[begin : begin + length], book_tokens[begin : begin + length - scored]
    drawn = int(torch.randint(place, (), generator=torch.Generator().manual_seed(place)))
    fronts = [
        found_by_tokens(query, book, place, args),
        book_tokens[drawn * length :][:length],
        found_by_tokens(query, next(name for name in BOOKS if name != book), place, args),
    ]
    state = model(torch.stack(fronts).to(args.device), use_cache=True, logits_to_keep=1).state
    before = book_tokens[begin - sensory : begin].to(args.device)
    state = replace(state, tail=before.expand(len(fronts), -1))  # the segment before is full
    rows = segment.to(args.device).expand(len(fronts), -1)
    near = book_tokens[begin - sensory - length : begin + length]  # the longer window, and what it predicts
    logits = model.backbone(near[None, :-1].to(args.device), logits_to_keep=scored).logits
    logits = torch.cat([logits, model(rows[:, :-1], state=state, logits_to_keep=scored).logits]).double().cpu()
    losses = F.cross_entropy(logits.transpose(1, 2), segment[-scored:].expand(len(logits), -1), reduction="none")
    near = near.tolist()
    earlier = set(book_tokens[: begin - sensory - length].tolist())
    places = range(len(near) - scored, len(near))
    far = torch.tensor([near[i] in earlier and near[i] not in near[:i] for i in places])
    sums = {"far": losses[:, far].sum(1), "all": losses.sum(1)}
    return {
        "book": book,
        "seed": seed,
        "segment": place,
        "tokens": {"far": int(far.sum()), "all": scored},
        "losses": {name: dict(zip(READINGS, (round(x, 4) for x in sums[name].tolist()))) for name in SCORED},
    }


def measure(args):
    require(BACKBONES[args.backbone], TEXT)
    keys = itertools.product(range(args.segments), BOOKS, args.seeds)
    length = args.segment_length
    config = HMTConfig(segment_length=length, sensory_tokens=args.sensory_tokens, recall_tokens=length)
    model = HMTWrapper.from_backbone(load_backbone(args), config).eval()

    def measure_one(number, book, seed, args):
        return one_segment(number, book, seed, model, args)

    yield from measure_parts(measure_one, keys, args)


def gain(rows, reading, scored, reference):
    """What a reading gains over another one, in nats per token: the mean over tokens, and its standard error.

    Segments are independent, tokens of one are not.
    """
    differences = np.array([x["losses"][scored][reference] - x["losses"][scored][reading] for x in rows])
    tokens = np.array([x["tokens"][scored] for x in rows])
    total = max(1, tokens.sum())
    mean = differences.sum() / total
    return mean, math.sqrt(((differences - mean * tokens) ** 2).sum()) / total


def gain_lines(rows, readings, parts):
    """Lines of a table: what all readings gain over the first, and `own book` also in `parts`, {name: rows}."""
    reference, *others = readings
    lines = []
    for reading in others:
        for name, part in ({"": rows} | (parts if reading == "own book" else {})).items():
            gains = {x: "{:+.3f} ± {:.3f}".format(*gain(part, reading, x, reference)) for x in SCORED}
            lines.append({"name": reading + name} | gains)
    return lines


def table(result):
    rows, s = result["rows"], result["settings"]
    parts = {f", seed {seed}": [row for row in rows if row["seed"] == seed] for seed in s["seeds"]}
    lines = gain_lines(rows, READINGS, parts)
    far = sum(row["tokens"]["far"] for row in rows)
    text = (
        f"Nats per token gained over a window of as many positions, ± one standard error over {len(rows)} segments of "
        f"{s['segment_length']} tokens; {s['sensory_tokens']} tokens before each, and as many as a segment, are read "
        f"beside it. {far} tokens had occurred in an earlier segment and not within the longer window."
    )
    return f"{text}\n\n{common.markdown(lines, FORM)}"


def main(arguments=None):
    sizes = {"segment_length": 128, "sensory_tokens": 32, "earliest": 64, "segments": 50}
    parser = make_parser(
        __spec__.name, __doc__, "hmt_recall_tokens_{backbone}", **sizes, seeds=[0, 1, 2], device="cpu"
    )
    parser.add_argument("--backbone", choices=list(BACKBONES), default="smollm2", help="default: %(default)s")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
