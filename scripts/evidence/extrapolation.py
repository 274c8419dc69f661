"""FoX beside a RoPE Transformer, trained on short rows and read on long ones, from scratch in minutes.

    python -m scripts.evidence.extrapolation [--train-length 128] [--read-length 512] [--seeds 0 1 2] [--device cuda]

Both models have the block of FoX (Pro) and differ in one thing: forget gates, or RoPE with base 10000. Rows repeat a
random passage, so that every token after the first passage can be copied. Trained are passages of 6 tokens to half a
row. Read, on longer rows, are such passages, and longer ones, whose distance to the copy was never trained.

The loss by position is that of the tokens that can be copied, in nats; guessing costs log(vocabulary).
Sizes and steps are options: `--train-length 512 --read-length 2048 --rows 8` takes about three times as long.
"""

import math
import statistics
import time
from itertools import product

import torch
import torch.nn.functional as F

from hf_longctx.fox import FoxConfig, FoxForCausalLM
from scripts.bench import common
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import make_parser, measure_parts, run


MODELS = ("FoX", "RoPE")
SHORTEST = 6  # passage
BINS = 16  # of positions, over the row that is read
ROWS = 64  # that are read
TABLE = """
| model | passages | loss within the training length | at its end | at {read_length} tokens |
| {model} | {passages} | {within:.2f} | {end:.2f} | {far:.2f} |
"""


def build(model, args):
    sizes = dict(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        intermediate_size=2 * args.width,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    if model == "FoX":
        decay_times = dict(decay_time_min=args.train_length / 4, decay_time_max=4 * args.train_length)
        return FoxForCausalLM(FoxConfig.pro(**decay_times, **sizes))
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return FoxForCausalLM(FoxConfig.pro(forget_gate="none", rope_parameters=rope, **sizes))


def draw_rows(count, length, shortest, longest, args, generator):
    """Ids (count, length) of rows that repeat a passage, and labels, -100 in the first passage."""
    passage = torch.randint(shortest, longest + 1, (count, 1), generator=generator)
    ids = torch.randint(args.vocabulary, (count, length), generator=generator)
    position = torch.arange(length)[None]
    ids = ids.gather(1, position % passage)
    return ids.to(args.device), ids.masked_fill(position < passage, -100).to(args.device)


def train(model, args, seed):
    """AdamW, 50 steps of warmup, then linear to a twentieth; gradients are clipped at 1."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 50, max(0.05, 1 - step / args.steps))
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(args.steps):
        ids, labels = draw_rows(args.rows, args.train_length, SHORTEST, args.train_length // 2, args, generator)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def loss_by_position(model, shortest, longest, args):
    """Mean loss of the copied tokens in each of BINS parts of the rows, None where none is copied."""
    generator = torch.Generator().manual_seed(1)
    total, count = torch.zeros(args.read_length), torch.zeros(args.read_length)
    for _ in range(ROWS // 16):
        ids, labels = draw_rows(16, args.read_length, shortest, longest, args, generator)
        logits = model(input_ids=ids).logits[:, :-1]
        loss = F.cross_entropy(logits.mT, labels[:, 1:], ignore_index=-100, reduction="none")
        total[1:] += loss.sum(0).cpu()
        count[1:] += (labels[:, 1:] != -100).sum(0).cpu()
    total, count = total.view(BINS, -1).sum(1).tolist(), count.view(BINS, -1).sum(1).tolist()
    return [a / b if b else None for a, b in zip(total, count)]


def one_model(model, seed, args):
    torch.manual_seed(seed)
    begin = time.process_time()
    trained = train(build(model, args).to(args.device), args, seed)
    seconds = time.process_time() - begin
    half = args.train_length // 2
    return {
        "model": model,
        "seed": seed,
        "parameters": trained.num_parameters(),
        "training_cpu_seconds": round(seconds, 1),
        "known": loss_by_position(trained, SHORTEST, half, args),
        "unseen": loss_by_position(trained, half + 1, args.read_length // 2, args),
    }


def measure(args):
    yield from measure_parts(one_model, [(model, seed) for seed in args.seeds for model in MODELS], args)


def table(result):
    s = result["settings"]
    last = s["train_length"] * BINS // s["read_length"] - 1  # the bin at the end of the training length
    lines = []
    for model, (name, passages) in product(MODELS, (("known", "known"), ("unseen", "longer than trained"))):
        curves = [row[name] for row in result["rows"] if row["model"] == model]
        bins = {"within": range(last + 1), "end": [last], "far": [BINS - 1]}
        figures = {
            key: statistics.mean(curve[i] for i in places for curve in curves)
            for key, places in bins.items()
            if curves and all(curve[i] is not None for curve in curves for i in places)
        }
        lines.append({"model": model, "passages": passages, **figures})
    half, longest = s["train_length"] // 2, s["read_length"] // 2
    text = (
        f"{s['layers']} layers of width {s['width']}, trained on rows of {s['train_length']} tokens, passages of {SHORTEST} to "
        f"{half}; longer ones have {half + 1} to {longest}. "
        f"Mean over {len(s['seeds'])} seeds; guessing costs {math.log(s['vocabulary']):.2f}."
    )
    return f"{text}\n\n{common.markdown(lines, TABLE.replace('{read_length}', str(s['read_length'])))}"


def draw(result, path):
    """Draw the loss by position, of passages as trained and of longer ones."""
    s = result["settings"]
    places = [(i + 0.5) * s["read_length"] / BINS for i in range(BINS)]
    panels = {}
    for name, heading in {"known": "passages as trained", "unseen": "longer passages than trained"}.items():
        panels[heading] = []
        for model in MODELS:
            curves = [row[name] for row in result["rows"] if row["model"] == model]
            points = [(x, values) for x, values in zip(places, zip(*curves)) if None not in values]
            panels[heading].append(Line(model, *zip(*points)))
        guessing = [[math.log(s["vocabulary"])]] * 2
        panels[heading].append(Line("guessing", (places[0], places[-1]), guessing, control=True))
    draw_panels(
        path,
        f"Trained on {s['train_length']} tokens and read at {s['read_length']}",
        panels,
        across="position",
        up="loss of copied tokens, nats",
        marks={"training length": s["train_length"]},
    )


def main(arguments=None):
    lengths = {"train_length": 128, "read_length": 512, "seeds": [0, 1, 2], "steps": 1200, "rows": 16}
    sizes = {"vocabulary": 64, "width": 64, "layers": 2, "learning_rate": 4e-3, "device": "cpu"}
    run(
        make_parser(__spec__.name, __doc__, "extrapolation_{train_length}", **lengths, **sizes),
        measure,
        table,
        draw,
        arguments,
    )


if __name__ == "__main__":
    main()
