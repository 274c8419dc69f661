"""What does a memory win in perplexity, over a backbone that reads as many tokens without one?

    python -m scripts.fetch_smollm2 && python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.hmt_perplexity --device cuda              # SmolLM2-135M, in full
    python -m scripts.evidence.hmt_perplexity --device cuda --text pg19  # the same on books from the Hub
    python -m scripts.evidence.hmt_perplexity --backbone llama-demo --segment-length 64 --sensory-tokens 8 \
        --rows-at-once 8 --first-steps 100 --steps 200 --learning-rate 3e-4 \
        --text-length 1024 --texts 48                                    # on a CPU, ten minutes for a model and seed

The same tokens of held-out texts are scored by all. A Llama reads them in windows: blocks of L' tokens; as many tokens
as the single mode sees at a time (a block and the k + 4 before it); blocks that overlap by half, which costs two
positions for each token, as the causal and the published mode do; and as much as its context holds. HMT and RMT read
segments of L' tokens. HMT is also read with the memories of another text in the place of those of the text: what it
loses by that is what the content of its memories is worth.

All are trained on the same tokens, so that none wins by adaptation to the text alone: rows of two segments, then rows
of `--segments`, as in HMT's two stages. The Llama is trained on the blocks of these rows; another one, which reads as
much as its context holds, on whole rows. Some are read as they are, too, without training. All parameters are trained,
under bfloat16 autocast. With --text novels, texts are pieces of one novel that is not trained on, and so is "another
text"; with pg19, pieces of books of the test split of PG-19, one of each book before a second of any.

A prediction counts to the first half of a segment if it is made before token j. The published mode has read that half
by then, and what it has there is no perplexity, but shows how much is given away; that of the second halves is one.
"""

import itertools
import math
import statistics
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoTokenizer

from hf_longctx.corpus import open_source
from scripts.bench import common
from scripts.evidence import hmt_training
from scripts.evidence.hmt_training import AS_IT_IS, BACKBONES, HMT, TEXT, load_backbone, recalls, with_recall, wrap
from scripts.evidence.parts import make_parser, measure_parts, require, run
from scripts.prove_hmt import changed_recall, shuffled_memories


LLAMAS = {  # what a Llama is trained on, and its readings
    "Llama": ("blocks", "blocks and what the single mode sees", "overlapping blocks"),
    "Llama, long rows": ("whole context",),
}
METHODS = (*LLAMAS, *HMT, *(f"{method}{AS_IT_IS}" for method in ("Llama", "HMT, single")))
OWN, OTHER = "segments", "with the memories of another text"  # readings of HMT
REFERENCE = "Llama: overlapping blocks"
SOURCES = ("novels", "pg19")
BINS = 16  # of the positions of a segment
RESAMPLES = 10_000
FORM = """
| model and reading | seeds | positions per token | perplexity | range of seeds | to overlapping blocks |\
 to its own memories | first segment | first halves | second halves | to overlapping blocks | first and last loss |
| {name} | {seeds} | {positions:.2f} | {perplexity} | {range} | {change} | {content} | {first:.2f} | {early:.2f} |\
 {late:.2f} | {late_change} | {losses} |
"""


def source_of(text, part):
    """What `open_source` reads the texts of --text from: the "train" or the "held_out" part."""
    if text == "pg19":
        return text
    return str(TEXT / "train" if part == "train" else TEXT / "held_out.txt")


def documents(text, part, tokenizer):
    """The documents of a part, as tokens (N,), one by one."""
    for document in open_source(source_of(text, part), part)[1]:
        yield torch.tensor(tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"])


def training_tokens(tokenizer, args):
    """Documents of the train part, one after another, as many as all steps read or as there are; (N,).

    Raises:
        ValueError: they are shorter than a row.
    """
    parts, needed = [], args.rows * args.segment_length * (2 * args.first_steps + args.segments * args.steps)
    for document in documents(args.text, "train", tokenizer):
        parts.append(document)
        if sum(map(len, parts)) >= needed:
            break
    tokens, longest = torch.cat(parts), args.segments * args.segment_length
    if len(tokens) < longest:
        raise ValueError(
            f"The train part of {args.text} has {len(tokens)} tokens, and a row of {args.segments} segments {longest}. "
            "Lower --segments, or shorten them."
        )
    return tokens


def held_out_texts(tokenizer, args):
    """At most `args.texts` texts, of each document one before a second of any; (texts, text_length + 1).

    Raises:
        ValueError: there are fewer than `args.rows_at_once`.
    """
    size, pieces = args.text_length, []
    for document in itertools.islice(documents(args.text, "held_out", tokenizer), args.texts):
        pieces += [(i, document[i : i + size + 1]) for i in range(0, len(document) - size, size)]
    texts = [piece for _, piece in sorted(pieces, key=lambda piece: piece[0])][: args.texts]
    if len(texts) < args.rows_at_once:
        raise ValueError(
            f"The held-out part of {args.text} has {len(texts)} texts of --text-length {size} tokens, and "
            f"--rows-at-once is {args.rows_at_once}. Shorten the texts, or read fewer at once."
        )
    return torch.stack(texts[: len(texts) // args.rows_at_once * args.rows_at_once]).to(args.device)


def train(model, method, tokens, segments, steps, file, args, generator):
    """Train on rows of so many segments, as `hmt_training.train` says; the losses."""
    length = segments * args.segment_length

    def losses_of(step):
        starts = torch.randint(len(tokens) - length + 1, (args.rows,), generator=generator)
        for part in starts.split(args.rows_at_once):
            rows = torch.stack([tokens[start : start + length] for start in part]).to(args.device)
            rows = rows.reshape(-1, args.segment_length) if method == "Llama" else rows
            kept = {"logits_to_keep": 1} if method in HMT else {}  # without all logits at once
            with torch.autocast(args.device, torch.bfloat16):
                loss = model(input_ids=rows, labels=rows, **kept).loss
            yield loss * len(part) / args.rows

    return hmt_training.train(model, losses_of, steps, file, args, generator)


def checkpoints(method, seed, args):
    """The files of a training, one for each stage."""
    name = f"{common.result_name(args)}_{METHODS.index(method)}_{seed}"
    return [args.work / f"{name}_{stage}.pt" for stage in (1, 2)]


def trained(method, seed, tokenizer, args):
    """The model of a method, and its losses in both stages."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    name = method.removesuffix(AS_IT_IS)
    model = load_backbone(args)
    if name in HMT:
        model = wrap(model, name, args, **{} if name != method else {"recall": False}).eval()
    if name != method:
        return model, []
    tokens, (first_file, second_file) = training_tokens(tokenizer, args), checkpoints(method, seed, args)
    first = train(model, name, tokens, 2, args.first_steps, first_file, args, generator)
    if name in HMT and recalls(name):
        model = with_recall(model, name, args)
    return model, [first, train(model, name, tokens, args.segments, args.steps, second_file, args, generator)]


# Reading.


def windows(args, context):
    """{reading of a Llama: (positions of a window, tokens from one window to the next)}."""
    length, whole = args.segment_length, min(context, args.text_length)
    return {
        "blocks": (length, length),
        "blocks and what the single mode sees": (length + args.sensory_tokens + 4, length),
        "overlapping blocks": (length, length // 2),
        "whole context": (whole, whole if whole == args.text_length else whole // 2),
    }


def read(model, method, reading, ids, args):
    """Yield the logits of all tokens of some texts, (rows, n, V), piece by piece."""
    if method in HMT:
        state = None
        for segment in ids.split(args.segment_length, dim=1):
            out = model(input_ids=segment, state=state, use_cache=True)
            state = out.state
            yield out.logits
        return
    size, step = windows(args, model.config.max_position_embeddings)[reading]
    for start in range(0, ids.shape[1], step):
        end = min(start + step, ids.shape[1])
        yield model(input_ids=ids[:, max(0, end - size) : end], logits_to_keep=end - start, use_cache=False).logits


@torch.no_grad()
def measure_reading(model, method, reading, texts, args):
    """Mean -log p of a text, of a segment's number, and of a place in a segment.

    Returns:
        "texts": of each text, that of its first segment, and of the first and the second halves of all others.
        "by_segment": of the segments of all texts. "by_position": of `BINS` parts of all segments but the first.
        "positions": how many went through the backbone for each token.
    """
    name, losses, positions = method.removesuffix(AS_IT_IS), [], 0

    def count(_, inputs):
        nonlocal positions
        positions += inputs[0].shape[:2].numel()

    layer = (model.backbone if name in HMT else model).model.layers[0]
    changed = changed_recall(model, shuffled_memories, None, None) if reading == OTHER else nullcontext()
    for _ in read(model, name, reading, texts[:1, : 2 * args.segment_length], args):
        pass  # the first call probes the backbone, which is not counted
    handle = layer.register_forward_pre_hook(count)
    with changed, torch.autocast(args.device, torch.bfloat16):
        for rows in texts.split(args.rows_at_once):
            targets, of_rows = rows[:, 1:], []
            for logits in read(model, name, reading, rows[:, :-1], args):
                there, targets = targets[:, : logits.shape[1]], targets[:, logits.shape[1] :]
                of_rows.append(F.cross_entropy(logits.float().mT, there, reduction="none"))
            losses.append(torch.cat(of_rows, 1).double())
    handle.remove()
    by_segment = torch.cat(losses).unflatten(1, (-1, args.segment_length))
    j, later = args.segment_length // 2, by_segment[:, 1:]
    of_texts = [by_segment[:, 0].mean(1), later[..., :j].mean((1, 2)), later[..., j:].mean((1, 2))]
    of_positions = later.mean((0, 1)).unflatten(0, (BINS, -1)).mean(1)
    return {
        "positions": positions / texts[:, 1:].numel(),
        "texts": [[round(x, 4) for x in of_text] for of_text in torch.stack(of_texts, 1).tolist()],
        "by_segment": [round(x, 4) for x in by_segment.mean((0, 2)).tolist()],
        "by_position": [round(x, 4) for x in of_positions.tolist()],
    }


def readings_of(method):
    if method in LLAMAS:
        return LLAMAS[method]
    name = method.removesuffix(AS_IT_IS)
    if name in LLAMAS:
        return tuple(itertools.chain(*LLAMAS.values()))
    return (OWN, OTHER) if recalls(name) else (OWN,)


def one_model(method, seed, args):
    tokenizer = AutoTokenizer.from_pretrained(BACKBONES[args.backbone])
    texts = held_out_texts(tokenizer, args)
    model, losses = trained(method, seed, tokenizer, args)
    readings = {reading: measure_reading(model, method, reading, texts, args) for reading in readings_of(method)}
    for file in checkpoints(method, seed, args):
        file.unlink(missing_ok=True)
    return {"model": method, "seed": seed, "losses": losses, "readings": readings}


def check(args):
    """Raise a ValueError for options that no model can be trained or read with."""
    unknown = sorted(set(args.methods) - set(METHODS))
    if unknown:
        raise ValueError(f"--methods has {unknown}: choose from {', '.join(map(repr, METHODS))}.")
    least = {"segments": 2, "rows_at_once": 2}  # a text takes the memories of another one
    least |= dict.fromkeys(("rows", "texts", "first_steps", "steps", "save_steps"), 1)
    for name, minimum in least.items():
        if getattr(args, name) < minimum:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {minimum}, and is {getattr(args, name)}.")
    if args.segment_length % BINS:
        raise ValueError(f"--segment-length must be a multiple of {BINS}, and is {args.segment_length}.")
    if args.text_length % args.segment_length or args.text_length < 2 * args.segment_length:
        raise ValueError(
            f"--text-length must be two or more times --segment-length, {args.segment_length}, and is {args.text_length}."
        )
    context = AutoConfig.from_pretrained(BACKBONES[args.backbone]).max_position_embeddings
    if "Llama, long rows" in args.methods and args.segments * args.segment_length > context:
        raise ValueError(
            f"Rows of {args.segments} segments have {args.segments * args.segment_length} tokens, and the context of "
            f"{args.backbone} is {context}. Lower --segments, or leave 'Llama, long rows' out of --methods."
        )


def measure(args):
    require(BACKBONES[args.backbone], *([TEXT] if args.text == "novels" else []))
    check(args)
    keys = [  # reading a Llama as it is takes no seed
        (method, seed)
        for method, seed in itertools.product(args.methods, args.seeds)
        if seed == args.seeds[0] or not method.startswith("Llama") or not method.endswith(AS_IT_IS)
    ]
    yield from measure_parts(one_model, keys, args, args.so_far)


# Showing.


def series(rows):
    """{name of a model and reading: entry of each seed}, in the order of `METHODS`."""
    several = {}
    for row in sorted(rows, key=lambda row: METHODS.index(row["model"])):
        for reading, entry in row["readings"].items():
            name = row["model"] if reading == OWN else f"{row['model']}: {reading}"
            several.setdefault(name, []).append(entry)
    return several


def losses_of_texts(entries, parts=(1, 2)):
    """Mean -log p of each text over some parts of it (see `measure_reading`) and over seeds; (texts,)."""
    return np.mean([np.array(entry["texts"])[:, parts].mean(1) for entry in entries], 0)


def interval(values):
    """The mean, and the bounds of its 95 % bootstrap interval (percentiles).

    >>> mean, low, high = interval(np.array([1.0, 2.0, 3.0]))
    >>> mean, low >= 1 and high <= 3
    (2.0, True)
    """
    drawn = np.random.RandomState(0).randint(len(values), size=(RESAMPLES, len(values)))  # a stream that stays
    return values.mean(), *np.quantile(values[drawn].mean(1), (0.025, 0.975))


def change(losses, reference):
    """Change of the perplexity to that of a reference, text by text, in per cent, with its interval."""
    mean, low, high = (100 * math.expm1(x) for x in interval(losses - reference))
    return f"{mean:+.1f} % ({low:+.1f} to {high:+.1f})"


def line_of(name, several, losses):
    entries, reference, own = several[name], several.get(REFERENCE), several.get(name.removesuffix(f": {OTHER}"))
    of_texts = losses_of_texts(entries)
    means = [math.exp(losses_of_texts([entry]).mean()) for entry in entries]
    line = {"name": name, "seeds": len(entries), "positions": entries[0]["positions"]}
    line["perplexity"] = "{:.2f} ({:.2f} to {:.2f})".format(*map(math.exp, interval(of_texts)))
    if len(means) > 1:
        line["range"] = f"{min(means):.2f} to {max(means):.2f}"
    for part, column in {"first": 0, "early": 1, "late": 2}.items():
        line[part] = math.exp(losses_of_texts(entries, [column]).mean())
    if reference and name != REFERENCE:
        line["change"] = change(of_texts, losses_of_texts(reference))
        line["late_change"] = change(losses_of_texts(entries, [2]), losses_of_texts(reference, [2]))
    if name.endswith(OTHER) and own:
        line["content"] = change(of_texts, losses_of_texts(own))
    if losses:
        line["losses"] = f"{statistics.mean(x[0] for x in losses):.2f}, {statistics.mean(x[1] for x in losses):.2f}"
    return line


def table(result):
    s, several = result["settings"], series(result["rows"])
    ends = {}
    for row in result["rows"]:
        if row["losses"]:
            first, second = row["losses"]
            ends.setdefault(row["model"], []).append((hmt_training.tenth(first), hmt_training.tenth(second[::-1])))
    lines = [line_of(name, several, ends.get(name.partition(": ")[0])) for name in several]
    texts = len(next(iter(several.values()))[0]["texts"])
    text = (
        f"Segments of {s['segment_length']} tokens, {s['sensory_tokens']} of them read again; {s['first_steps']} steps on "
        f"{s['rows']} rows of 2 segments, then {s['steps']} on rows of {s['segments']}, learning rate "
        f"{s['learning_rate']:g}; read are {texts} texts of {s['text_length']} tokens ({s['text']}). Perplexity is that of "
        "all segments of a text but the first, with 95 % bootstrap intervals over texts of the mean over seeds; changes are "
        "taken text by text. Losses are means over the first tenth of the first stage and over the last of the second."
    )
    return f"{text}\n\n{common.markdown(lines, FORM)}"


def plot(result, path):
    """The change of the perplexity to that of overlapping blocks, over the text and over a segment."""
    from matplotlib.figure import Figure

    several, s = series(result["rows"]), result["settings"]
    figure = Figure(figsize=(11, 9), layout="constrained")
    top, bottom = figure.subplots(2)
    reference = several.get(REFERENCE)
    for name, entries in several.items():
        method, _, reading = name.partition(": ")
        style = {"color": f"C{METHODS.index(method.removesuffix(AS_IT_IS))}", "ls": line_style(method, reading)}
        for axes, part in ((top, "by_segment"), (bottom, "by_position")):
            losses = of_seeds(entries, part) - (of_seeds(reference, part) if reference else 0)
            axes.plot(100 * np.expm1(losses) if reference else losses, **style, label=name, marker=".")
    top.set_xlabel("segment of the text")
    bottom.set_xlabel(f"part of a segment ({s['segment_length'] // BINS} tokens each)")
    for axes in (top, bottom):
        axes.set_ylabel("change of perplexity, %" if reference else "loss")
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=90)


def line_style(method, reading):
    if method.endswith(AS_IT_IS):
        return ":"
    return {"": "-", "whole context": "-", "overlapping blocks": "--", OTHER: "--", "blocks": "-"}.get(reading, "-.")


def of_seeds(entries, part):
    return np.mean([entry[part] for entry in entries], 0)


def main(arguments=None):
    sizes = {"segment_length": 512, "sensory_tokens": 32, "rows": 8, "rows_at_once": 2, "segments": 8}
    training = {"first_steps": 200, "steps": 400, "learning_rate": 1e-4, "save_steps": 100}
    asked = {"text_length": 16384, "texts": 20}
    options = {"seeds": [0, 1], "methods": list(METHODS), "device": "cpu"}
    parser = make_parser(__spec__.name, __doc__, "hmt_perplexity_{backbone}", **sizes, **training, **asked, **options)
    parser.add_argument("--backbone", choices=list(BACKBONES), default="smollm2", help="default: %(default)s")
    parser.add_argument("--text", choices=SOURCES, default="novels", help="default: %(default)s")
    parser.add_argument("--so-far", action="store_true", help="show what is measured of it, and measure nothing more")
    run(parser, measure, table, plot, arguments)


if __name__ == "__main__":
    main()
