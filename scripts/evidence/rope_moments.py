"""Does the RoPE bound say more with a model's own queries and keys (eq. 19 of Men et al. 2024) than eq. 18?

    python -m scripts.fetch_model smollm2-135m
    python -m scripts.evidence.rope_moments [--bases 100 1000 10000] [--tokens 2048]

Eq. 18 takes all dimensions of a query as alike. Eq. 19 weights cos(m theta_i) with the variances of the two dimensions
that theta_i rotates. They are measured here before RoPE, head by head: of the queries, and as the geometric mean of
those of queries and keys. Both reaches stand beside the distances at which the small Llamas of rope_base retrieve, and
for SmolLM2 beside the context that it claims.
"""

import functools

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.metrics import rope_context_bound, rope_report
from scripts.bench import common
from scripts.evidence import rope_base
from scripts.evidence.parts import make_parser, measure_parts, require
from scripts.evidence_curves import copy_rows
from scripts.fetch_model import SMOLLM2


FAR = 1 << 16  # tokens; a reach beyond is written as this
TABLE = """
| model | needs | eq. 18 reaches | eq. 19, queries: lowest, median, highest head | all heads | queries and keys: lowest, median, highest head | all heads | retrieved near, far |
| {model} | {needed} | {plain} | {queries[0]}, {queries[1]}, {queries[2]} | {queries[3]} | {both[0]}, {both[1]}, {both[2]} | {both[3]} | {retrieved} |
"""


def weighted_reaches(inv_freq, weights):
    """Return L_theta of eq. 17 with eq. 19 in the place of B_m, or FAR, for each row of weights, (k, n)."""
    cosines = np.cos(np.multiply.outer(np.arange(FAR + 1), np.asarray(inv_freq, dtype=np.float64)))
    negative = cosines @ (weights / weights.sum(1, keepdims=True)).T < -1e-12
    return [int(column.argmax()) - 1 if column.any() else FAR for column in negative.T]


@torch.no_grad()
def variances(model, ids):
    """Return the weights of a Llama by head and frequency, (heads, d / 2): of queries, and of queries and keys."""
    kept, size = {"q_proj": [], "k_proj": []}, model.config.head_dim
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def keep(name):
        def hook(module, args, output):
            variance = output.double().flatten(0, 1).unflatten(-1, (-1, size)).var(0, correction=0)
            kept[name].append(variance.unflatten(-1, (2, -1)))  # Llama rotates i with i + d / 2

        return hook

    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(keep(name))
        for layer in model.model.layers
        for name in kept
    ]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    queries = torch.cat(kept["q_proj"])
    keys = torch.cat([k.repeat_interleave(groups, 0) for k in kept["k_proj"]])
    return queries.sum(1).numpy(), (queries * keys).sqrt().sum(1).numpy()


def reaches(inv_freq, weights):
    """Return the lowest, median and highest reach over heads, and that of the mean of all heads, each head alike."""
    mean = (weights / weights.sum(1, keepdims=True)).mean(0)
    *each, together = weighted_reaches(inv_freq, np.vstack([weights, mean]))
    return [min(each), sorted(each)[(len(each) - 1) // 2], max(each), together]


def judged(model, ids, needed):
    inv_freq = model.model.rotary_emb.inv_freq.double().numpy()
    queries, both = (reaches(inv_freq, weights) for weights in variances(model, ids))
    return {"needed": needed, "plain": rope_context_bound(inv_freq=inv_freq), "queries": queries, "both": both}


@functools.cache
def first_model(length, steps, learning_rate, device):
    args = type("Options", (), dict(length=length, learning_rate=learning_rate, device=device))
    return rope_base.train(rope_base.new_model(args), lambda step: copy_rows(64, 32, f"0 {step}"), steps, args)


def one_model(base, args):
    torch.manual_seed(0)
    if base is None:
        model = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
        tokens = load_tokens(AutoTokenizer.from_pretrained(SMOLLM2), "stdlib").tokens[: args.tokens]
        claimed = rope_report(model.config, minimum_base=False).claimed_context
        return {"model": "SmolLM2-135M", **judged(model, torch.as_tensor(tokens)[None].long(), claimed - 1)}
    model = rope_base.with_base(first_model(args.length, args.first_steps, args.learning_rate, args.device), base)
    generator = torch.Generator().manual_seed(0)
    rope_base.train(model, lambda _: rope_base.mixed_rows(args, generator), args.steps, args)
    ids, _ = rope_base.draw_rows(rope_base.ROWS, args.length, torch.Generator().manual_seed(1))
    retrieved = rope_base.read(model, args)["retrieved"]
    return {"model": f"small, base {base:g}", **judged(model, ids, args.length - 1), "retrieved": retrieved}


def measure(args):
    require(SMOLLM2)
    yield from measure_parts(one_model, [(base,) for base in (*args.bases, None)], args)


def table(result):
    rows = []
    for row in result["rows"]:
        shares = row.get("retrieved")
        rows.append(row | {"retrieved": f"{shares[0]:.2f}, {shares[-1]:.2f}" if shares else "-"})
    return common.markdown(rows, TABLE)


def main(arguments=None):
    options = {"bases": [100.0, 1000.0, 10_000.0], "tokens": 2048, "length": 256, "first_steps": 400, "steps": 400}
    parser = make_parser(__spec__.name, __doc__, "rope_moments", **options, rows=8, learning_rate=3e-3, device="cpu")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
