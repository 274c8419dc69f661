"""Measure whether HMT's neural cache lowers the perplexity of a pretrained SmolLM2 on novels, without fine-tuning.

    python -m scripts.evidence.hmt_neural_cache

HMT reads an excerpt of a novel with `neural_cache_weight` and its own memories (`own book`), or with the memories of
as many segments of another novel (`other book`). SmolLM2 reads the same segments in windows with as many positions as
HMT's input (`window`), in windows that are one segment longer, and after the whole preceding excerpt (`whole
context`). All tokens of the later segments are scored. A memory can help with tokens that occur earlier in the excerpt
but not in the longer window; these tokens are also scored separately.

Excerpts are drawn from two novels, different ones for each seed. The weight and the sharpness of the cache were tuned
on Moby Dick. Every finished excerpt is saved.
"""

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.compat_hmt import cache_name
from scripts.bench import common
from scripts.evidence.parts import make_parser, measure_parts, require
from scripts.fetch_model import SMOLLM2


BACKBONES = {"smollm2": SMOLLM2, "llama-demo": common.ROOT / "model_cards" / "llama-demo"}
TEXT = common.ROOT / "demo_output" / "corpus"
BOOKS = ("Moby Dick", "Emma")
SCORED = ("far", "all")
READINGS = ("window", "longer window", "whole context", "own book", "other book")  # in the order of `one_stretch`
FORM = """
| read | tokens of earlier segments | all tokens |
| {name} | {far} | {all} |
"""


@functools.cache
def tokens_of(book, backbone):
    """Return a book's tokens, (N,)."""

    def number(file):
        return [int(x) for x in file.stem.split("_") if x.isdigit()], file.stem

    files = sorted((TEXT / "train").glob(f"{book}*.txt"), key=number)
    text = "\n\n".join(file.read_text() for file in files)
    tokenizer = AutoTokenizer.from_pretrained(BACKBONES[backbone])
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def stretch_of(book, number, seed, args):
    """Return an excerpt of a book, (segments * L' + 1,)."""
    tokens, size = tokens_of(book, args.backbone), args.segments * args.segment_length
    order = torch.randperm((len(tokens) - 1) // size, generator=torch.Generator().manual_seed(0))
    start = int(order[number * 3 + seed]) * size  # seeds 0, 1 and 2 do not share an excerpt
    return tokens[start : start + size + 1]


@torch.no_grad()
def one_stretch(number, seed, model, args):
    """Return the sums of -log p over the tokens of each scored segment, by reading, and their number."""
    length, k, segments = args.segment_length, args.sensory_tokens, []
    state, kv_cache = None, DynamicCache(config=model.backbone.config)
    texts = torch.stack([stretch_of(book, number, seed, args) for book in BOOKS]).to(args.device)
    for place, begin in enumerate(range(0, args.segments * length, length)):
        ids, targets = texts[:, begin : begin + length], texts[:, begin + 1 : begin + length + 1]
        own = model(ids, state=state, use_cache=True)
        whole = model.backbone(ids, use_cache=True, **{cache_name(type(model.backbone)): kv_cache})
        if place >= args.earliest:
            far = max(0, begin - k - length)  # start of the longer window
            logits = [model.backbone(texts[:, i : begin + length]).logits[:, -length:] for i in (begin - k, far)]
            other = replace(state.select_rows([1, 0]), tail=state.tail)
            logits += [whole.logits, own.logits, model(ids, state=other, use_cache=False).logits]
            logits = torch.stack(logits)
            losses = F.cross_entropy(
                logits.double().flatten(0, 2), targets.repeat(len(logits), 1, 1).flatten(), reduction="none"
            )
            losses = losses.view(len(READINGS), len(BOOKS), length).cpu()
            for row, book in enumerate(BOOKS):
                text = texts[row].tolist()
                earlier = set(text[:far])
                is_far = [
                    x in earlier and x not in text[far:i] for i, x in enumerate(text[begin + 1 :][:length], begin + 1)
                ]
                parts = {"far": losses[:, row][:, is_far], "all": losses[:, row]}
                segments.append(
                    {
                        "book": book,
                        "segment": place,
                        "tokens": {"far": sum(is_far), "all": length},
                        "losses": {
                            name: dict(zip(READINGS, (round(x, 4) for x in part.sum(1).tolist())))
                            for name, part in parts.items()
                        },
                    }
                )
        state = own.state
    return {"seed": seed, "stretch": number, "segments": segments}


def measure(args):
    require(BACKBONES[args.backbone], TEXT)
    settings = {"segment_length": args.segment_length, "sensory_tokens": args.sensory_tokens}
    config = HMTConfig(**settings, neural_cache_weight=args.weight)
    set_seed(0)
    backbone = AutoModelForCausalLM.from_pretrained(BACKBONES[args.backbone], dtype=torch.float32)
    model = HMTWrapper.from_backbone(backbone.to(args.device), config).eval()

    def measure_one(number, seed, args):
        return one_stretch(number, seed, model, args)

    yield from measure_parts(measure_one, itertools.product(range(args.stretches), args.seeds), args)


def gain(rows, reading, scored, reference):
    """Return the gain of a reading over another one in nats per token, averaged over tokens, and its standard error.

    Segments are treated as independent; tokens within a segment are not.
    """
    differences = np.array([x["losses"][scored][reference] - x["losses"][scored][reading] for x in rows])
    tokens = np.array([x["tokens"][scored] for x in rows])
    total = max(1, tokens.sum())
    mean = differences.sum() / total
    return mean, math.sqrt(((differences - mean * tokens) ** 2).sum()) / total


def gain_lines(rows, readings, parts):
    """Return the gain of all readings over the first, for `own book` also in each of `parts`, {name: rows}."""
    reference, *others = readings
    lines = []
    for reading in others:
        groups = {"": rows, **parts} if reading == "own book" else {"": rows}
        for name, part in groups.items():
            gains = {x: "{:+.3f} ± {:.3f}".format(*gain(part, reading, x, reference)) for x in SCORED}
            lines.append({"name": reading + name} | gains)
    return lines


def table(result):
    s = result["settings"]
    rows = [segment | {"seed": row["seed"]} for row in result["rows"] for segment in row["segments"]]
    parts = {f", {book}": [row for row in rows if row["book"] == book] for book in BOOKS}
    parts |= {f", seed {seed}": [row for row in rows if row["seed"] == seed] for seed in s["seeds"]}
    lines = gain_lines(rows, READINGS, parts)
    far = sum(row["tokens"]["far"] for row in rows)
    text = (
        f"Decrease of the loss in nats per token, compared with a window of as many positions, ± one standard error over "
        f"{len(rows)} segments of {s['segment_length']} tokens. Each segment is read with the {s['sensory_tokens']} tokens before it. "
        f'The longer window reads {s["segment_length"]} more tokens before the segment. "tokens of earlier segments": the {far} tokens that '
        "have already occurred in an earlier segment, but not within the longer window."
    )
    return f"{text}\n\n{common.markdown(lines, FORM)}"


def main(arguments=None):
    sizes = {"segment_length": 128, "sensory_tokens": 32, "weight": 0.1, "segments": 40, "earliest": 8, "stretches": 1}
    parser = make_parser(__spec__.name, __doc__, "hmt_neural_cache_{backbone}", **sizes, seeds=[0, 1, 2], device="cpu")
    parser.add_argument("--backbone", choices=list(BACKBONES), default="smollm2", help="backbone (default: smollm2)")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
