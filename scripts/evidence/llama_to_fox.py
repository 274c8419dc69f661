"""Convert SmolLM2-135M to a FoX, and compare it with the Llama after the same training.

    python -m scripts.fetch_model smollm2-135m && python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.llama_to_fox [--steps 200] [--length 2048] [--full-steps 8] [--device cuda]

Two runs of `hf-longctx finetune` see the same sequences in the same order, with equal steps and learning rates:
`--recipe fox-from-llama`, and as a control `--recipe lora` on the Llama itself. The common gain is adaptation to the
data; the difference is due to the gates. `--full-steps` also trains all parameters of both, for that number of steps.

Both are evaluated on a held-out novel. The script measures the loss on sequences of the training length, and its
paired difference from the untrained Llama; the decay time of each head (to a factor 1/e); the forgetting curve; and
what a pruned cache (observed bound on the logits) drops from a longer document.
"""

import json
import statistics
import subprocess
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from hf_longctx.corpus import load_tokens
from hf_longctx.fox import PrunedCache
from hf_longctx.fox.convert import from_llama
from hf_longctx.fox.modeling_fox import FoxForgetGate
from hf_longctx.metrics import forgetting_curve
from hf_longctx.training.data import pack
from scripts.bench import common
from scripts.bench.pruned import megabytes
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import make_parser, measure_parts, require, run
from scripts.fetch_model import SMOLLM2


TEXT = common.ROOT / "demo_output" / "corpus"
RUNS = {  # name of the model: options of hf-longctx finetune
    "Llama, LoRA": ["--recipe", "lora", "--merge"],
    "FoX, LoRA": ["--recipe", "fox-from-llama"],
    "Llama, all parameters": ["--recipe", "lora", "--use_peft", "false"],
    "FoX, all parameters": ["--recipe", "fox-from-llama", "--use_peft", "false"],
}
CONVERTED = {"FoX, open gates": None, "FoX, gates of one row": "row"}
CHUNK = 512  # tokens per pass; the cache is pruned after each
LOSSES = """
| model | loss | difference from the untrained Llama | largest change of a logit |
| {model} | {loss:.4f} | {difference:+.4f} ± {error:.4f} | {change:.1e} |
"""
GATES = """
| model | fastest | median | slowest | heads below a row |
| {model} | {fastest:.0f} | {median:.0f} | {slowest:.0f} | {fast:.1%} |
"""


def run_folder(model, args):
    return args.work / "llama_to_fox" / model.lower().replace(", ", "_").replace(" ", "_")


def train(name, args):
    """Fine-tune by the command, which resumes a stopped run, and return the losses of all steps."""
    tokens = args.work / "llama_to_fox" / "tokens.npy"
    if not tokens.exists():
        pack(str(TEXT / "train"), AutoTokenizer.from_pretrained(SMOLLM2), tokens)
    output = run_folder(name, args)
    full = "--use_peft" in RUNS[name]
    steps, rate = (args.full_steps, args.full_learning_rate) if full else (args.steps, args.learning_rate)
    command = [sys.executable, "-m", "hf_longctx", "finetune", "--model", SMOLLM2, *RUNS[name], "--output_dir", output]
    options = {
        "--data": tokens,
        "--max_length": args.length,
        "--gradient_accumulation_steps": args.rows,
        "--bf16": "false",
    }
    options |= {"--max_steps": steps, "--learning_rate": rate, "--save_steps": max(1, steps // 3)}
    subprocess.run([*command, *(x for option in options.items() for x in map(str, option))], check=True)
    steps = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return {"losses": [step["loss"] for step in steps if "loss" in step]}


def load(model, args):
    if model in RUNS:
        return AutoModelForCausalLM.from_pretrained(run_folder(model, args) / "model").to(args.device).eval()
    llama = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).to(args.device).eval()
    if model == "Llama":
        return llama
    return from_llama(llama, decay_time=CONVERTED[model] and float(args.length)).eval()


def held_out(args):
    """Return the tokens of the held-out novel, (N,)."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    return torch.from_numpy(load_tokens(tokenizer, str(TEXT / "held_out.txt")).tokens).to(args.device)


@torch.no_grad()
def loss(name, args):
    """Return losses per sequence and, for a conversion, the largest change of a logit in the first sequence."""
    model, tokens = load(name, args), held_out(args)
    starts = np.linspace(0, len(tokens) - args.length, args.held_out_rows).astype(int)
    rows = [tokens[None, start : start + args.length] for start in starts]
    entry = {"losses": [model(input_ids=row, labels=row).loss.item() for row in rows]}
    if name in CONVERTED:
        entry["change"] = (model(rows[0]).logits - load("Llama", args)(rows[0]).logits).abs().max().item()
    return entry


@torch.no_grad()
def gates(name, args):
    """Return all heads' decay times in tokens, from the mean of log f over a document; ascending."""
    model, means = load(name, args), []
    for module in model.modules():
        if isinstance(module, FoxForgetGate):
            module.register_forward_hook(lambda gate, inputs, log_f: means.append(log_f.mean((0, 2))))
    model(held_out(args)[None, : args.length], logits_to_keep=1)
    return {"decay_times": (-1 / torch.cat(means)).sort().values.tolist()}


def curve(name, args):
    tokens = held_out(args).cpu().numpy()
    measured = forgetting_curve(load(name, args), tokens, lengths=args.curve_lengths, repeats=args.repeats)
    return {"copied": [p.copy_mean for p in measured.points], "guessed": [p.lm_mean for p in measured.points]}


@torch.no_grad()
def pruned(name, args, length):
    """Read a document in chunks with a pruned and with a full cache; the loss is measured on the last chunk."""
    model, ids = load(name, args), held_out(args)[None, :length]
    pruned = PrunedCache(model, args.tolerance, logit_bound="observed", prune_every=CHUNK)
    caches = {"full": DynamicCache(config=model.config), "pruned": pruned}
    loss, logits = {}, {}
    for kind, cache in caches.items():
        *chunks, last = ids.split(CHUNK, dim=1)
        for chunk in chunks:
            model(chunk, cache=cache, logits_to_keep=1)
        output = model(last, cache=cache, labels=last)
        loss[kind], logits[kind] = output.loss.item(), output.logits
    pruned.prune()
    dropped = pruned.dropped.float() / ids.shape[1]
    return {
        "tokens": ids.shape[1],
        "dropped": dropped.mean().item(),
        "most": dropped.max().item(),
        "bound": torch.stack([layer.logit_bound() for layer in pruned.layers]).median().item(),
        "cache_mb": megabytes(pruned),
        "full_mb": megabytes(caches["full"]),
        "loss": loss["pruned"],
        "full_loss": loss["full"],
        "change": (logits["pruned"] - logits["full"]).abs().max().item(),
    }


PARTS = {"training": train, "loss": loss, "gates": gates, "curve": curve, "pruned": pruned}


def one_part(kind, model, *length_and_args):
    *length, args = length_and_args
    return {"kind": kind, "model": model, **PARTS[kind](model, args, *length)}


def measure(args):
    require(SMOLLM2, TEXT)
    trained = [model for model in RUNS if args.full_steps or "--use_peft" not in RUNS[model]]
    keys = [("loss", model) for model in ("Llama", *CONVERTED)]
    keys += [(kind, model) for model in trained for kind in ("training", "loss")]
    foxes = [model for model in trained if model.startswith("FoX")]
    keys += [("gates", model) for model in ("FoX, gates of one row", *foxes)]
    keys += [("curve", model) for model in ("Llama", *trained)]
    keys += [("pruned", model, length) for model in foxes[:1] for length in args.contexts]
    yield from measure_parts(one_part, keys, args)


def table(result):
    s = result["settings"]
    rows = {kind: [row for row in result["rows"] if row["kind"] == kind] for kind in PARTS}
    losses = []
    for row in rows["loss"]:
        entry = {"model": row["model"], "loss": statistics.mean(row["losses"]), "change": row.get("change")}
        if row["model"] != "Llama":
            differences = [a - b for a, b in zip(row["losses"], rows["loss"][0]["losses"])]
            error = statistics.stdev(differences) / len(differences) ** 0.5
            entry |= {"difference": statistics.mean(differences), "error": error}
        losses.append(entry)
    quantiles = []
    for row in rows["gates"]:
        times = row["decay_times"]
        names = {"fastest": 0, "median": 0.5, "slowest": 1}
        entry = {name: np.quantile(times, share) for name, share in names.items()}
        quantiles.append({"model": row["model"], "fast": np.mean(np.array(times) < s["length"]), **entry})
    full = f" (all parameters: {s['full_steps']} and {s['full_learning_rate']:g})" if s["full_steps"] else ""
    text = (
        f"Sequences of {s['length']} tokens, {s['rows']} a step, {s['steps']} steps, learning rate "
        f"{s['learning_rate']:g}{full}. Loss of {s['held_out_rows']} sequences of the held-out novel (± standard "
        "error of the difference):"
    )
    parts = [
        (text, losses, LOSSES),
        ("Decay times of the heads in tokens, before and after training:", quantiles, GATES),
    ]
    return "\n\n".join(f"{text}\n\n{common.markdown(lines, form)}" for text, lines, form in parts if lines)


def draw(result, path):
    """Plot the training losses, and the heads' decay times before and after training."""
    losses = [
        Line(row["model"], range(1, len(row["losses"]) + 1), [[loss] for loss in row["losses"]])
        for row in result["rows"]
        if row["kind"] == "training" and row["model"].endswith("LoRA")
    ]
    times = [
        Line(row["model"], range(len(row["decay_times"])), [[time] for time in row["decay_times"]])
        for row in result["rows"]
        if row["kind"] == "gates"
    ]
    draw_panels(
        path,
        "SmolLM2-135M trained as a FoX and as a Llama",
        {"training loss, nats": losses, "decay time, tokens": times},
        across=("step", "heads, the fastest first"),
        up="",
        share=False,
        log=("y2",),
    )


def main(arguments=None):
    training = {"length": 256, "rows": 2, "steps": 24, "learning_rate": 2e-4}
    full = {"full_steps": 0, "full_learning_rate": 2e-5}
    reading = {"held_out_rows": 8, "curve_lengths": [32, 64, 128, 256], "repeats": 2, "contexts": [8192]}
    parser = make_parser(
        __spec__.name, __doc__, "llama_to_fox", **training, **full, **reading, tolerance=1e-2, device="cpu"
    )
    run(parser, measure, table, draw, arguments)


if __name__ == "__main__":
    main()
