"""Would tokens of an earlier segment, read again, help an untrained SmolLM2 where a memory could?

    python -m scripts.evidence.hmt_recall_tokens

A memory keeps one embedding of a segment. It could keep the segment's tokens too, and read those of the best one in
front of the window again. Here such tokens are read by SmolLM2 as it is, in four places of one size: just before the
window (a longer window), in the segment that BM25 finds for the words of the query (`own book`), in a random earlier
segment, and in the segment that BM25 finds in another book. Only the second half of each segment is scored, as the
sensory tokens and the first half are the query. A memory can matter where a token has occurred earlier in the book and
not within the longer window: these tokens are counted apart.

Segments are drawn from two novels, other ones for each seed. Every segment is kept when it is done.
"""

import functools
import itertools
import math

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from scripts.bench import common
from scripts.evidence.hmt_training import BACKBONES, TEXT, load_backbone
from scripts.evidence.parts import make_parser, measure_parts, require


BOOKS = ("Moby Dick", "Emma")
READINGS = ("longer window", "own book", "random", "other book")
SCORED = ("far", "all")
FORM = """
| read in front | tokens of earlier segments | all tokens |
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


@functools.cache
def counts_of(book, backbone, length):
    """How often each segment of a book has each token, (segments, vocabulary)."""
    segments = tokens_of(book, backbone).split(length)
    counts = np.zeros((len(segments), 1 + max(int(x.max()) for x in segments)), np.uint8)
    for row, segment in zip(counts, segments):
        np.add.at(row, segment.numpy(), 1)
    return counts


def found_by_words(query, counts, k1=1.2):
    """The number of the segment that BM25 finds, of some of equal length; `bm25` of hmt_facts, in one product.

    >>> int(found_by_words({1, 2}, np.array([[1, 0, 0], [0, 1, 0], [0, 2, 1]])))
    2
    """
    counts = counts[:, [token for token in query if token < counts.shape[1]]].astype(float)
    containing = (counts > 0).sum(0)
    weights = np.log(1 + (len(counts) - containing + 0.5) / (containing + 0.5))
    return (weights * counts * (k1 + 1) / (counts + k1)).sum(1).argmax()


def segments_of(book, args):
    """Numbers of the book's segments in a random order, of those behind at least `args.earliest` others."""
    count, generator = len(tokens_of(book, args.backbone)) // args.segment_length, torch.Generator().manual_seed(0)
    return (args.earliest + torch.randperm(count - args.earliest, generator=generator)).tolist()


@torch.no_grad()
def one_segment(number, book, seed, model, args):
    """Sums of -log p over the scored tokens of a segment, by reading, and how many there are."""
    length, sensory, book_tokens = args.segment_length, args.sensory_tokens, tokens_of(book, args.backbone)
    place = segments_of(book, args)[number * 3 + seed]  # seeds 0, 1 and 2 share no segment
    begin = place * length
    window = book_tokens[begin - sensory : begin + length]
    query = set(window[: sensory + length // 2].tolist())
    candidates = (begin - sensory - length) // length  # segments that end before the longer window
    other = next(name for name in BOOKS if name != book)
    found = [int(found_by_words(query, counts_of(x, args.backbone, length)[:candidates])) for x in (book, other)]
    drawn = int(torch.randint(candidates, (), generator=torch.Generator().manual_seed(place)))
    fronts = {
        "longer window": book_tokens[begin - sensory - length : begin - sensory],
        "own book": book_tokens[found[0] * length :][:length],
        "random": book_tokens[drawn * length :][:length],
        "other book": tokens_of(other, args.backbone)[found[1] * length :][:length],
    }
    rows = torch.stack([torch.cat([fronts[name], window]) for name in READINGS]).to(args.device)
    scored = length // 2
    logits = model(rows[:, :-1], logits_to_keep=scored).logits.double()
    losses = F.cross_entropy(logits.transpose(1, 2), rows[:, -scored:], reduction="none").cpu()
    earlier = set(book_tokens[: begin - sensory - length].tolist())
    near = rows[0].tolist()  # of the longer window
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
    model = load_backbone(args)

    def measure_one(number, book, seed, args):
        return one_segment(number, book, seed, model, args)

    yield from measure_parts(measure_one, keys, args)


def gain(rows, reading, scored):
    """What a reading gains over the longer window, in nats per token: the mean over tokens, and its standard error.

    Segments are independent, tokens of one are not.
    """
    differences = np.array([x["losses"][scored]["longer window"] - x["losses"][scored][reading] for x in rows])
    tokens = np.array([x["tokens"][scored] for x in rows])
    total = max(1, tokens.sum())
    mean = differences.sum() / total
    return mean, math.sqrt(((differences - mean * tokens) ** 2).sum()) / total


def table(result):
    rows, s = result["rows"], result["settings"]
    lines = []
    for reading in READINGS[1:]:
        lines.append({"name": reading} | {x: "{:+.3f} ± {:.3f}".format(*gain(rows, reading, x)) for x in SCORED})
        for seed in sorted({row["seed"] for row in rows}):
            of_seed = [row for row in rows if row["seed"] == seed]
            values = {x: "{:+.3f} ± {:.3f}".format(*gain(of_seed, reading, x)) for x in SCORED}
            lines.append({"name": f"{reading}, seed {seed}"} | values)
    far = sum(row["tokens"]["far"] for row in rows)
    text = (
        f"Nats per token gained over a window of as many positions, ± one standard error over {len(rows)} segments of "
        f"{s['segment_length']} tokens; {s['sensory_tokens']} tokens before each, and as many as a segment in front, "
        f"are read. {far} tokens had occurred in an earlier segment and not within the longer window."
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
