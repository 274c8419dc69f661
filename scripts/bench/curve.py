"""Time and memory of each forgetting-curve protocol, compared with a plain loop.

    OMP_NUM_THREADS=1 python -m scripts.bench.curve --model FOLDER TOKENS.npy

The plain loop defines the reference protocol: one forward pass per input, all logits, no cache. Every run is a new
process; extra MB is its peak memory minus the loaded model. Without --model, a small Llama with random weights is
measured, which suffices for the cost of "reference"; "adaptive" searches for the end of a model's memory, so it needs
a trained model. --scale below 1 shrinks lengths and repeats for a trial. Ratios compare CPU seconds, which depend less
on other processes than wall-clock time.
"""

import time

import numpy as np
import torch
import transformers

from hf_longctx.metrics import Run, forgetting_curve, linear_lengths
from hf_longctx.metrics.curve.protocol import model_inputs, order_samples, scored_logits
from scripts.bench import common


BOS, EOS = 1, 2
LLAMA = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 16384,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
SMALL = LLAMA | {"hidden_size": 192, "num_hidden_layers": 3, "intermediate_size": 512, "vocab_size": 1024}
LARGE = LLAMA | {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1024, "vocab_size": 32000}
# name: (description, Llama, longest length, lengths, repeats, protocols that are compared with the plain loop)
SETUPS = {
    "small": ("vocabulary 1024", SMALL, 512, 16, 10, ["reference"]),
    "large": ("vocabulary 32000", LARGE, 768, 6, 5, ["reference"]),
    "long": ("vocabulary 32000, one length", LARGE, 2048, 1, 1, ["reference"]),
    "adaptive": ("vocabulary 1024, the usual 32 points x 10", SMALL, 512, 32, 10, ["reference", "adaptive"]),
}
TABLE = """
| setup | protocol | CPU s | faster | extra MB | less | other counts | 95 % of fine, coarse |
| {description} | {protocol} | {cpu_s:.1f} | {faster:.2f}x | {extra_mb:.0f} | {less_memory:.1f}x | {other_counts} |\
 {intervals_95[fine]}, {intervals_95[coarse]} |
"""


@torch.no_grad()
def plain_counts(model, tokens, lengths, repeats):
    """Return (copy counts, LM counts) for each length by the definition of the reference protocol."""
    points = []
    for n, samples in order_samples(tokens, lengths, repeats, seed=0).items():
        scored, counts = scored_logits(n), {"copy": [], "LM": []}
        for kind in counts:
            for ids in torch.from_numpy(model_inputs(kind, samples, BOS, EOS)):
                predicted = model(ids[None]).logits.argmax(-1)[0, scored.start : scored.stop]
                counts[kind].append(int((predicted == ids[scored.start + 1 : -1]).sum()))
        points.append((counts["copy"], counts["LM"]))
    return points


def run_protocol(setup, protocol, args):
    """Return a row, measured in this process, and the counts."""
    _, config, longest, n, repeats, _ = SETUPS[setup]
    longest, repeats = max(16, int(longest * args.scale)), max(1, int(repeats * args.scale))
    lengths = linear_lengths(longest, n) if n > 1 else [longest]
    if args.model and config is SMALL:
        model, tokens = transformers.AutoModelForCausalLM.from_pretrained(args.model[0]), np.load(args.model[1])
    else:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
        tokens = np.random.default_rng(0).integers(3, config["vocab_size"], 4 * longest + 1000)
    model.eval()
    with torch.no_grad():
        model(torch.arange(3, 19)[None])  # first-time costs

    def measure_curve():
        if protocol == "plain":
            return plain_counts(model, tokens.astype(np.int64), lengths, repeats)
        options = {"bos_token_id": BOS, "eos_token_id": EOS, "run": Run(tokens_per_pass=args.tokens_per_pass)}
        return forgetting_curve(model, tokens, lengths=lengths, repeats=repeats, protocol=protocol, **options)

    cpu = time.process_time()
    extra_mb, (seconds, result) = common.added_mb(common.timed, measure_curve)
    row = {"setup": setup, "protocol": protocol, "cpu_s": time.process_time() - cpu, "wall_s": seconds}
    row["extra_mb"] = extra_mb
    if protocol == "plain":
        return row, result
    row["points"] = len(result.points)
    row["lengths"] = {method: str(getattr(result, f"{method}_length")) for method in ("fine", "coarse")}
    row["intervals_95"] = {method: str(result.interval(method)) for method in ("fine", "coarse")}
    return row, [(point.copy_correct, point.lm_correct) for point in result.points]


def measure(args):
    for setup in args.setups:
        for protocol in ["plain", *SETUPS[setup][-1]]:
            row, counts = common.in_fresh_process(run_protocol, setup, protocol, args)
            if protocol == "plain":
                plain, plain_row = counts, row
            if protocol == "reference":
                row["other_counts"] = int(np.abs(np.subtract(counts, plain)).sum())
            row["faster"] = plain_row["cpu_s"] / max(row["cpu_s"], 1e-9)
            row["less_memory"] = plain_row["extra_mb"] / max(row["extra_mb"], 1e-9)
            yield row


def table(result):
    return common.markdown([row | {"description": SETUPS[row["setup"]][0]} for row in result["rows"]], TABLE)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, scale=1.0)
    parser.add_argument(
        "--setups", nargs="+", choices=SETUPS, default=list(SETUPS), help="setups to measure (default: all)"
    )
    model = "folder of a small Llama, and a token file of a corpus, for the setups with a small vocabulary"
    parser.add_argument("--model", nargs=2, metavar=("FOLDER", "TOKENS.npy"), help=model)
    parser.add_argument(
        "--tokens-per-pass", type=int, metavar="N", help="tokens per forward pass (default: the package's)"
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
