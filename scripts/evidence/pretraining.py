"""FoX and Transformers of 36 million parameters, trained on the same tokens and evaluated at eight times the length.

    python -m scripts.evidence.corpus collect
    python -m scripts.evidence.pretraining --minutes 25 --device cuda [--ablation] [--learning-rates 1e-3 2e-3 4e-3]

FoX (Pro), FoX (LLaMA), Transformer (Pro) and Llama are trained by `hf-longctx train` on package sources with equal
tokens, batches, schedules and learning rates; several rates form a sweep for each model. Gates are initialized to
decay times from 4 tokens to the training length. --ablation trains the rows of the paper's Table 3: FoX (Pro) with
other gates, and without each component. --models selects rows.

Each model is evaluated on held-out projects: loss by position (Fig. 2), forgetting curve, needle in code, and line
retrieval. Differences from the first model are tested in pairs of documents. "blocks pruned" is the share that a FoX's
kernels skip at its config's tolerance, "keys dropped" is the share that a `PrunedCache` of the same tolerance drops,
and "change" is the largest resulting change of a logit.

--tokens defaults to what an H200 trains in half of --minutes, by speeds measured there. The same command resumes a
stopped run. Training and evaluation do not start after --minutes, and the table names what is missing.
"""

import gc
import itertools
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_longctx.fox import PrunedCache
from hf_longctx.metrics import (
    ForgettingCurve,
    LineRetrieval,
    NeedleGrid,
    Run,
    forgetting_curve,
    line_retrieval,
    needle_in_a_haystack,
    paired_differences,
    position_loss,
    style,
)
from hf_longctx.metrics.report.paired import holm, interval, p_values
from scripts.bench import common
from scripts.bench.gpu.pruned_blocks import count_pruned_blocks
from scripts.evidence import corpus
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import make_parser, measure_parts, run


FOX = ("fox-pro-36m", ["decay_time_min=4", "decay_time_max={length}"])
MODELS = {  # name: preset, and fields of its configuration
    "FoX (Pro)": FOX,
    "FoX (LLaMA)": ("fox-36m", FOX[1]),
    "Transformer (Pro)": ("transformer-pro-36m", []),
    "Llama": ("llama-36m", []),
}
ABLATION = {
    "FoX (Pro)": FOX,
    "gate without input": (FOX[0], [*FOX[1], "forget_gate=bias_only"]),
    "fixed gate": (FOX[0], [*FOX[1], "forget_gate=fixed"]),
    "RoPE instead of the gate": MODELS["Transformer (Pro)"],
    "neither gate nor RoPE": ("transformer-pro-36m", ["rope_parameters=null"]),
    "no QK-norm": (FOX[0], [*FOX[1], "qk_norm=false", "qk_norm_shared=false"]),
    "no output gate": (FOX[0], [*FOX[1], "output_gate=null"]),
    "no output norm": (FOX[0], [*FOX[1], "output_norm=false"]),
    "no token shift": (FOX[0], [*FOX[1], "k_shift=false", "v_shift=false"]),
    "FoX (LLaMA)": MODELS["FoX (LLaMA)"],
}
RESULTS = {"curve": ForgettingCurve, "needle": NeedleGrid, "lines": LineRetrieval}
SPEED = {"Llama": 4.1e5, "FoX (LLaMA)": 3.0e5}  # tokens per second on an H200; 2.4e5 for the others
BINS = 48  # position bins, evenly spaced on a log scale
TABLE = """
| model | learning rate | seed | training loss | loss to {T} | to {T2} | to {T4} | to {T8} | fine length | coarse length |\
 needle to {T} | needle beyond | lines to {T} | lines beyond | blocks pruned | keys dropped | change | not reached |
| {model} | {learning_rate:g} | {seed} | {training_loss:.3f} | {bands[0]:.3f} | {bands[1]:.3f} | {bands[2]:.3f} |\
 {bands[3]:.3f} | {fine} | {coarse} | {needle[0]:.0%} | {needle[1]:.0%} | {lines[0]:.0%} | {lines[1]:.0%} |\
 {blocks_pruned:.0%} | {keys_dropped:.0%} | {change:.1e} | {missing} |
"""
TREND = """
| model | compared with | training loss, difference over 0 to 20 % of the steps | 20 to 40 % | 40 to 60 % | 60 to 80 % | 80 to 100 % |
| {model} | {first} | {parts[0]:+.3f} | {parts[1]:+.3f} | {parts[2]:+.3f} | {parts[3]:+.3f} | {parts[4]:+.3f} |
"""
TESTS = """
| model | compared with | measured | difference | 95 % CI | p, corrected | pairs |
| {model} | {first} | {measured} | {difference} | {low} to {high} | {p:.3f} | {pairs} |
"""


# Training.


def affordable(speeds, args):
    """Return the tokens that an H200 trains each model on in half of the time, 30 % of which is a reserve.

    `speeds`: of each model, in tokens a second.
    """
    trainings = len(args.learning_rates) * len(args.seeds)
    return int(0.7 * 0.5 * 60 * args.minutes / sum(trainings / speed for speed in speeds))


def run_folder(name, rate, seed, args):
    slug = "".join(c if c.isalnum() else "_" for c in name.lower())
    return args.work / f"{slug}_{rate:g}_{seed}"


def train_command(name, args):
    """Return the pretraining command of a model, and its options."""
    preset, fields = (MODELS | ABLATION)[name]
    fields = [field.format(length=args.length) for field in [*fields, *args.set]]
    return ["train", *(["--set", *fields] if fields else [])], {"model": preset, "tokenizer": f"{args.data}/tokenizer"}


def train(name, rate, seed, args, until):
    """Train a model, or resume its training, until it finishes or time runs out."""
    folder = run_folder(name, rate, seed, args)
    if (folder / "model").exists() or time.monotonic() > until:
        return
    folder.mkdir(parents=True, exist_ok=True)
    steps = max(1, args.tokens // (args.rows * args.length))
    words, options = train_command(name, args)
    options |= {
        "data": f"{args.data}/train.npy",
        "output_dir": folder / "run",
        "max_length": args.length,
        "max_steps": steps,
        "warmup_steps": max(1, steps // 10),
        "learning_rate": rate,
        "per_device_train_batch_size": args.rows,
        "save_steps": 500,
        "seed": seed,
        "use_cpu": str(args.device == "cpu").lower(),
    }
    options |= dict(option.split("=", 1) for option in args.train)
    words = [*words, *(str(word) for name, value in options.items() for word in (f"--{name}", value))]
    command = [sys.executable, "-m", "hf_longctx", *words]
    with open(folder / "log", "a") as log:
        process = subprocess.Popen(command, cwd=common.ROOT, stdout=log, stderr=log)
        try:
            process.wait(max(0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # saves a checkpoint
            process.wait()
    if (folder / "run" / "model").exists():
        (folder / "run" / "model").rename(folder / "model")


def reason(folder):
    """Return why a model's training is incomplete."""
    log = folder / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    return f"training: {lines[-1][:200]}" if lines else "not begun"


# Evaluation.


def evaluate(name, rate, seed, args):
    """Return the evaluation results of a trained model."""
    folder = run_folder(name, rate, seed, args)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=dtype).to(args.device).eval()
    is_fox = model.config.model_type == "fox" and model.config.forget_gate != "none"
    rows = np.load(corpus.held_out(args.data, args.times * args.length))[: args.documents]
    history = json.loads((folder / "run" / "trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    figures = {"model": name, "learning_rate": rate, "seed": seed, "parameters": model.num_parameters()}
    figures |= {"training_losses": losses, "training_loss": float(np.mean(losses[-10:]))}
    begin = time.monotonic()
    figures |= measure_loss(model, tokenizer, rows, args)
    figures |= measure_retrieval(model, tokenizer, rows.reshape(-1), args)
    figures |= measure_pruning(model, rows[:4], args) if is_fox else {}
    figures["evaluation_seconds"] = time.monotonic() - begin
    del model
    gc.collect()
    return figures


def measure_loss(model, tokenizer, rows, args):
    """Return the loss by position, and for each document its mean in each of the `bands`."""
    length, tokens, run = rows.shape[1], rows.reshape(-1), pass_size(args)
    losses = [
        position_loss(model, tokens, tokenizer=tokenizer, context_length=length, starts=[start], run=run).loss
        for start in range(0, tokens.size, length)
    ]
    losses = np.array(losses)
    edges = np.unique(np.geomspace(1, length, BINS + 1).astype(int))
    mean = losses.mean(0)
    return {
        "positions": [float((a * b) ** 0.5) for a, b in itertools.pairwise(edges.tolist())],
        "loss": [float(mean[a - 1 : b - 1].mean()) for a, b in itertools.pairwise(edges.tolist())],
        "documents": [losses[:, a:b].mean(1).tolist() for a, b in bands(args.length, args.times)],
    }


def bands(length, times):
    """Return the ranges of positions to 1, 2, 4 ... training lengths."""
    edges = [0, *(length * 2**i for i in range(times.bit_length()))]
    return list(itertools.pairwise(edges))


def pass_size(args):
    return Run(tokens_per_pass=32768 if args.device == "cuda" else 512)


def measure_retrieval(model, tokenizer, tokens, args):
    """Return a forgetting curve, a needle in code and line retrieval, as their JSON documents."""
    lengths = [args.length // 32 * 2**i for i in range((16 * args.times).bit_length())]
    read = {"run": pass_size(args), "train_length": args.length}
    curve = forgetting_curve(model, tokens, tokenizer=tokenizer, lengths=lengths, repeats=args.repeats, **read)
    prompts = dict(lengths=args.prompts, depths=[0.0, 0.25, 0.5, 0.75, 1.0], repeats=args.repeats)
    results = {"curve": curve}
    results["needle"] = needle_in_a_haystack(model, tokenizer, tokens, **prompts, replies=False, **read)
    results["lines"] = line_retrieval(
        model, tokenizer, lines=args.lines, repeats=5 * args.repeats, replies=False, **read
    )
    return {name: json.loads(result.to_json()) for name, result in results.items()}


@torch.no_grad()
def measure_pruning(model, rows, args):
    """Return the shares of blocks that a trained FoX's kernels skip, and of keys that a PrunedCache drops."""
    rows = torch.from_numpy(rows.astype(np.int64)).to(model.device)
    figures = {}
    if args.device == "cuda":
        model.set_attn_implementation("forgetting_triton")
        with count_pruned_blocks() as blocks:
            for row in rows:
                model(row[None], logits_to_keep=1)
        figures["blocks_pruned"] = blocks.pruned / blocks.total
        model.set_attn_implementation("sdpa")
    last, dropped, changes = args.length // 4, [], []
    bound = "weights" if model.config.qk_norm else "observed"
    for row in rows:
        logits = []
        for cache in (PrunedCache(model, logit_bound=bound), DynamicCache(config=model.config)):
            for piece in row[:-last].split(args.length):
                model(piece[None], cache=cache, logits_to_keep=1)
            logits.append(model(row[None, -last:], cache=cache).logits.float())
            if isinstance(cache, PrunedCache):
                dropped.append(cache.dropped.float().mean().item() / (row.numel() - last))
        changes.append((logits[0] - logits[1]).abs().max().item())
    return figures | {"keys_dropped": float(np.mean(dropped)), "change": max(changes)}


# Results.


def measure(args):
    """Yield a row for each model, learning rate and seed: trained and evaluated, or what is missing."""
    args.models = args.models or list(ABLATION if args.ablation else MODELS)
    args.tokens = args.tokens or affordable([SPEED.get(name, 2.4e5) for name in args.models], args)
    args.work = args.work / f"pretraining_{args.tokens}"
    begin = time.monotonic()
    args.until = begin + 60 * args.minutes
    corpus.main(["pack", "--folder", args.data, "--row-length", str(args.times * args.length)])
    keys = list(itertools.product(args.models, args.learning_rates, args.seeds))
    until = begin + 60 * args.minutes * 0.8
    with ThreadPoolExecutor(args.at_once) as pool:
        trained = {pool.submit(train, *key, args, until): key for key in keys}
        for future in as_completed(trained):
            future.result()
            name, rate, seed = key = trained[future]
            folder = run_folder(*key, args)
            is_trained = (folder / "model").exists()
            missing = {"missing": "evaluation" if is_trained else reason(folder)}
            found = list(measure_parts(evaluate, [key] if is_trained else [], args))
            yield from found or [{"model": name, "learning_rate": rate, "seed": seed} | missing]


def in_order(result):
    names = result["settings"].get("models") or list(MODELS)
    return sorted(result["rows"], key=lambda row: (names.index(row["model"]), row["learning_rate"], row["seed"]))


def best_rate(rows):
    """Return the evaluated rows at the learning rate of each model that has the lowest training loss."""
    best = {}
    for row in rows:
        if "documents" in row:
            best.setdefault(row["model"], {}).setdefault(row["learning_rate"], []).append(row)
    mean = lambda several: np.mean([row["training_loss"] for row in several])  # noqa: E731
    return [row for rates in best.values() for row in min(rates.values(), key=mean)]


def read(row, name):
    return RESULTS[name].from_json(json.dumps(row[name]))


def describe(row, length):
    """Return the values of a table row."""
    if "documents" not in row:
        return row
    curve, needle, lines = (read(row, name) for name in RESULTS)
    bound = {"needle": length, "lines": length // 24}  # a line has about 24 tokens
    shares = {}
    for name, result in (("needle", needle), ("lines", lines)):
        rates = result.rates()
        within, beyond = ([r for n, r in rates.items() if (n <= bound[name]) == side] for side in (True, False))
        shares[name] = [float(np.mean(x)) if x else None for x in (within, beyond)]
    fine, coarse = curve.fine_length, curve.coarse_length
    losses = {i: np.mean(x) for i, x in enumerate(row["documents"])}
    return row | shares | {"bands": losses, "fine": fine, "coarse": coarse}


def trend(rows):
    """Yield how the difference in training loss from the first model develops: its means over fifths of the steps.

    Models of one seed read the same batches in the same order. Trainings of less than five steps are left out.
    """
    first = {row["seed"]: row for row in rows if row["model"] == rows[0]["model"]}
    for row in rows:
        other = first.get(row["seed"], row)
        if row is not other and 5 <= len(row["training_losses"]) == len(other["training_losses"]):
            difference = np.subtract(row["training_losses"], other["training_losses"])
            parts = [part.mean() for part in np.array_split(difference, 5)]
            yield {"model": row["model"], "first": other["model"], "parts": parts}


def tests(rows, length):
    """Yield paired differences from the first model, in losses and in retrieval averaged over lengths."""
    first, *others = rows
    for row in others:
        if (row["seed"], row["model"]) == (first["seed"], first["model"]):
            continue
        pair = {"model": row["model"], "first": first["model"]}
        differences = np.array(row["documents"]) - np.array(first["documents"])  # (bands, documents)
        ranges = bands(length, 2 ** (len(differences) - 1))
        for (a, b), d, p in zip(ranges, differences, holm(p_values(differences, 0.0))):
            low, high = interval(d, 0.0)
            found = {"difference": f"{d.mean():+.3f}", "low": f"{low:+.3f}", "high": f"{high:+.3f}"}
            yield pair | {"measured": f"loss at {a + 1} to {b}, nats", **found, "p": p, "pairs": len(d)}
        for name in RESULTS:
            *_, d = paired_differences(read(first, name), read(row, name))
            found = {"difference": f"{d.second - d.first:+.1%}", "low": f"{d.low:+.1%}", "high": f"{d.high:+.1%}"}
            yield pair | {"measured": f"{name}, mean over lengths", **found, "p": d.holm, "pairs": d.pairs}


def table(result):
    s = result["settings"]
    rows, length = in_order(result), s["length"]
    heads = {"{T}": length, "{T2}": 2 * length, "{T4}": 4 * length, "{T8}": 8 * length}
    template = TABLE
    for name, tokens in heads.items():
        template = template.replace(name, str(tokens))
    text = (
        f"{s['tokens']:,} tokens per model, {s['rows']} rows of {length} tokens a step, warmup for a tenth of the steps, then a cosine "
        "schedule. Losses are means over held-out documents in nats. Retrieval is the share of right answers."
    )
    parts = [text, common.markdown([describe(row, length) for row in rows], template)]
    if len(best := best_rate(rows)) > 1:
        if found := list(trend(best)):
            parts.append(common.markdown(found, TREND))
        parts.append(common.markdown(list(tests(best, length)), TESTS))
    return "\n\n".join(parts)


def draw(result, path):
    """Plot loss and copy accuracy by position, for the first six models, one colour each."""
    length, panels = result["settings"]["length"], {"loss by position": [], "forgetting curve": []}
    rows, times = best_rate(in_order(result)), result["settings"].get("times", 8)
    by_model = itertools.groupby(rows, key=lambda row: row["model"])
    for name, several in itertools.islice(by_model, len(style.MODELS)):
        several = list(several)
        places = range(2, len(several[0]["loss"]))
        losses = [[row["loss"][i] for row in several] for i in places]
        panels["loss by position"].append(Line(name, [several[0]["positions"][i] for i in places], losses))
        curves = [read(row, "curve") for row in several]
        copied = [[curve.points[i].copy_mean for curve in curves] for i in range(len(curves[0].points))]
        panels["forgetting curve"].append(Line(name, [point.length for point in curves[0].points], copied))
    if rows:
        draw_panels(
            path,
            f"Trained on {length} tokens and read at {times * length}",
            panels,
            across=("position", "tokens to copy"),
            up=("loss, nats", "share copied"),
            log=True,
            marks={"training length": length},
        )


def main(arguments=None):
    sizes = {"minutes": 25.0, "tokens": 0, "length": 2048, "times": 8, "rows": 32, "documents": 48, "repeats": 6}
    options = {
        "prompts": [512, 1024, 2048, 4096, 8192],
        "lines": [10, 20, 40, 80, 160, 320],
        "learning_rates": [2e-3],
        "seeds": [0],
        "at_once": 1,
    }
    parser = make_parser(__spec__.name, __doc__, "pretraining{ablation}", **sizes | options, device="cpu")
    parser.add_argument(
        "--data", default=str(corpus.FOLDER), metavar="FOLDER", help="corpus (default: demo_output/code)"
    )
    parser.add_argument("--train", nargs="*", default=[], metavar="NAME=VALUE", help="additional training options")
    parser.add_argument("--models", nargs="+", choices=list(MODELS | ABLATION), help="models (default: all)")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of all configurations")
    parser.add_argument(
        "--ablation", action="store_const", const="_ablation", default="", help="train the rows of Table 3"
    )
    run(parser, measure, table, draw, arguments)


if __name__ == "__main__":
    main()
