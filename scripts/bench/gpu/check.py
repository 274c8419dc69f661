"""Check and time every attention implementation of a FoX on this machine.

    python -m scripts.bench.gpu.check

Each installed implementation is compared with the definition in float64: output and gradients, prefill into a cache,
and decoding. Then all of them are timed on full batches of --tokens and in decoding, where the cache grows by one
token per step, alongside attention without a gate and other libraries' kernels (peers.py). The rule of
`attn_implementation="auto"` is based on these rows. FLOPs are 4 B H T^2 D / 2 forward and 2.5 times that backward, the
usual count for causal attention. They include pruned keys, so compare pruned rows with "all keys".

Rows run in order of importance, and none starts after --minutes. The exit status is 1 if an implementation is wrong.
`--device cpu` is a dry run in Triton's interpreter: it shows only that the script works.
"""

import itertools
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
from scripts.bench.gpu.pruned_blocks import count_pruned_blocks


FLASH = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
CANDIDATES = [NAME, "sdpa", *FLASH]
ALL_KEYS = f"{NAME}, all keys"  # pruning is off
WORK = ("training", "prefill", "decoding")
PROVED = ((2, 2, 129), (1, 1, 301))  # batch, key heads and tokens that are compared with the definition
# All that differs on a CPU. step: size of the model in a training step; lengths: of sequences in a batch; cached:
# tokens in the cache; steps: decoded tokens; shares: of the blocks that a constant gate makes prunable.
SIZES = {
    "cuda": dict(step="125M", tokens=32768, width=2048, head_dims=(64, 128), lengths=(16384, 2048),
                 cached=(1024, 16384, 65536), steps=32, rounds=20, shares=(0.7, 0.0, 0.5, 0.9)),
    "cpu": dict(step="tiny", tokens=32, width=32, head_dims=(16,), lengths=(16,), cached=(8,), steps=2, rounds=1,
                shares=(0.7,)),
}  # fmt: skip
TABLES = {
    "proof": """
| work | head_dim | implementation | verdict |
| {work} | {D} | {name} | {verdict} |
""",
    "batch": """
| work | head_dim | sequences | tokens of each | implementation | ms forward | backward | TFLOP/s forward | backward | error |
| {work} | {D} | {rows} | {length} | {name} | {forward_ms:.3g} | {backward_ms:.3g} | {forward_tflops:.3g} |\
 {backward_tflops:.3g} | {error} |
""",
    "pruning": """
| head_dim | sequences | tokens of each | pruned | speed-up forward | backward | both | error |
| {D} | {rows} | {length} | {share_pruned:.0%} | {forward_speedup:.2f}x | {backward_speedup:.2f}x |\
 {both_speedup:.2f}x | {error} |
""",
    "decoding": """
| head_dim | cached tokens | implementation | ms per token | error |
| {D} | {length} | {name} | {ms:.3g} | {error} |
""",
    "step": """
| model | sequences | tokens of each | ms | tokens/s | peak GB | error |
| {name} | {rows} | {length} | {ms:.3g} | {tokens_per_s:.0f} | {peak_gb:.1f} | {error} |
""",
}
TITLES = {
    "proof": "Compared with the definition in float64",
    "batch": "Full batches",
    "pruning": "`forgetting_triton` with pruning, compared with the same kernels on all keys",
    "decoding": "Decoding with a growing cache, one sequence",
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
    group = config.num_key_value_groups
    q, k, v, log_f, do = budget.draw(
        rows, heads * group, heads, queries, length, config.head_dim, dtype, device=device
    )
    q, k = (F.rms_norm(x, x.shape[-1:]) for x in (q, k))
    q, k, v, do = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, do)
    )  # the memory layout of projections
    return [q, k, v, log_f, do]


def slow_gates(log_f: torch.Tensor) -> torch.Tensor:
    """Return gates like those of a trained model: half-lives from 2 tokens to the whole length, log-spaced."""
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
        config = FoxConfig(**config.to_dict() | sizes | {"hidden_size": 8})
        if name == ALL_KEYS:
            config.log_pruning_tolerance = None
        config = with_implementation(config, NAME if name == ALL_KEYS else name)
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
        if self.work == "decoding":  # append the last token
            return self.attend(q, *(x[:, :, -1:] for x in (k, v, log_f)), self.cache)
        return self.attend(q, k, v, log_f, DynamicCache(config=self.config) if self.work == "prefill" else None)


def installed() -> list[str]:
    """Return the installed candidates, ready to use."""
    names = [name for name in CANDIDATES if name not in FLASH or FLASH[name]()]
    for name in names:
        if name in FLASH:
            lazy_import_flash_attention(name)
    return names


# Rows.


def prove(name: str, D: int, work: str, device: str) -> dict:
    """Return whether an implementation is right, and for each result the largest share of its error budget."""
    config = make_config(D, 4 * D, work)
    shares = {}
    for batch, heads, length in PROVED:
        inputs = draw(config, work, batch, length, device, heads)
        with torch.enable_grad():
            plain, exact = budget.run_plain(*inputs), budget.run_exact(*inputs)
        layer = Layer(name, config, work, inputs)
        fast = budget.run(layer, *inputs) if work == "training" else (layer(*inputs[:4]),)
        limits = {"resolution": 2 * math.exp(config.log_pruning_tolerance)}
        if name != NAME:  # logits hold c_j instead of c_i - c_j; gradients of keys are rounded, then summed
            limits["resolution"] = budget.EPS * inputs[3].sum(-1).abs().max().item()
            limits["dlog_f"] = budget.FOLDED_DLOG_F[inputs[0].dtype]
        for result, (error, _, allowed) in budget.find_errors(fast, plain, exact, inputs, **limits).items():
            shares[result] = max(shares.get(result, 0.0), error / allowed if error == error else math.inf)
    worst = max(shares, key=lambda result: shares[result])
    is_right = shares[worst] <= 1
    verdict = (
        f"right ({shares[worst]:.0%} of the budget)"
        if is_right
        else f"WRONG: {worst} exceeds its budget {shares[worst]:.3g} times"
    )
    return {"right": is_right, "shares": shares, "verdict": verdict}


def make_passes(function, inputs, do=None) -> dict:
    """Return the forward pass and, for an output gradient `do`, the backward pass, as functions without arguments."""
    if do is None:
        return {"forward": lambda: function(*inputs)}
    inputs = [x.requires_grad_() for x in inputs]
    o = function(*inputs)
    return {
        "forward": lambda: function(*inputs),
        "backward": lambda: torch.autograd.grad(o, inputs, do, retain_graph=True, allow_unused=True),
    }


def time_batch(name: str, D: int, work: str, rows: int, length: int, device: str) -> dict:
    """Return the times of a forward pass over a full batch, and of a backward pass in training."""
    config = make_config(D, SIZES[device]["width"], work)
    inputs = draw(config, work, rows, length, device)
    inputs[3] = slow_gates(inputs[3])
    function = peers.PEERS[name]() if name in peers.PEERS else Layer(name, config, work, inputs)
    *inputs, do = inputs
    with torch.set_grad_enabled(work == "training"):
        passes = make_passes(function, inputs, do if work == "training" else None)
        seconds = common.time_in_turn(passes, SIZES[device]["rounds"], device=device)
    products = 2 * rows * config.num_attention_heads * length**2 * D
    times = {}
    for direction, values in seconds.items():
        median = statistics.median(values)
        times[f"{direction}_ms"] = 1e3 * median
        times[f"{direction}_tflops"] = (2.5 if direction == "backward" else 1) * products / median / 1e12
    return times


def time_pruning(share: float, D: int, rows: int, length: int, device: str) -> dict:
    """Return the speed-up of both passes by pruning, with a gate that makes `share` of the blocks prunable.

    A constant gate makes everything beyond w tokens prunable, which is (1 - w / T)^2 of the blocks.
    """
    config = make_config(D, SIZES[device]["width"], "training")
    *inputs, do = draw(config, "training", rows, length, device)
    threshold = 2 * D**0.5 + math.log(length) - config.log_pruning_tolerance
    inputs[3] = torch.full_like(inputs[3], -threshold / (length * (1 - share**0.5)) if share else 0.0)
    layers = {name: Layer(name, config, "training", inputs) for name in (ALL_KEYS, NAME)}
    turns = {
        (name, direction): run
        for name, layer in layers.items()
        for direction, run in make_passes(layer, inputs, do).items()
    }
    with count_pruned_blocks() as blocks:
        layers[NAME](*inputs)
    seconds = common.time_in_turn(turns, SIZES[device]["rounds"], device=device)
    for name in layers:
        seconds[name, "both"] = [sum(pair) for pair in zip(seconds[name, "forward"], seconds[name, "backward"])]
    return {"share_pruned": blocks.pruned / blocks.total} | {
        f"{direction}_speedup": common.median_ratio(seconds[ALL_KEYS, direction], seconds[NAME, direction])
        for direction in ("forward", "backward", "both")
    }


def time_decoding(name: str, D: int, length: int, device: str) -> dict:
    """Return the time per token while the cache grows by one token per step, after as many untimed steps."""
    config, steps = make_config(D, SIZES[device]["width"], "decoding"), SIZES[device]["steps"]
    inputs = draw(config, "decoding", 1, length, device)
    inputs[3] = slow_gates(inputs[3])
    with torch.no_grad():
        layer = Layer(name, config, "decoding", inputs)
        for _ in range(2):
            step.wait(device)
            begin = time.perf_counter()
            for _ in range(steps):
                layer(*inputs[:4])
            step.wait(device)
            seconds = time.perf_counter() - begin
    return {"ms": 1e3 * seconds / steps}


def time_step(name: str, rows: int, length: int, device: str) -> dict:
    """Return the time of a training step of the paper's 125M model."""
    kind, attention = name.split(", ")
    preset, sizes = {"Llama": "llama", "FoX (Pro)": "fox-pro"}[kind], SIZES[device]
    return step.time_steps(preset, sizes["step"], "eager", rows, length, device, sizes["rounds"], attention)


def plan(device: str, tokens: int):
    """Yield (section, fields, function of the fields) for every row, the most important rows first."""
    sizes, names = SIZES[device], installed()
    timed = [*names, ALL_KEYS, *peers.PEERS]
    for D in sizes["head_dims"]:
        for work in WORK:
            yield from (("proof", {"work": work, "D": D, "name": name}, prove) for name in names)
    rows, length = step.BATCHES[sizes["step"]]
    for name in ("Llama, sdpa", "FoX (Pro), sdpa", f"FoX (Pro), {NAME}", "FoX (Pro), auto"):
        yield "step", {"name": name, "rows": rows, "length": length}, time_step
    for D in sizes["head_dims"]:
        for length in sizes["lengths"]:
            shape = {"D": D, "rows": max(1, tokens // length), "length": length}
            for work in ("training", "prefill"):
                yield from (("batch", {"work": work, **shape, "name": name}, time_batch) for name in timed)
        for length in sizes["cached"]:
            yield from (("decoding", {"D": D, "length": length, "name": name}, time_decoding) for name in names)
    for D, share in itertools.product(sizes["head_dims"], sizes["shares"]):
        shape = {"D": D, "rows": max(1, tokens // sizes["lengths"][0]), "length": sizes["lengths"][0]}
        yield "pruning", {"share": share, **shape}, time_pruning


def measure(args):
    until = time.monotonic() + 60 * args.minutes
    torch.manual_seed(0)
    tokens = args.tokens if args.device == "cuda" else SIZES["cpu"]["tokens"]
    for section, fields, measure_row in plan(args.device, tokens):
        row = {"section": section, **fields}
        if time.monotonic() > until:
            yield row | {"error": "no time left"}
            continue
        try:
            row |= measure_row(**fields, device=args.device)
        except ImportError:
            continue
        except Exception as error:  # no kernel for this GPU, dtype or width, or out of memory
            row["error"] = row["verdict"] = f"cannot run: {common.one_line(error, 120)}"
        yield row


def table(result):
    rows = result["rows"]
    text = ["A dry run in Triton's interpreter: its times mean nothing."] * (result["settings"]["device"] == "cpu")
    for section, template in TABLES.items():
        if found := [row for row in rows if row["section"] == section]:
            text.append(f"**{TITLES[section]}**\n\n{common.markdown(found, template)}")
    return "\n\n".join(text)


def main(arguments=None):
    parser = common.make_parser(__spec__.name, __doc__, device="cuda", tokens=SIZES["cuda"]["tokens"], minutes=3.0)
    result = common.run(parser, measure, table, arguments)
    wrong = [
        f"{row['name']} ({row['work']}, head_dim={row['D']})" for row in result["rows"] if row.get("right") is False
    ]
    if wrong:
        print(f"These implementations are wrong: {', '.join(wrong)}.", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
