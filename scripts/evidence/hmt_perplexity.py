"""Compare the perplexity of HMT with its backbone, which reads the same number of tokens without a memory.

    python -m scripts.fetch_model smollm2-135m && python -m scripts.evidence.corpus collect
    python -m scripts.evidence.hmt_perplexity --device cuda --text code --tokens 10000000 --minutes 25 --seeds 0 \
        --methods Llama "HMT, single pass" "HMT, neural cache" "HMT, tokens read again" "Llama, long rows"
    python -m scripts.demo_corpus demo_output/corpus && python -m scripts.evidence.hmt_perplexity  # novels
    python -m scripts.evidence.hmt_perplexity --backbone llama-demo --segment-length 64 --sensory-tokens 8 \
        --rows-at-once 8 --first-steps 100 --steps 200 --learning-rate 3e-4 \
        --text-length 1024 --texts 48                                    # on a CPU, ten minutes for a model and seed

All models score the same tokens of held-out documents. A Llama reads them in four kinds of windows: blocks of L'
tokens; blocks and the k + 4 tokens before them, as many as the single-pass mode attends to; blocks that overlap by
half, which cost two positions per token, more than the published mode and nearly as many as the causal mode; and its
full context. HMT and RMT read segments of L' tokens. HMT also reads each document with the memories of another
document: the increase in perplexity is the contribution of its own memories.

All models are trained on the same tokens, so that none is better adapted to the documents: sequences of two segments,
then sequences of `--segments`, as in HMT's two stages. --tokens sets the steps of both. The Llama is trained on the
blocks of these sequences; a second Llama, which reads its full context, is trained on whole sequences. Some models
are also evaluated without training. All parameters are trained; on a GPU, under bfloat16 autocast. With --text code,
documents are source code of packages, held out by project. With --text novels, models are trained on Moby Dick and
five novels by Jane Austen, and evaluated on a sixth.

After --minutes, unfinished trainings are saved and no other model starts. The same command resumes them, and the table
names the missing models. `--minutes 0` shows which models have been measured.

A prediction belongs to the first half of a segment if it is made before token j. The published mode has already read
that half, also in training. Its value for first halves is therefore not a perplexity, but shows how much leaks; its
value for second halves is a perplexity.
"""

import functools
import itertools
import math

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from hf_longctx.hmt import HMTConfig
from scripts.bench import common
from scripts.evidence import corpus, hmt_training
from scripts.evidence.hmt_reading import BINS, SEGMENTS, SWAPPED, measure_reading
from scripts.evidence.hmt_training import (
    AS_IT_IS,
    BACKBONES,
    HMT,
    TEXT,
    autocast,
    config_of,
    new_model,
    recalls_embeddings,
    second_stage,
)
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import DAY, make_parser, measure_parts, require, run


LLAMAS = {  # name: how the trained Llama reads
    "Llama": ("blocks", "blocks and what the single-pass mode sees", "overlapping blocks"),
    "Llama, long rows": ("whole context",),
}
METHODS = (*LLAMAS, *HMT, *(f"{method}{AS_IT_IS}" for method in ("Llama", "HMT, single pass")))
REFERENCE = "Llama: overlapping blocks"
SOURCES = ("novels", "code")
RESAMPLES = 10_000
PLOTTED = {  # lines of the figure and their labels
    "HMT, single pass": "HMT, single pass",
    "RMT": "RMT",
    "Llama: blocks and what the single-pass mode sees": "window of as many tokens",
    "Llama, long rows: whole context": "whole context",
    f"HMT, single pass: {SWAPPED}": "memories of another text",
}
FORM = """
| model and reading | positions per token | perplexity | change from overlapping blocks | change from its own memories |
| {name} | {positions:.2f} | {perplexity} | {change} | {content} |
"""


@functools.cache
def novels(part, backbone):
    """Return the concatenated novels of the "train" or "held_out" part; (N,)."""
    files = [TEXT / "held_out.txt"]
    if part == "train":
        files = [file for file in sorted((TEXT / "train").glob("*.txt")) if not file.name.startswith("Address")]
    tokenizer = AutoTokenizer.from_pretrained(backbone)
    ids = [tokenizer(file.read_text(), add_special_tokens=False, verbose=False)["input_ids"] for file in files]
    return torch.tensor(list(itertools.chain(*ids)))


def training_tokens(args):
    """Return the concatenated training documents; (N,).

    Raises:
        ValueError: they are shorter than a sequence.
    """
    if args.text == "code":
        tokens = torch.from_numpy(np.load(f"{code(args)}/train.npy").astype(np.int32))
    else:
        tokens = novels("train", BACKBONES[args.backbone])
    longest = args.segments * args.segment_length
    if len(tokens) < longest:
        raise ValueError(
            f"The train part of {args.text} has {len(tokens)} tokens, and a sequence of {args.segments} segments has "
            f"{longest}. Lower --segments, or shorten them."
        )
    return tokens


def code(args):
    """Return the folder with the documents of `scripts.evidence.corpus`, packed with the backbone's tokenizer."""
    folder = corpus.encoded_by(args.data, BACKBONES[args.backbone])
    corpus.main(["pack", "--folder", folder, "--row-length", str(args.text_length + 1)])
    return folder


def held_out_texts(args):
    """Return at most `args.texts` pieces of the held-out documents; (texts, text_length + 1).

    Raises:
        ValueError: there are fewer than two.
    """
    size = args.text_length
    if args.text == "code":
        texts = torch.from_numpy(np.load(corpus.held_out(code(args), size + 1)).astype(np.int64))
    else:
        texts = novels("held_out", BACKBONES[args.backbone]).unfold(0, size + 1, size)
    if len(texts) < 2:  # one document's memories are swapped for another's
        raise ValueError(
            f"The held-out part of {args.text} has {len(texts)} pieces of --text-length {size} tokens, and at least two "
            "are needed. Shorten them."
        )
    return texts[: args.texts].to(args.device)


# Training.


def train(model, method, tokens, segments, steps, file, args, generator):
    """Train on sequences of `segments` segments with `hmt_training.train`, and return the losses."""
    length = segments * args.segment_length

    def losses_of(step):
        starts = torch.randint(len(tokens) - length + 1, (args.rows,), generator=generator)
        for part in starts.split(args.rows_at_once):
            rows = torch.stack([tokens[start : start + length] for start in part]).long().to(args.device)
            rows = rows.reshape(-1, args.segment_length) if method == "Llama" else rows
            kept = {"logits_to_keep": 1} if method in HMT else {}  # without storing all logits
            with autocast(args):
                loss = model(input_ids=rows, labels=rows, **kept).loss
            yield loss * len(part) / args.rows

    return hmt_training.train(model, losses_of, steps, file, args, generator)


def checkpoints(method, seed, args):
    """Return the checkpoint files of a training run, one per stage."""
    name = f"{common.result_name(args)}_{METHODS.index(method)}_{seed}"
    return [args.work / f"{name}_{stage}.pt" for stage in (1, 2)]


def trained(method, seed, args):
    """Return the model of a method, and its losses in both stages."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new_model(method, args)
    if method.endswith(AS_IT_IS):
        return model, []
    tokens, (first_file, second_file) = training_tokens(args), checkpoints(method, seed, args)
    first = train(model, method, tokens, 2, args.first_steps, first_file, args, generator)
    model = second_stage(model, method, args)
    return model, [first, train(model, method, tokens, args.segments, args.steps, second_file, args, generator)]


def readings_of(method):
    if method in LLAMAS:
        return LLAMAS[method]
    name = method.removesuffix(AS_IT_IS)
    if name in LLAMAS:
        return tuple(itertools.chain(*LLAMAS.values()))
    return (SEGMENTS, SWAPPED) if recalls_embeddings(name) else (SEGMENTS,)


def one_model(method, seed, args):
    texts = held_out_texts(args)
    model, losses = trained(method, seed, args)
    readings = {reading: measure_reading(model, method, reading, texts, args) for reading in readings_of(method)}
    for file in checkpoints(method, seed, args):
        file.unlink(missing_ok=True)
    return {"model": method, "seed": seed, "losses": losses, "readings": readings}


def check(args):
    """Raise ValueError for lengths that are inconsistent or exceed the context."""
    length, memories = args.segment_length, HMTConfig().memory_size
    if length % BINS or args.text_length % length or not 2 <= args.text_length // length <= memories:
        raise ValueError(
            f"--segment-length must be a multiple of {BINS}, got {length}, and --text-length 2 to {memories} times as "
            f"long, got {args.text_length}."
        )
    context = AutoConfig.from_pretrained(BACKBONES[args.backbone]).max_position_embeddings
    config_of("HMT, single pass", args).check(context)
    if "Llama, long rows" in args.methods and args.segments * length > context:
        raise ValueError(
            f"Rows of {args.segments} segments have {args.segments * length} tokens, and the context of "
            f"{args.backbone} is {context}. Lower --segments, or leave 'Llama, long rows' out of --methods."
        )


def measure(args):
    require(BACKBONES[args.backbone], *([TEXT] if args.text == "novels" else []))
    if args.tokens:  # a fifth of them in the first stage
        tokens_of_segment = args.rows * args.segment_length
        args.first_steps = max(1, round(args.tokens / 5 / tokens_of_segment / 2))
        args.steps = max(1, round(args.tokens * 4 / 5 / tokens_of_segment / args.segments))
    check(args)
    yield from measure_parts(one_model, keys_of(args.methods, args.seeds), args)


def keys_of(methods, seeds):
    """Return the parts of the experiment: each method with each seed, but a Llama as it is takes none."""
    return [
        (method, seed)
        for method, seed in itertools.product(methods, seeds)
        if seed == seeds[0] or method != f"Llama{AS_IT_IS}"
    ]


# Showing.


def series(rows):
    """Return {name of a model and reading: {seed: entry}}, in the order of `METHODS`."""
    several = {}
    for row in sorted(rows, key=lambda row: METHODS.index(row["model"])):
        for reading, entry in row["readings"].items():
            name = row["model"] if reading == SEGMENTS else f"{row['model']}: {reading}"
            several.setdefault(name, {})[row["seed"]] = entry
    return several


def losses_of_texts(entries, parts=(1, 2)):
    """Return the mean -log p of each text over seeds and some of its parts (see `measure_reading`); (texts,)."""
    return np.mean([np.array(entry["texts"])[:, parts].mean(1) for entry in entries.values()], 0)


def interval(values):
    """Return the mean and its 95 % percentile bootstrap interval.

    >>> mean, low, high = interval(np.array([1.0, 2.0, 3.0]))
    >>> mean, low >= 1 and high <= 3
    (2.0, True)
    """
    # RandomState is reproducible across NumPy versions
    drawn = np.random.RandomState(0).randint(len(values), size=(RESAMPLES, len(values)))
    return values.mean(), *np.quantile(values[drawn].mean(1), (0.025, 0.975))


def change(entries, reference, parts=(1, 2)):
    """Return the perplexity change from a reference in percent, with its interval; None without a common seed."""
    seeds = entries.keys() & (reference or {}).keys()
    if entries is reference or not seeds:
        return None
    losses = [losses_of_texts({seed: x[seed] for seed in sorted(seeds)}, parts) for x in (entries, reference)]
    mean, low, high = (100 * math.expm1(x) for x in interval(losses[0] - losses[1]))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def line_of(name, several):
    entries, reference = several[name], several.get(REFERENCE)
    line = {"name": name}
    line["positions"] = next(iter(entries.values()))["positions"]
    if not name.startswith("HMT, paper"):  # it has read the first halves before it predicts them
        line["perplexity"] = "{:.2f} ({:.2f} to {:.2f})".format(*map(math.exp, interval(losses_of_texts(entries))))
        line["change"] = change(entries, reference)
    if name.endswith(SWAPPED):
        line["content"] = change(entries, several.get(name.removesuffix(f": {SWAPPED}")))
    return {column: x for column, x in line.items() if x is not None}


def table(result):
    s, several = result["settings"], series(result["rows"])
    lines = [line_of(name, several) for name in several if AS_IT_IS not in name]
    texts = len(next(iter(next(iter(several.values())).values()))["texts"])
    source = {
        "novels": "pieces of one novel",
        "code": "sources of held-out projects",
    }
    done = {(row["model"], row["seed"]) for row in result["rows"]}
    missing = [
        f"{method}, seed {seed}" for method, seed in keys_of(s["methods"], s["seeds"]) if (method, seed) not in done
    ]
    text = (
        f"Segments of {s['segment_length']} tokens; {texts} documents of {s['text_length']} tokens, {source[s['text']]}. Perplexity is "
        "that of all segments but the first, as a mean over seeds, with 95 % bootstrap intervals over documents."
        + f" Not reached: {'; '.join(missing)}."
        * bool(missing)
    )
    return f"{text}\n\n{common.markdown(lines, FORM)}"


def plot(result, path):
    """Plot the perplexity change relative to overlapping blocks, by segment and by position in a segment."""
    several, s = series(result["rows"]), result["settings"]
    reference = several.get(REFERENCE, {})
    over_text, over_segment = [], []
    for name, label in PLOTTED.items():
        seeds = several.get(name, {}).keys() & reference.keys()
        for lines, part in ((over_text, "by_segment"), (over_segment, "by_position")):
            if seeds:
                changes = mean_of_seeds(several[name], seeds, part) - mean_of_seeds(reference, seeds, part)
                points = [[change] for change in 100 * np.expm1(changes)]
                lines.append(Line(label, range(len(points)), points, control=name.endswith(SWAPPED)))
    tokens = s["segment_length"] // BINS
    draw_panels(
        path,
        f"Perplexity around {s['backbone']}, relative to overlapping blocks",
        {"over a text": over_text, "over a segment": over_segment},
        across=("segment of the text", f"part of a segment, {tokens} tokens each"),
        up="change, %",
    )


def mean_of_seeds(entries, seeds, part):
    return np.mean([entries[seed][part] for seed in sorted(seeds)], 0)


def main(arguments=None):
    sizes = {"segment_length": 512, "sensory_tokens": 32, "rows": 8, "rows_at_once": 4, "segments": 8}
    training = {"first_steps": 200, "steps": 400, "learning_rate": 1e-4, "save_steps": 50}
    asked = {"text_length": 16384, "texts": 20, "tokens": 0, "minutes": DAY}
    options = {"seeds": [0, 1, 2], "methods": list(METHODS), "device": "cpu"}
    parser = make_parser(
        __spec__.name, __doc__, "hmt_perplexity_{backbone}_{text}", **sizes, **training, **asked, **options
    )
    parser.add_argument("--backbone", choices=list(BACKBONES), default="smollm2", help="backbone (default: smollm2)")
    parser.add_argument("--text", choices=SOURCES, default="novels", help="documents (default: novels)")
    parser.add_argument("--data", default=str(corpus.FOLDER), metavar="FOLDER", help="corpus for --text code")
    run(parser, measure, table, plot, arguments)


if __name__ == "__main__":
    main()
