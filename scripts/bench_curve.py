"""What a forgetting curve costs: every protocol beside a plain loop, in time and in memory.

    OMP_NUM_THREADS=1 python scripts/bench_curve.py --model FOLDER --tokens TOKENS.npy --json bench_curve.json

The plain loop is the reference protocol without anything clever: one forward pass per input, all logits, no cache.
Every run has a process of its own, whose peak memory above that of the loaded model is given. Without --model, a small
Llama with random weights takes its place: fine for the cost of "reference" and "nested", but "adaptive" goes where a
model's memory ends, so give it one that has some. CPU seconds, to be believed on a busy machine sooner than wall-clock
ones, are what the ratios compare.
"""

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np


LLAMA = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 16384,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL = LLAMA | {"hidden_size": 192, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 1024}
LARGE = LLAMA | {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024, "vocab_size": 32000}
# name: (what it shows, Llama, longest length, lengths, repeats, protocols beside the plain one)
SETUPS = {
    "small": ("vocabulary 1024", SMALL, 512, 16, 10, ["reference", "nested"]),
    "large": ("vocabulary 32000", LARGE, 768, 6, 5, ["reference", "nested"]),
    "long": ("vocabulary 32000, one length", LARGE, 2048, 1, 1, ["reference"]),
    "adaptive": ("vocabulary 1024, the usual 32 points x 10", SMALL, 512, 32, 10, ["reference", "nested", "adaptive"]),
}


def plain_curve(model, tokens, lengths, repeats):
    """The protocol as its definition; (copy counts, LM counts) per length."""
    import torch

    from hf_longctx.metrics.curve.protocol import model_input, order_samples, scored_logits

    points = []
    with torch.no_grad():
        for n, samples in zip(lengths, order_samples(tokens, lengths, repeats, seed=0)):
            counts = {"copy": [], "LM": []}
            for sample in samples:
                for kind, prefix in (("copy", sample.target), ("LM", sample.irrelevant)):
                    ids = torch.from_numpy(model_input(prefix, sample.target, 1, 2))
                    guesses = model(ids[None]).logits.argmax(-1)[0]
                    scored = scored_logits(n)
                    counts[kind].append(int((guesses[scored.start : scored.stop] == ids[scored.start + 1 : -1]).sum()))
            points.append((counts["copy"], counts["LM"]))
    return points


def memory(key):
    """A field of /proc/self/status, in MB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def run_one(args):
    """Measure in this process and print JSON."""
    import torch
    import transformers

    from hf_longctx.metrics import Run, forgetting_curve, linear_lengths

    _, config, longest, n, repeats, _ = SETUPS[args.setup]
    longest, repeats = max(16, int(longest * args.scale)), max(1, int(repeats * args.scale))
    lengths = linear_lengths(longest, n) if n > 1 else [longest]
    if args.model and config is SMALL:
        model, tokens = transformers.AutoModelForCausalLM.from_pretrained(args.model), np.load(args.tokens)
    else:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        tokens = np.random.default_rng(0).integers(3, config["vocab_size"], 4 * longest + 1000)
    model.eval()
    with torch.no_grad():
        model(torch.arange(3, 19)[None])  # first-time costs
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
    if args.protocol == "plain":
        points = plain_curve(model, tokens.astype(np.int64), lengths, repeats)
        found = {"counts": points}
    else:
        options = {"bos_token_id": 1, "eos_token_id": 2, "protocol": args.protocol}
        options["run"] = Run(tokens_per_pass=args.tokens_per_pass)
        curve = forgetting_curve(model, tokens, lengths=lengths, repeats=repeats, **options)
        found = {
            "counts": [(p.copy_correct, p.lm_correct) for p in curve.points],
            "points": len(curve.points),
            "lengths": {reading: str(getattr(curve, f"{reading}_length")) for reading in ("fine", "coarse")},
            "intervals_95": {reading: str(curve.interval(reading)) for reading in ("fine", "coarse")},
        }
    found |= {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
    print(json.dumps(found | {"extra_mb": memory("VmHWM") - before}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setups", nargs="+", choices=SETUPS, default=list(SETUPS), help="default: all")
    parser.add_argument("--model", help="folder of a small Llama, for the setups with a small vocabulary")
    parser.add_argument("--tokens", help="ids of a text in its vocabulary, .npy")
    parser.add_argument("--tokens-per-pass", type=int, metavar="N", help="memory budget (default: the library's)")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink lengths and repeats, for a trial")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers there")
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    parser.add_argument("--protocol", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if bool(args.model) != bool(args.tokens):
        parser.error("--model and --tokens go together")
    if args.setup:
        return run_one(args)

    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "load_average": os.getloadavg()}
    versions = {name: version(name) for name in ("hf-longctx", "torch", "transformers")}
    result = {"machine": machine, "versions": versions, "model": args.model, "scale": args.scale, "setups": {}}
    print("| setup | protocol | CPU s | faster | extra MB | less | other counts | fine, coarse |")
    print("|---|---|---|---|---|---|---|---|")
    for setup in args.setups:
        runs = result["setups"][setup] = {}
        for protocol in ["plain", *SETUPS[setup][-1]]:
            command = [sys.executable, __file__, "--setup", setup, "--protocol", protocol, "--scale", str(args.scale)]
            command += ["--tokens-per-pass", str(args.tokens_per_pass)] if args.tokens_per_pass else []
            command += ["--model", args.model, "--tokens", args.tokens] if args.model else []
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            run = runs[protocol] = json.loads(out.splitlines()[-1])
            faster, less = (runs["plain"][key] / max(run[key], 1e-9) for key in ("cpu_s", "extra_mb"))
            other = ""
            if protocol == "reference":
                run["other_counts"] = int(np.abs(np.subtract(run["counts"], runs["plain"]["counts"])).sum())
                other = run["other_counts"]
            found = ", ".join(run["intervals_95"].values()) if "intervals_95" in run else ""
            print(
                f"| {SETUPS[setup][0]} | {protocol} | {run['cpu_s']:.1f} | {faster:.2f}x | {run['extra_mb']:.0f} "
                f"| {less:.1f}x | {other} | {found} |",
                flush=True,
            )
    if args.json:
        for runs in result["setups"].values():
            for run in runs.values():
                del run["counts"]
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
