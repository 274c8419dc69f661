"""Decoding with a pruned cache against the full cache: memory, tokens per second, and what pruning changes in the logits.

    python scripts/bench_pruned_decoding.py [--contexts 16384 65536] [--tolerances 1e-2 1e-4 1e-6] [--json FILE]

The model is a FoX (Pro) as initialised, whose heads forget by a factor e in 2 to 2048 tokens. The context is not read but
made up: normed random keys, random values, gates that scatter around their biases. Tolerance 0 drops nothing: it shows what
comes from not copying the cache for every token, and gives the logits that the others are compared with (those of the full
cache suffer from the float32 sum of log f, see pruned_cache.py). Contenders take turns, token by token; figures are medians.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from bench_attention import machine
from transformers import DynamicCache

from hf_longctx.fox import FoxConfig, FoxForCausalLM, PrunedCache
from hf_longctx.fox.attention_fox import fold_keys


def make_model(args):
    torch.manual_seed(0)
    config = FoxConfig.pro(
        vocab_size=1024,
        hidden_size=args.heads * 64,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        decay_time_min=args.decay_times[0],
        decay_time_max=args.decay_times[1],
    )
    return FoxForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()


def fill(caches, model, length):
    """Put the same `length` made-up tokens into every cache."""
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
    tensors = [
        x for layer in cache.layers for part in getattr(layer, "groups", [layer]) for x in (part.keys, part.values)
    ]
    return sum(x.nbytes for x in tensors) / 2**20


@torch.no_grad()
def decode(model, caches, tokens):
    """Seconds per token and logits of each cache, which take turns."""
    seconds, logits = {name: [] for name in caches}, {name: [] for name in caches}
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    for _ in range(tokens + 1):
        for name, cache in caches.items():
            begin = time.perf_counter()
            out = model(token, past_key_values=cache).logits
            logits[name].append(out[0, -1].float().cpu())  # waits for the device
            seconds[name].append(time.perf_counter() - begin)
        token = out.argmax(-1)
    return {name: statistics.median(s[1:]) for name, s in seconds.items()}, logits  # the first token warms up


def measure(model, length, args):
    caches = {
        "full cache": DynamicCache(config=model.config),
        **{f"tolerance {tolerance:g}": PrunedCache(model, tolerance) for tolerance in (0.0, *args.tolerances)},
    }
    fill(caches.values(), model, length)
    for name in list(caches)[1:]:
        caches[name].prune()
    held = {name: megabytes(cache) for name, cache in caches.items()}
    seconds, logits = decode(model, caches, args.tokens)
    for name, cache in caches.items():
        shift = max((a - b).abs().max().item() for a, b in zip(logits[name], logits["tolerance 0"]))
        dropped = cache.dropped.float().mean().item() / cache.get_seq_length() if name != "full cache" else 0.0
        row = {
            "context": length,
            "cache": name,
            "dropped": round(dropped, 3),
            "cache_mb": round(held[name], 1),
            "tokens_per_s": round(1 / seconds[name], 2),
            "speed_to_full": round(seconds["full cache"] / seconds[name], 2),
            "largest_change_of_logits": shift,
        }
        print(
            f"| {length} | {name} | {dropped:.1%} | {row['cache_mb']:.0f} | {row['tokens_per_s']:.1f} | "
            f"{row['speed_to_full']:.2f}x | {shift:.1e} |",
            flush=True,
        )
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 65536], metavar="TOKENS")
    parser.add_argument("--tolerances", type=float, nargs="+", default=[1e-2, 1e-4, 1e-6], metavar="WEIGHT")
    parser.add_argument(
        "--tokens", type=int, default=32, metavar="N", help="decoded per context (default: %(default)s)"
    )
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--heads", type=int, default=8, metavar="N", help="of 64 dimensions (default: %(default)s)")
    parser.add_argument(
        "--decay-times", type=float, nargs=2, default=[2, 2048], metavar="TOKENS", help="fastest, slowest"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", default="bench_pruned_decoding.json", metavar="FILE")
    args = parser.parse_args()

    where, model = machine(), make_model(args)
    device = where["cpu"] if args.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"{device}, {where['threads']} threads, torch {where['torch']}; FoX (Pro), {args.layers} layers of {args.heads} "
        f"heads, decay times {args.decay_times[0]:g} to {args.decay_times[1]:g} tokens, {args.dtype}\n"
    )
    print("| context | cache | dropped | cache MB | tokens/s | to full | largest change of logits |")
    print("|---|---|---|---|---|---|---|")
    rows = [row for length in args.contexts for row in measure(model, length, args)]
    with open(args.json, "w") as file:
        json.dump({"machine": {**where, "device": device}, "settings": vars(args), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
