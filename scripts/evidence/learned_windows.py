"""Compare learned windows per key head with other caches of the same size, on pretrained models.

    python -m scripts.fetch_model smollm2-135m
    python -m scripts.evidence.learned_windows [--models smollm2-135m] [--caches full windows streaming]

The windows in model_cards/windows were learned with `hf-longctx finetune --recipe windows`. Each cache reads the same
passages, records and documents, none of which the windows were learned from:

- copies: a passage of a novel, and the passage again. All tokens of the second reading are scored.
- gap copies: a passage of 250 tokens, 1,000 tokens of other text, and the passage again.
- lines: a record of lines, and ten questions about it, each with its answer. The score is the share of digits that the
  model predicts right after the digits before them.
- needle: a sentence that is hidden in a novel at one of five depths, and a question about it. The score is the share
  of answers that greedy decoding gives token for token.
- the perplexity of a novel and of Python code.

Copies and the needle begin with BOS, as the measurements of hf-longctx do. Gap copies, lines and documents begin with
the tokens that the tokenizer adds, as a user's prompt does: BOS for Gemma, and no token for SmolLM2 and Qwen. Other
gap copies are read after the BOS that the configs of SmolLM2 and Qwen name.

"streaming" has one window for all heads with full attention, as StreamingLLM. snapkv and expected are presses of
kvpress, and are measured if kvpress is installed. Quantized caches are measured if optimum-quanto is installed. All
other caches keep as many keys as the learned windows keep of the same context. "windows4" is a cache of learned
windows whose keys and values are quantized to 4 bits at the end of the context, in groups of 64 values of one token
and head. Keys and values of later tokens are not quantized.

The table shows the difference from the full cache with a 95 % CI, paired by passage, record or document. The same
command resumes, and --minutes 0 writes what is finished.
"""

import gzip
import importlib.util
import math
import re
import sysconfig
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.metrics import LocalReader, needle_in_a_haystack
from hf_longctx.metrics.curve.protocol import model_inputs, order_samples, scored_logits
from hf_longctx.metrics.report.paired import interval
from hf_longctx.metrics.run.reader import special_ids
from hf_longctx.metrics.tasks.lines import draw_record
from hf_longctx.windows import HeadWindows
from hf_longctx.windows.layers import attention_layers, own_window
from scripts.bench import common
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import DAY, make_parser, measure_parts, run
from scripts.fetch_model import MODELS, PACKAGES


WINDOWS = common.ROOT / "model_cards" / "windows"
NOVEL = common.ROOT / "model_cards" / "held_out.txt.gz"
CODE = ("argparse.py", "tarfile.py", "inspect.py")
CACHES = {
    "full": "full cache",
    "windows": "learned windows",
    "streaming": "StreamingLLM",
    "windows4": "learned windows, 4 bits",
    "snapkv": "SnapKV",
    "expected": "ExpectedAttention",
    "quantized4": "4 bits",
    "quantized2": "2 bits",
}
PRESSES = {"snapkv": "kvpress.SnapKVPress", "expected": "kvpress.ExpectedAttentionPress"}
NEEDS = dict.fromkeys(PRESSES, "kvpress") | dict.fromkeys(("quantized4", "quantized2", "windows4"), "optimum")
WHOLE = ("full", "quantized4", "quantized2")  # caches that keep all keys
GAP, GAP_PASSAGE, QUESTIONS, PIECES, SKIPPED = 1000, 250, 10, 3, 256
RECORDS = {2000: 10, 8000: 6}  # records of lines, by the number of tokens of a record and its questions
SHOWN = 2000  # tokens of a passage in the figure
COPIES = """
| model | cache | windows | share of the cache at 8,192 tokens | copies 250 tokens | 1,000 | 2,000 |\
 gap copies | gap copies after BOS | digits of lines, 2,000 tokens | 8,000 | needle, 2,000 tokens |
| {model} | {cache} | {keep} | {share:.1%} | {copy[250]} | {copy[1000]} | {copy[2000]} |\
 {gap[1250]} | {gap_bos[1250]} | {lines[2000]} | {lines[8000]} | {needle[2000]} |
"""
PERPLEXITY = """
| model | cache | windows | perplexity of a novel, 2,048 tokens | 8,192 | of code, 2,048 |
| {model} | {cache} | {keep} | {novel[2048]} | {novel[8192]} | {code[2048]} |
"""


@cache
def load(name):
    """Return a model, its tokenizer and a novel as token ids."""
    folder = MODELS / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model, tokenizer, encode(tokenizer, gzip.open(NOVEL, "rt").read())


def encode(tokenizer, text):
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def beginning(tokenizer):
    """Return the tokens that the tokenizer adds before a text."""
    return np.array(tokenizer("")["input_ids"], dtype=np.int64)


class QuantizedWindows:
    """Windows whose cache stores the context in 4 bits, as the `QuantizedCache` of transformers does."""

    def __init__(self, windows):
        self.windows, self.apply, self.remove = windows, windows.apply, windows.remove

    def cache(self):
        window_cache = self.windows.cache()
        window_cache.prune = partial(quantize, window_cache)  # the reader calls it after the context
        return window_cache


def quantize(window_cache):
    """Quantize and dequantize all keys and values in a cache of windows."""
    from transformers.cache_utils import QuantoQuantizedLayer

    layer = QuantoQuantizedLayer(nbits=4)
    for store in (store for window_layer in window_cache.layers for store in window_layer.stores()):
        store.keys, store.values = (
            layer._dequantize(layer._quantize(x.contiguous(), axis=0)) for x in (store.keys, store.values)
        )


def windows_of(name, keep):
    return HeadWindows.from_pretrained(WINDOWS / f"{name}-{keep}")


def reader_of(name, kind, keep, context):
    """Return the reader of a model whose cache keeps as much of a context as the learned windows."""
    model = load(name)[0]
    if kind in WHOLE:
        return LocalReader(model, cache=kind if kind == "full" else f"quantized:{kind[-1]}")
    windows = windows_of(name, keep)
    if kind == "windows4":
        return LocalReader(model, cache=QuantizedWindows(windows))
    if kind in PRESSES:
        return LocalReader(model, cache=f"{PRESSES[kind]}:{1 - windows.share(context):.4f}")
    if kind == "streaming":
        pairs = [(row, own_window(x, math.inf)) for row, x in zip(windows.windows, attention_layers(model))]
        learned = HeadWindows([row for row, sliding in pairs if sliding is None], windows.sinks)
        window = max(1, round(learned.share(context) * context) - windows.sinks)
        windows = HeadWindows([[-1 if sliding else window] * len(row) for row, sliding in pairs], windows.sinks)
    return LocalReader(model, cache=windows)


def copies(reader, name, length, args):
    """Return the share of tokens copied of each passage, with the passages of a forgetting curve."""
    bos, eos = special_ids(reader, None, None)
    rows = model_inputs("copy", order_samples(load(name)[2], [length], args.repeats, 0)[length], bos, eos)
    scored = scored_logits(length, whole=True)
    with reader.reading(rows[0], None):
        best = reader.predict(rows, 1 + length, scored)
    return (best == rows[:, scored.start + 1 : scored.stop + 1]).mean(1).tolist()


def gap_copies(reader, name, args, before):
    """Return the share of tokens copied of each passage, after other text."""
    novel = load(name)[2]
    rng, shares = np.random.default_rng(0), []
    for _ in range(args.repeats):
        begin, other = rng.integers(len(novel) // 2 - GAP, size=2)
        passage = novel[begin : begin + GAP_PASSAGE]
        between = novel[len(novel) // 2 + other :][:GAP]
        context = np.concatenate([before, passage, between])
        ids = np.concatenate([context, passage])
        with reader.reading(ids[: 2 * GAP_PASSAGE], None):
            first = len(context) + 8  # the model must first recognize the passage
            best = reader.score(ids[:-1], ids[first:], range(first - 1, len(ids) - 1), context=len(context))[1]
        shares.append(float((best == ids[first:]).mean()))
    return shares


def lines(reader, name, length):
    """Return the share of digits predicted right for each record. Record and questions have about `length` tokens."""
    tokenizer, shares = load(name)[1], []
    example = draw_record(QUESTIONS, 0, 0)
    line, question = (len(encode(tokenizer, text)) for text in (example.text, example.question + example.answer))
    count = (length - QUESTIONS * question) * QUESTIONS // line
    for repeat in range(RECORDS[length]):
        record = draw_record(count, 0, repeat)
        asked = re.findall(r"line (\S+): REGISTER_CONTENT is <(\d+)>", record.text)
        context = np.append(beginning(tokenizer), encode(tokenizer, record.text))
        parts, digits = [context], [np.zeros(len(context), bool)]
        for name, number in (asked[i] for i in np.random.default_rng(repeat).permutation(count)[:QUESTIONS]):
            words = record.question.replace(asked[record.asked_line][0], name)
            for text, scored in ((f"{words} <", False), (number, True), (">", False)):
                parts.append(encode(tokenizer, text))
                digits.append(np.full(len(parts[-1]), scored))
        ids, scored, first = np.concatenate(parts), np.concatenate(digits), len(context) + 1
        with reader.reading(ids[:512], None):
            best = reader.score(ids[:-1], ids[first:], range(first - 1, len(ids) - 1), context=len(context))[1]
        shares.append(float((best == ids[first:])[scored[first:]].mean()))
    return shares


def loss(reader, bos, tokens, length, pieces):
    """Return the mean loss of each piece after its first `SKIPPED` tokens."""
    losses, step = [], (len(tokens) - length) // pieces
    for begin in range(0, pieces * step, step):
        ids = np.append(bos, tokens[begin : begin + length]).astype(np.int64)[:length]
        with reader.reading(ids[:SKIPPED], None):
            log_probs, _ = reader.score(ids[:-1], ids[SKIPPED:], range(SKIPPED - 1, length - 1), context=1)
        losses.append(-float(np.mean(log_probs)))
    return losses


def measure_one(name, kind, keep, task, length, args):
    """Measure one task with one cache."""
    reader = reader_of(name, kind, keep, length)
    _, tokenizer, novel = load(name)
    if task == "copy":
        return {"shares": copies(reader, name, length, args)}
    if task == "gap":
        return {"shares": gap_copies(reader, name, args, beginning(tokenizer))}
    if task == "gap_bos":
        return {"shares": gap_copies(reader, name, args, [tokenizer.bos_token_id])}
    if task == "lines":
        return {"shares": lines(reader, name, length)}
    if task == "needle":
        found = needle_in_a_haystack(reader, tokenizer, novel, lengths=[length], depths=[5], repeats=2, replies=False)
        answers = [answer for cell in found.cells for answer in cell.answers]
        return {"shares": [float(x.exact) for x in answers], "answer_log_probs": [x.log_prob for x in answers]}
    bos = beginning(tokenizer)
    if task == "novel":
        return {"losses": loss(reader, bos, novel, length, PIECES)}
    files = [Path(sysconfig.get_paths()["stdlib"], file).read_text() for file in CODE]
    return {"losses": [x for text in files for x in loss(reader, bos, encode(tokenizer, text), length, 1)]}


def tasks(args):
    texts = [*(("novel", n) for n in args.contexts), ("code", args.contexts[0])]
    records = [("lines", n) for n in RECORDS]
    gaps = [(task, GAP + GAP_PASSAGE) for task in ("gap", "gap_bos")]
    return [*(("copy", n) for n in args.lengths), *gaps, *records, ("needle", 2000), *texts]


def keys(args):
    # --minutes 0 measures nothing, so finished rows need no packages
    kinds = [kind for kind in args.caches if not args.minutes or importlib.util.find_spec(NEEDS.get(kind, "torch"))]
    for name in args.models:
        keeps = sorted(folder.name.removeprefix(f"{name}-") for folder in WINDOWS.glob(f"{name}-*"))
        for task, length in tasks(args):
            for kind in kinds:
                if task in ("novel", "code") and kind not in ("full", "windows", "streaming"):
                    continue  # the cache is compressed after a prompt, and a document does not have one
                for keep in ["1"] if kind in WHOLE else keeps:
                    yield name, kind, keep, task, length


def measure(args):
    for key in dict.fromkeys(keys(args)):
        for found in measure_parts(measure_one, [key], args):
            model, _, keep, _, length = key
            if keep != "1":  # the share of the keys that the cache keeps in this measurement, and of a longer context
                share = partial(windows_of(model, keep).share, model=load(model)[0])
                found = found | {"share": share(length), "share_8192": share(8192)}
            mean = float(np.mean(found.get("shares", found.get("losses"))))
            yield dict(zip(("model", "cache", "keep", "task", "length"), key)) | found | {"mean": mean}


def against(row, full):
    """Format a measurement: the mean of the full cache, and the difference of any other cache with its 95 % CI."""
    if "losses" in row:
        if row is full:
            return f"{math.exp(row['mean']):.2f}"
        differences = np.subtract(row["losses"], full["losses"])
        mean, low, high = (100 * math.expm1(x) for x in (differences.mean(), *interval(differences, 0.0)))
        return f"{mean:+.1f}%" + f" ({low:+.1f} to {high:+.1f})" * (high < math.inf)
    if row is full:
        return f"{row['mean']:.1%}"
    differences = np.subtract(row["shares"], full["shares"])
    mean, low, high = (100 * x for x in (differences.mean(), *interval(differences, 1 / row["length"])))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def describe(rows):
    """Return the cells of one table row for each model, cache and share."""
    groups = {}
    for row in rows:
        groups.setdefault((row["model"], row["cache"], row["keep"]), []).append(row)
    full = {(row["model"], row["task"], row["length"]): row for row in rows if row["cache"] == "full"}
    for (model, kind, keep), several in groups.items():
        cells = {"model": model, "cache": CACHES[kind], "keep": keep.replace("-", ", ")}
        cells |= {"keep": "", "share": 1.0} if kind in WHOLE else {"share": several[0]["share_8192"]}
        for row in several:
            same = full.get((model, row["task"], row["length"]))
            if same is not None:
                cells.setdefault(row["task"], {})[row["length"]] = against(row, same)
        yield cells


def table(result):
    cells = list(describe(result["rows"]))
    read = [row for row in cells if "novel" in row or "code" in row]
    return f"{common.markdown(cells, COPIES)}\n\n{common.markdown(read, PERPLEXITY)}"


def draw(result, path):
    """Draw what is copied over the share of the cache."""
    panels = {}
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["model"], row["task"], row["length"]) == (model, "copy", SHOWN)]
        lines, full = [], [row for row in rows if row["cache"] == "full"]
        for kind in ("windows", "streaming", *PRESSES):
            seeds = {}
            for row in rows:
                if row["cache"] == kind:
                    seeds.setdefault(row["keep"].partition("-")[0], []).append(row)
            points = sorted(
                (np.mean([row["share"] for row in same]), [x for row in same for x in row["shares"]])
                for same in seeds.values()
            )
            if points:
                lines.append(Line(CACHES[kind], *zip(*points)))
        if full and lines:
            lines.append(Line(CACHES["full"], [0, 1], [[full[0]["mean"]]] * 2, control=True))
            panels[model] = lines
    if panels:
        draw_panels(
            path,
            f"What a smaller cache retains: copies of {SHOWN:,} tokens",
            panels,
            across=f"share of {SHOWN:,} keys kept",
            up="copied correctly",
            notes="lines: mean of all passages and runs; areas: range",
            percent=True,
        )


def main(arguments=None):
    models = [name for name in PACKAGES if any(WINDOWS.glob(f"{name}-*"))]
    defaults = dict(models=models, caches=[*CACHES], lengths=[250, 1000, 2000], repeats=10, contexts=[2048, 8192])
    run(
        make_parser(__spec__.name, __doc__, "learned_windows", **defaults, minutes=DAY, device="cpu"),
        measure,
        table,
        draw,
        arguments,
    )


if __name__ == "__main__":
    main()
