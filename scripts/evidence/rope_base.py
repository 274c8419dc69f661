"""Does a RoPE base below the bound cost retrieval, but not perplexity? Small Llamas, from scratch in minutes.

    python -m scripts.evidence.rope_base [--bases 100 1000 10000 100000] [--steps 400] [--seeds 0 1 2] [--device cuda]

The design is that of Men et al. 2024 (arXiv 2405.14591, Figure 3): a model that retrieves is trained on longer rows
with another base. A Llama of two layers learns to copy random tokens on rows of 64 tokens with base 10000. Then it
goes on with each of the bases on rows of 256 tokens: short runs of a repeated pattern, and random passages, each of
which comes twice, at any distance. Runs can be predicted from tokens nearby, as most of a text; second passages,
after their first token, from the first ones only. What cannot be predicted is neither trained nor scored.
"""

import copy
import itertools
import random
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.metrics import rope_base_bound, rope_context_bound
from scripts.bench import common
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import make_parser, measure_parts, run


VOCABULARY, BOS, HEAD_DIM = 64, 1, 32
RUN_TOKENS = VOCABULARY // 4  # the others are for passages
PASSAGES, PASSAGE = 4, 8  # of a row; tokens of each
FIRST_BASE = 10_000.0
ROWS = 64  # that are read
TABLE = """
| base | reach by the bound | loss of runs | loss of second passages | {lags} |
| {base:g} | {reach} | {runs:.3f} | {copies:.3f} | {shares} |
"""


def lag_bins(length):
    """Distances from a token to the one that it repeats: within the reach of base 100, then doubling."""
    edges = [PASSAGE, rope_context_bound(base=100.0, head_dim=HEAD_DIM), 64]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return list(itertools.pairwise(edges))


def draw_rows(count, length, generator):
    """Ids (count, length), and the distance to the passage that a token repeats, 0 where it repeats none.

    No token is in two passages.
    """
    draw = lambda low, high, *shape: torch.randint(low, high, shape, generator=generator)  # noqa: E731
    ids, lags = torch.empty(count, length, dtype=torch.long), torch.zeros(count, length, dtype=torch.long)
    for row, lag in zip(ids, lags):
        start = 0
        while start < length:
            pattern, end = draw(0, RUN_TOKENS, draw(1, 5, 1).item()), start + draw(8, 25, 1).item()
            row[start:end] = pattern.repeat(24)[: min(end, length) - start]
            start = end
        free = length - 2 * PASSAGES * (PASSAGE - 1)  # places do not overlap
        places = torch.randperm(free, generator=generator)[: 2 * PASSAGES].sort().values
        places += torch.arange(2 * PASSAGES) * (PASSAGE - 1)
        tokens = RUN_TOKENS + torch.randperm(VOCABULARY - RUN_TOKENS, generator=generator)[: PASSAGES * PASSAGE]
        pairs = torch.randperm(2 * PASSAGES, generator=generator).view(-1, 2)
        for pair, passage in zip(pairs, tokens.view(PASSAGES, PASSAGE)):
            first, second = places[pair.sort().values].tolist()
            row[first : first + PASSAGE] = row[second : second + PASSAGE] = passage
            lag[second + 1 : second + PASSAGE] = second - first
    return ids, lags


def copy_rows(context, rows, seed):
    """Return input ids and labels, (rows, context): [bos] S [bos] S of random S; each second S is scored."""
    rng, batch = random.Random(seed), []
    for _ in range(rows):
        ids, labels = [], []
        while len(ids) < context:
            length = rng.randint(4, max(5, min(context // 2, context - len(ids))))
            passage = [BOS, *(rng.randrange(3, VOCABULARY) for _ in range(length))]
            ids += passage * 2
            labels += [-100] * len(passage) + passage
        batch.append((ids[:context], labels[:context]))
    return (torch.tensor(part) for part in zip(*batch))


def new_model(args):
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2 * HEAD_DIM,
        intermediate_size=4 * HEAD_DIM,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=args.length,
        rope_parameters={"rope_type": "default", "rope_theta": FIRST_BASE},
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(args.device)


def with_base(model, base):
    """The same weights with another RoPE base."""
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = base
    other = LlamaForCausalLM(config).to(model.device)
    other.load_state_dict(model.state_dict())
    return other


def mixed_rows(args, generator):
    """Ids (args.rows, args.length), and labels, -100 where a passage comes first."""
    ids, lags = draw_rows(args.rows, args.length, generator)
    return ids, ids.masked_fill((lags == 0) & (ids >= RUN_TOKENS), -100)


def train(model, rows, steps, args):
    """AdamW, 50 steps of warmup, the last 30 % of the steps linear to 0; gradients are clipped at 1.

    Args:
        rows: from the number of a step to its ids and labels.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, 1, (steps - step) / (0.3 * steps))
    )
    model.train()
    for step in range(steps):
        ids, labels = (x.to(args.device) for x in rows(step))
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def read(model, args):
    """Loss of runs and of second passages, in nats, and the share of retrieved tokens for each bin of distances.

    Retrieved is a token that is the arg-max over the whole vocabulary.
    """
    ids, lags = draw_rows(ROWS, args.length, torch.Generator().manual_seed(1))
    logits = torch.cat([model(input_ids=part.to(args.device)).logits[:, :-1].cpu() for part in ids.split(16)])
    targets, lags = ids[:, 1:], lags[:, 1:]
    losses = F.cross_entropy(logits.mT, targets, reduction="none")
    correct = (logits.argmax(-1) == targets).float()
    shares = [correct[(low <= lags) & (lags < high)].mean().item() for low, high in lag_bins(args.length)]
    runs = targets < RUN_TOKENS
    return {"runs": losses[runs].mean().item(), "copies": losses[lags > 0].mean().item(), "retrieved": shares}


def one_model(seed, base, args):
    torch.manual_seed(seed)
    begin = time.process_time()
    first = train(
        new_model(args), lambda step: copy_rows(args.first_length, 32, f"{seed} {step}"), args.first_steps, args
    )
    model = with_base(first, base).eval()
    entry = {"seed": seed, "base": base, "parameters": model.num_parameters(), "before": read(model, args)}
    generator = torch.Generator().manual_seed(seed)  # all bases see the same rows
    train(model, lambda _: mixed_rows(args, generator), args.steps, args)
    return entry | {"after": read(model, args), "cpu_seconds": round(time.process_time() - begin, 1)}


def measure(args):
    yield from measure_parts(one_model, list(itertools.product(args.seeds, args.bases)), args)


def table(result):
    s = result["settings"]
    lines = []
    for base in sorted({row["base"] for row in result["rows"]}):
        entries = [row["after"] for row in result["rows"] if row["base"] == base]
        shares = zip(*(entry["retrieved"] for entry in entries))
        cells = {f"lag{i}": statistics.mean(values) for i, values in enumerate(shares)}
        losses = {name: statistics.mean(entry[name] for entry in entries) for name in ("runs", "copies")}
        reach = rope_context_bound(base=base, head_dim=HEAD_DIM)
        lines.append({"base": base, "reach": reach, **losses, **cells})
    bins = lag_bins(s["length"])
    form = TABLE.replace("{lags}", " | ".join(f"retrieved at {low} to {high - 1}" for low, high in bins))
    form = form.replace("{shares}", " | ".join(f"{{lag{i}:.2f}}" for i in range(len(bins))))
    bound = rope_base_bound(s["length"] - 1, HEAD_DIM).base
    text = (
        f"Two layers, {result['rows'][0]['parameters']} parameters, trained on rows of {s['first_length']} tokens with base "
        f"{FIRST_BASE:g}, then on rows of {s['length']}, for which the bound is {bound:.0f}. Means over {len(s['seeds'])} "
        "seeds; retrieved at distances in tokens."
    )
    return f"{text}\n\n{common.markdown(lines, form)}"


def draw(result, path):
    """Draw retrieval by distance and the loss of nearby tokens after the second training."""
    bins = lag_bins(result["settings"]["length"])
    panels = {"second passages, by distance": []}
    for base in sorted({row["base"] for row in result["rows"]}):
        entries = [row["after"] for row in result["rows"] if row["base"] == base]
        retrieved = [[entry["retrieved"][i] for entry in entries] for i in range(len(bins))]
        panels["second passages, by distance"].append(Line(f"base {base:g}", range(len(bins)), retrieved))
    draw_panels(
        path,
        "A RoPE base below the bound costs retrieval",
        panels,
        across="distance to the passage, tokens",
        up="retrieved",
        percent=True,
        ticks={i: f"{low} to {high - 1}" for i, (low, high) in enumerate(bins)},
    )


def main(arguments=None):
    lengths = {"first_length": 64, "length": 256, "first_steps": 400, "steps": 400, "rows": 8}
    options = {
        "bases": [100.0, 10_000.0, 100_000.0],
        "seeds": [0, 1, 2],
        "learning_rate": 3e-3,
        "device": "cpu",
    }
    run(make_parser(__spec__.name, __doc__, "rope_base", **lengths, **options), measure, table, draw, arguments)


if __name__ == "__main__":
    main()
