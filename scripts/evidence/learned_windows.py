"""Compare learned windows per key head with other caches of the same size, on pretrained models.

    python -m scripts.fetch_model smollm2-135m
    python -m scripts.evidence.learned_windows [--models smollm2-135m] [--caches full windows streaming]

The windows in model_cards/windows were learned with `hf-longctx finetune --recipe windows`. Each cache reads the same
passages, records and documents, none of which the windows were learned from:

- copies: a passage of a novel, and the passage again. All tokens of the second reading are scored.
- gap copies: a passage of 250 tokens, 1,000 tokens of other text, and the passage again.
- lines: records of 60 lines, and a question about one line. The score is the log-probability of the answer.
- the perplexity of a novel and of Python code.

"streaming" has one window for all heads, as StreamingLLM. snapkv and expected are presses of kvpress, and are measured
if kvpress is installed. Quantized caches are measured if optimum-quanto is installed. All other caches keep as many
keys as the learned windows keep of the same context. The same command resumes.
"""

import gzip
import importlib.util
import math
import sysconfig
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.metrics import LocalReader, forgetting_curve, line_retrieval
from hf_longctx.windows import HeadWindows
from scripts.bench import common
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import make_parser, measure_parts, run
from scripts.fetch_model import MODELS


WINDOWS = common.ROOT / "model_cards" / "windows"
NOVEL = common.ROOT / "model_cards" / "held_out.txt.gz"
CODE = ("argparse.py", "tarfile.py", "inspect.py")
CACHES = {
    "full": "full cache",
    "windows": "learned windows",
    "streaming": "StreamingLLM",
    "snapkv": "SnapKV",
    "expected": "ExpectedAttention",
    "quantized4": "4 bits",
    "quantized2": "2 bits",
}
PRESSES = {"snapkv": "kvpress.SnapKVPress", "expected": "kvpress.ExpectedAttentionPress"}
GAP, GAP_PASSAGE, LINES, PIECES, SKIPPED = 1000, 250, 60, 3, 256
TABLE = """
| model | cache | keep | share of the cache at 8,192 tokens | copies 250 tokens | 1,000 | 2,000 | gap copies |\
 log-probability of lines | perplexity of a novel, 2,048 tokens | 8,192 | of code, 2,048 |
| {model} | {cache} | {keep} | {share:.0%} | {copy[250]:.1%} | {copy[1000]:.1%} | {copy[2000]:.1%} | {gap:.1%} |\
 {lines:.2f} | {novel[2048]:+.1%} | {novel[8192]:+.1%} | {code[2048]:+.1%} |
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


def reader_of(name, kind, keep, context):
    """Return the reader of a model whose cache keeps as much of a context as the learned windows."""
    model = load(name)[0]
    if kind == "full":
        return LocalReader(model, cache="full")
    if kind.startswith("quantized"):
        return LocalReader(model, cache=f"quantized:{kind[-1]}")
    windows = HeadWindows.from_pretrained(WINDOWS / f"{name}-{keep}")
    share = windows.share(context)
    if kind == "streaming":
        window = max(1, round(share * context) - windows.sinks)
        windows = HeadWindows([[window] * len(row) for row in windows.windows], windows.sinks)
    return LocalReader(model, cache=f"{PRESSES[kind]}:{1 - share:.4f}" if kind in PRESSES else windows)


def copy(reader, length, args):
    curve = forgetting_curve(reader, load(args.model)[2], lengths=[length], repeats=args.repeats)
    return [count / curve.points[0].scored_tokens for count in curve.points[0].copy_correct]


def gap_copies(reader, args):
    """Return the share of tokens copied of each passage, after other text."""
    _, tokenizer, novel = load(args.model)
    rng, shares = np.random.default_rng(0), []
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for _ in range(args.repeats):
        begin, other = rng.integers(len(novel) // 2 - GAP, size=2)
        passage = novel[begin : begin + GAP_PASSAGE]
        between = novel[len(novel) // 2 + other :][:GAP]
        context = np.concatenate([bos, passage, between]).astype(np.int64)
        ids = np.concatenate([context, passage])
        with reader.reading(ids[: 2 * GAP_PASSAGE], None):
            first = len(context) + 8  # the model must first recognize the passage
            best = reader.score(ids[:-1], ids[first:], range(first - 1, len(ids) - 1), context=len(context))[1]
        shares.append(float((best == ids[first:]).mean()))
    return shares


def loss(reader, tokens, length, pieces):
    """Return the mean loss of each piece after its first `SKIPPED` tokens."""
    losses, step = [], (len(tokens) - length) // pieces
    for begin in range(0, pieces * step, step):
        ids = tokens[begin : begin + length]
        with reader.reading(ids[:SKIPPED], None):
            log_probs, _ = reader.score(ids[:-1], ids[SKIPPED:], range(SKIPPED - 1, length - 1), context=1)
        losses.append(-float(np.mean(log_probs)))
    return losses


def measure_one(name, kind, keep, task, length, args):
    """Measure one task with one cache."""
    args.model = name
    reader = reader_of(name, kind, keep, length)
    _, tokenizer, novel = load(name)
    if task == "copy":
        return {"shares": copy(reader, length, args)}
    if task == "gap":
        return {"shares": gap_copies(reader, args)}
    if task == "lines":
        found = line_retrieval(reader, tokenizer, lines=[LINES], repeats=args.repeats, replies=False)
        return {"log_probs": [answer.log_prob for part in found.parts for answer in part.answers]}
    if task == "novel":
        return {"losses": loss(reader, novel, length, PIECES)}
    files = [Path(sysconfig.get_paths()["stdlib"], file).read_text() for file in CODE]
    return {"losses": [x for text in files for x in loss(reader, encode(tokenizer, text), length, 1)]}


def tasks(args):
    texts = [*(("novel", n) for n in args.contexts), ("code", args.contexts[0])]
    return [*(("copy", n) for n in args.lengths), ("gap", GAP + GAP_PASSAGE), ("lines", 2000), *texts]


def keys(args):
    missing = {
        kind
        for kind, package in (
            ("quantized4", "optimum"),
            ("quantized2", "optimum"),
            *dict.fromkeys(PRESSES, "kvpress").items(),
        )
        if importlib.util.find_spec(package) is None
    }
    for name in args.models:
        keeps = sorted(folder.name.removeprefix(f"{name}-") for folder in WINDOWS.glob(f"{name}-*"))
        for task, length in tasks(args):
            for kind in (kind for kind in args.caches if kind not in missing):
                if kind in PRESSES and task in ("novel", "code"):
                    continue  # a press compresses a prompt, and a document does not have one
                for keep in keeps if kind in ("windows", "streaming", *PRESSES) else ["1"]:
                    yield name, kind, keep, task, length


def measure(args):
    cells = list(keys(args))
    for key, found in zip(cells, measure_parts(measure_one, cells, args)):
        model, _, keep, _, length = key
        if keep != "1":  # the share of the keys that the cache keeps in this measurement
            found |= {"share": HeadWindows.from_pretrained(WINDOWS / f"{model}-{keep}").share(length)}
        (values,) = (found[name] for name in ("shares", "log_probs", "losses") if name in found)
        yield dict(zip(("model", "cache", "keep", "task", "length"), key)) | found | {"mean": float(np.mean(values))}


def describe(rows):
    """Return the cells of one table row for each model, cache and share."""
    groups = {}
    for row in rows:
        groups.setdefault((row["model"], row["cache"], row["keep"]), []).append(row)
    for (model, kind, keep), several in groups.items():
        cells = {"model": model, "cache": CACHES[kind], "copy": {}, "novel": {}, "code": {}, "keep": keep}
        if kind == "full":
            cells["share"] = 1.0
        elif keep != "1":
            cells["share"] = HeadWindows.from_pretrained(WINDOWS / f"{model}-{keep}").share(8192)
        for row in several:
            if row["task"] == "copy":
                cells["copy"][row["length"]] = np.mean(row["shares"])
            elif row["task"] == "gap":
                cells["gap"] = np.mean(row["shares"])
            elif row["task"] == "lines":
                cells["lines"] = np.mean(row["log_probs"])
            else:
                same = (model, "full", row["task"], row["length"])
                full = [x for x in rows if (x["model"], x["cache"], x["task"], x["length"]) == same]
                if full:
                    cells[row["task"]][row["length"]] = math.exp(row["mean"] - full[0]["mean"]) - 1
        yield cells


def table(result):
    return common.markdown(list(describe(result["rows"])), TABLE)


def draw(result, path):
    """Draw what is copied over the share of the cache, for the longest passage."""
    longest = max(row["length"] for row in result["rows"] if row["task"] == "copy")
    panels = {}
    for model in dict.fromkeys(row["model"] for row in result["rows"]):
        lines = []
        for kind in ("windows", "streaming", *PRESSES):
            points = sorted(
                (HeadWindows.from_pretrained(WINDOWS / f"{model}-{row['keep']}").share(row["length"]), row["shares"])
                for row in result["rows"]
                if (row["model"], row["cache"], row["task"], row["length"]) == (model, kind, "copy", longest)
            )
            if points:
                lines.append(Line(CACHES[kind], *zip(*points)))
        full = [
            row["shares"]
            for row in result["rows"]
            if (row["model"], row["cache"], row["task"], row["length"]) == (model, "full", "copy", longest)
        ]
        if full and lines:
            lines.append(Line(CACHES["full"], [0, 1], [[np.mean(full[0])]] * 2, control=True))
            panels[model] = lines
    if panels:
        draw_panels(
            path,
            f"What a smaller cache retains: copies of {longest:,} tokens",
            panels,
            across=f"share of the keys that the cache keeps of {longest:,} tokens",
            up="copied correctly",
            notes="lines: mean of all passages; areas: range",
            percent=True,
        )


def main(arguments=None):
    models = sorted({folder.name.rpartition("-")[0] for folder in WINDOWS.glob("*-0.*")})
    defaults = dict(models=models, caches=[*CACHES], lengths=[250, 1000, 2000], repeats=10, contexts=[2048, 8192])
    run(
        make_parser(__spec__.name, __doc__, "learned_windows", **defaults, device="cpu"),
        measure,
        table,
        draw,
        arguments,
    )


if __name__ == "__main__":
    main()
