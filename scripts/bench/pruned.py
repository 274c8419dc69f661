"""Memory, speed and logits of decoding with a pruned cache, compared with the full cache.

    python -m scripts.bench.pruned [--contexts 16384 65536] [--tolerances 1e-2 1e-4 1e-6]

The model is a FoX (Pro) with random weights, whose heads have decay times of 2 to 2048 tokens (to a factor 1/e). The
cached context is synthetic: normalized random keys, random values, gates scattered around their biases. Tolerance 0
drops nothing: it shows the gain from not copying the cache for every token, and its logits are the reference (in the
full cache, the float32 sum of log f loses resolution as it falls). A static cache has tensors of constant shapes; on a
GPU, its step is compiled with CUDA graphs. Each cache is filled, alternates with a full cache token by token, and
writes its row before the next cache is filled, the static ones last; results are medians over --tokens.
--attention auto means our kernels for long calls on a GPU.
"""

import itertools
import math
import statistics

import torch
import torch.nn.functional as F
from transformers import DynamicCache

from hf_longctx.fox import FoxConfig, FoxForCausalLM, PrunedCache
from hf_longctx.fox.attention_fox import fold_keys
from scripts.bench import common


TABLE = """
| context | cache | dropped | cache MB | tokens/s | to full | largest change of logits |
| {context} | {cache} | {dropped:.1%} | {cache_mb:.0f} | {tokens_per_s:.1f} | {speed_to_full:.2f}x |\
 {largest_change_of_logits:.1e} |
"""


def make_model(args):
    torch.manual_seed(0)
    fastest, slowest = args.decay_times
    config = FoxConfig.pro(
        vocab_size=1024,
        hidden_size=args.heads * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        decay_time_min=fastest,
        decay_time_max=slowest,
    )
    with torch.device(args.device):
        model = FoxForCausalLM(config).to(getattr(torch, args.dtype)).eval()
    model.set_attn_implementation(args.attention)
    return model


def fill(caches, model, length):
    """Fill every cache with the same `length` synthetic tokens."""
    config, g = model.config, torch.Generator(model.device).manual_seed(1)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    for index, layer in enumerate(model.model.layers):
        k, v = (torch.randn(shape, generator=g, device=model.device, dtype=model.dtype) for _ in range(2))
        bias = layer.self_attn.f_proj.bias.float()[:, None]
        log_f = F.logsigmoid(bias + 0.5 * torch.randn(shape[:3], generator=g, device=model.device))
        k = fold_keys(F.rms_norm(k, k.shape[-1:]), log_f.cumsum(-1), layer.self_attn.scaling)
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        state = torch.randn(1, 2 * shape[1] * shape[3], 1, generator=g, device=model.device, dtype=model.dtype)
        for cache in caches:
            cache.update(k, v, index)
            cache.update_conv_state(state, index, conv_kernel_size=1)


def megabytes(cache):
    parts = [part for layer in cache.layers for part in getattr(layer, "groups", [layer])]
    return sum(part.keys.nbytes + part.values.nbytes for part in parts) / 2**20


@torch.no_grad()
def measure(args):
    model = make_model(args)
    for length in args.contexts:
        slots = 1024 * math.ceil((length + 1 + args.tokens) / 1024)
        tokens = torch.randint(model.config.vocab_size, (1 + args.tokens, 1, 1))
        torch.compiler.reset()
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True, dynamic=False)
        exact = None  # logits with tolerance 0
        for size, tolerance in [(None, 0.0), *itertools.product((None, slots), args.tolerances)]:
            name = f"tolerance {tolerance:g}{', static' if size else ''}"
            cache = PrunedCache(model, tolerance, max_cache_len=size)
            caches = {"full cache": DynamicCache(config=model.config), name: cache}
            fill(caches.values(), model, length)
            cache.prune()
            sizes = {x: megabytes(caches[x]) for x in caches}
            logits = {x: [] for x in caches}

            def decode(name, caches=caches, logits=logits, tokens=tokens, compiled=compiled):
                """Return the seconds to decode one token; all caches get the same tokens."""
                step = compiled if args.device == "cuda" and caches[name].is_compileable else model
                token = tokens[len(logits[name])].to(model.device)
                read = lambda: step(token, cache=caches[name]).logits[0, -1].float().cpu()  # noqa: E731
                seconds, last = common.timed(read, device=args.device)
                logits[name].append(last)
                return seconds

            turns = {x: lambda x=x, decode=decode: decode(x) for x in caches}
            seconds = common.alternate(turns, args.tokens)
            names, exact = ([name], exact) if exact else (list(caches), logits[name])
            for x in names:
                dropped = cache.dropped.float().mean().item() / int(cache.get_seq_length()) if x == name else 0.0
                yield {
                    "context": length,
                    "cache": x,
                    "dropped": dropped,
                    "cache_mb": sizes[x],
                    "tokens_per_s": 1 / statistics.median(seconds[x]),
                    "speed_to_full": common.median_ratio(seconds["full cache"], seconds[x]),
                    "largest_change_of_logits": max((a - b).abs().max().item() for a, b in zip(logits[x], exact)),
                }


def table(result):
    s = result["settings"]
    fastest, slowest = s["decay_times"]
    rows = [
        row
        for row in result["rows"]
        if row["cache"] in ("full cache", "tolerance 0", "tolerance 0.0001", "tolerance 0.0001, static")
    ]
    sizes = f"FoX (Pro), {s['layers']} layers of {s['heads']} heads, decay times {fastest:g} to {slowest:g} tokens"
    return f"{sizes}, {s['dtype']}.\n\n{common.markdown(rows, TABLE)}"


def main(arguments=None):
    contexts = {"contexts": [16384, 65536], "tolerances": [1e-2, 1e-4, 1e-6], "tokens": 32}
    sizes = {"layers": 4, "heads": 8, "decay_times": [2.0, 2048.0]}
    parser = common.make_parser(
        __spec__.name, __doc__, **contexts, **sizes, device="cpu", dtype="float32", attention="auto"
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
