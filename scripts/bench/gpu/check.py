"""Prove and time every attention implementation of a FoX on one machine.

    python -m scripts.bench.gpu.check

Each implementation that is installed is compared with the definition in float64, with gradients, as a cache is filled,
and in decoding. Then all are timed on full batches of --tokens, and in decoding, where the cached length grows with
each token as in generation. Beside them run attention without a gate and other kernels (peers.py), and last whole
training steps. `attn_implementation="auto"` follows a rule that was read off these rows. Rows come in order of
importance, none begins after --minutes, and the exit status is 1 where an implementation computes FoX wrongly.
`--device cpu` is a dry run in Triton's interpreter: it shows that the script works, and nothing about speed.
"""

import math
import os
import statistics
import sys
import time

import torch
import torch.nn.functional as F


if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, as by transformers

from transformers import DynamicCache
from transformers.modeling_flash_attention_utils import lazy_import_flash_attention
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available, is_flash_attn_4_available

from hf_longctx.fox import FoxConfig
from hf_longctx.fox.backend_fox import NAME, attend, with_implementation
from hf_longctx.fox.inputs_fox import read_call
from hf_longctx.fox.modeling_fox import FoxAttention
from hf_longctx.fox.state_fox import CachedLayer
from scripts.bench import common
from scripts.bench.gpu import budget, peers, step


FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
CANDIDATES = [NAME, "sdpa", *FLASH]
WORK = ("training", "prefill", "decoding")
PROVED = ((2, 2, 129), (1, 1, 301))  # batch, key heads and tokens that are compared with the definition
# All that differs on a CPU. lengths: of rows in a batch, and of caches in decoding; steps: decoded tokens.
SIZES = {
    "cuda": dict(tokens=32768, width=2048, head_dims=(64, 128), lengths=(16384, 2048), cached=(1024, 16384, 65536),
                 steps=32, rounds=20),
    "cpu": dict(tokens=32, width=32, head_dims=(16,), lengths=(16,), cached=(8,), steps=2, rounds=1),
}  # fmt: skip
TABLES = {
    "proof": """
| work | D | implementation | verdict |
| {work} | {D} | {name} | {verdict} |
""",
    "batch": """
| work | D | rows | tokens of a row | implementation | ms | TFLOP/s | error |
| {work} | {D} | {rows} | {length} | {name} | {ms:.3g} | {tflops:.3g} | {error} |
""",
    "decoding": """
| D | cached tokens | implementation | ms a token | error |
| {D} | {length} | {name} | {ms:.3g} | {error} |
""",
    "step": """
| model | rows | tokens of a row | ms | tokens/s | peak GB | error |
| {name} | {rows} | {length} | {ms:.3g} | {tokens_per_s:.0f} | {peak_gb:.1f} | {error} |
""",
}
TITLES = {
    "proof": "Right or wrong, beside the definition in float64",
    "batch": "Full batches",
    "decoding": "Decoding over growing lengths, one row",
    "step": "A training step of 125 million parameters",
}


# One layer.


def make_config(D: int, width: int, work: str) -> FoxConfig:
    """Return the configuration of a layer: QK-norm, no token shift, and grouped heads in decoding."""
    heads = width // D
    key_heads = max(1, heads // 4) if work == "decoding" else heads
    sizes = dict(hidden_size=width, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=D)
    return FoxConfig(**sizes, qk_norm=True, num_hidden_layers=1)


def draw(config: FoxConfig, work: str, rows: int, length: int, device: str, heads: int | None = None):
    """Return random q, k, v, log f and do of a layer, q and k with the norms that QK-norm gives."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = heads or config.num_key_value_heads
    queries = 1 if work == "decoding" else length
    group = config.sizes.num_key_value_groups
    q, k, v, log_f, do = budget.draw(
        rows, heads * group, heads, queries, length, config.head_dim, dtype, device=device
    )
    q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
    return [q, k, v, log_f, do]


def slow_gates(log_f: torch.Tensor) -> torch.Tensor:
    """Return gates as of a trained model: half-lives of 2 tokens to the whole length, evenly on a log scale."""
    _, gates, length = log_f.shape
    half_lives = 2 * (length / 2) ** torch.linspace(0, 1, gates, device=log_f.device)
    return (-math.log(2) / half_lives)[:, None].expand_as(log_f).contiguous()


class Layer:
    """The attention of a layer by one implementation: a function of q, k, v and log f, as a model calls it.

    Prefill fills a cache of its own in each call. Decoding fills it once, with all tokens but the last.
    """

    def __init__(self, name: str, config: FoxConfig, work: str, inputs):
        q, k, *_ = inputs
        sizes = dict(num_attention_heads=q.shape[1], num_key_value_heads=k.shape[1], head_dim=config.head_dim)
        config = with_implementation(FoxConfig(**config.to_dict() | sizes | {"hidden_size": 8}), name)
        self.config, self.work = config, work
        self.module = FoxAttention(config, 0).to(q.device, q.dtype).eval()
        self.cache = None
        if work == "decoding":
            self.cache = DynamicCache(config=config)
            q = q.expand(-1, -1, k.shape[2] - 1, -1)  # queries of cached tokens do not matter
            self.attend(q, *(x[:, :, :-1] for x in inputs[1:4]), self.cache)

    def attend(self, q, k, v, log_f, cache):
        call = read_call(self.config, q.new_zeros(q.shape[0], q.shape[2], 1), None, None, cache)
        past = None if cache is None else CachedLayer(cache, 0, q.device)
        o, _ = attend(self.module, q, k, v, log_f, call, past)
        return o[..., : self.config.head_dim].transpose(1, 2)

    def __call__(self, q, k, v, log_f):
        if self.work == "decoding":  # the last token, or the next one
            return self.attend(q, *(x[:, :, -1:] for x in (k, v, log_f)), self.cache)
        return self.attend(q, k, v, log_f, DynamicCache(config=self.config) if self.work == "prefill" else None)


def installed() -> list[str]:
    """Return the candidates that are installed, ready to be used."""
    names = [name for name in CANDIDATES if name not in FLASH or FLASH[name]()]
    for name in names:
        if name in FLASH:
            lazy_import_flash_attention(name)
    return names


# Rows.


def prove(name: str, D: int, work: str, device: str) -> dict:
    """Return whether an implementation is right: for each result, the worst share of what rounding may do to it."""
    config = make_config(D, 4 * D, work)
    shares = {}
    for batch, heads, length in PROVED:
        inputs = draw(config, work, batch, length, device, heads)
        with torch.enable_grad():
            plain, exact = budget.run_plain(*inputs), budget.run_exact(*inputs)
        layer = Layer(name, config, work, inputs)
        fast = budget.run(layer, *inputs) if work == "training" else (layer(*inputs[:4]),)
        limits = {"resolution": 2 * math.exp(config.log_pruning_tolerance)}
        if name != NAME:  # logits hold c_j in place of c_i - c_j; gradients of keys are rounded, then summed up
            limits["resolution"] = budget.EPS * inputs[3].sum(-1).abs().max().item()
            limits["dlog_f"] = budget.FOLDED_DLOG_F[inputs[0].dtype]
        for result, (error, _, allowed) in budget.find_errors(fast, plain, exact, inputs, **limits).items():
            shares[result] = max(shares.get(result, 0.0), error / allowed if error == error else math.inf)
    worst = max(shares, key=lambda result: shares[result])
    is_right = shares[worst] <= 1
    verdict = (
        f"right ({shares[worst]:.0%} of the budget)"
        if is_right
        else f"WRONG: {worst} is off by {shares[worst]:.3g} times its budget"
    )
    return {"right": is_right, "shares": shares, "verdict": verdict}


def time_batch(name: str, D: int, work: str, rows: int, length: int, device: str) -> dict:
    """Return the time of a forward pass over a full batch, in training also backward."""
    config = make_config(D, SIZES[device]["width"], work)
    inputs = draw(config, work, rows, length, device)
    inputs[3] = slow_gates(inputs[3])
    function = peers.competitor(name) if name in peers.COMPETITORS else Layer(name, config, work, inputs)
    *inputs, do = inputs
    if work == "training":
        inputs = [x.requires_grad_() for x in inputs]

    def call():
        o = function(*inputs)
        if work == "training":
            torch.autograd.grad(o, inputs, do, allow_unused=True)

    with torch.set_grad_enabled(work == "training"):
        seconds = common.time_in_turn({"": call}, SIZES[device]["rounds"], device=device)[""]
    products = 2 * rows * config.num_attention_heads * length**2 * D * (3.5 if work == "training" else 1)
    median = statistics.median(seconds)
    return {"ms": 1e3 * median, "tflops": products / median / 1e12}


def time_decoding(name: str, D: int, length: int, device: str) -> dict:
    """Return the time of one token while a cache grows by a token a step, after as many steps that are not timed."""
    config, steps = make_config(D, SIZES[device]["width"], "decoding"), SIZES[device]["steps"]
    inputs = draw(config, "decoding", 1, length, device)
    inputs[3] = slow_gates(inputs[3])
    with torch.no_grad():
        layer = Layer(name, config, "decoding", inputs)
        for _ in range(2):
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                layer(*inputs[:4])
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
    return {"ms": 1e3 * seconds / steps}


def time_step(name: str, device: str) -> dict:
    """Return the time of a training step of the paper's 125M model."""
    kind, attention = name.split(", ")
    rows, tokens = step.BATCHES[size := "125M" if device == "cuda" else "tiny"]
    preset = {"Llama": "llama", "FoX (Pro)": "fox-pro"}[kind]
    return step.time_steps(preset, size, "eager", rows, tokens, device, SIZES[device]["rounds"], attention)


def plan(device: str, tokens: int):
    """Yield (section, fields, function of the fields) for every row, the most important rows first."""
    sizes, names = SIZES[device], installed()
    others = [name for name in peers.COMPETITORS if "no gate" in name or name in ("FLA", "official")]
    for D in sizes["head_dims"]:
        for work in WORK:
            yield from (("proof", {"work": work, "D": D, "name": name}, prove) for name in names)
    for name in ("Llama, sdpa", "FoX (Pro), sdpa", f"FoX (Pro), {NAME}", "FoX (Pro), auto"):
        yield "step", {"name": name}, time_step
    for D in sizes["head_dims"]:
        for length in sizes["lengths"]:
            for work in ("training", "prefill"):
                shape = {"work": work, "D": D, "rows": max(1, tokens // length), "length": length}
                yield from (("batch", {**shape, "name": name}, time_batch) for name in (*names, *others))
        for length in sizes["cached"]:
            yield from (("decoding", {"D": D, "length": length, "name": name}, time_decoding) for name in names)


def measure(args):
    until = time.monotonic() + 60 * args.minutes
    torch.manual_seed(0)
    tokens = args.tokens if args.device == "cuda" else SIZES["cpu"]["tokens"]
    for section, fields, measure_row in plan(args.device, tokens):
        row = {"section": section, **fields}
        if section == "step":
            row |= dict(zip(("rows", "length"), step.BATCHES["125M" if args.device == "cuda" else "tiny"]))
        if time.monotonic() > until:
            yield row | {"error": "no time left"}
            continue
        try:
            row |= measure_row(**fields, device=args.device)
        except ImportError:
            continue
        except Exception as error:  # no kernel for this GPU, dtype or width, or no memory is left
            row["error"] = row["verdict"] = f"cannot run: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        yield row


def table(result):
    rows = result["rows"]
    text = ["A dry run in Triton's interpreter, whose times mean nothing."] * (result["settings"]["device"] == "cpu")
    for section, template in TABLES.items():
        if found := [row for row in rows if row["section"] == section]:
            text.append(f"**{TITLES[section]}**\n\n{common.markdown(found, template)}")
    return "\n\n".join(text)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cuda", tokens=32768, minutes=3.0)
    result = common.run(parser, measure, table, arguments)
    wrong = [
        f"{row['name']} ({row['work']}, heads of {row['D']})" for row in result["rows"] if row.get("right") is False
    ]
    if wrong:
        print(f"These compute FoX wrongly: {', '.join(wrong)}.", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
