"""Prefill and decoding of FoX (LLaMA), FoX (Pro) and transformers' Llama of the same size, side by side in one run.

    python scripts/bench_generate.py [--context 2048] [--device cpu|cuda] [--dtype float32] [--json FILE]

The models have random weights, one width and depth, and within 1 % the same number of parameters: FoX (Pro) has a narrower
MLP, which pays for its output gate. Figures are tokens per second, medians of alternating rounds: whatever else the machine
does hits all three. Ratios are medians of the ratio to Llama within a round. Cache bytes are those of a DynamicCache.
"""

import argparse
import json
import statistics
import time

import torch
from bench_attention import machine
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_longctx.fox import FoxConfig, FoxForCausalLM


def make_models(args):
    sizes = dict(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // args.head_dim,
        max_position_embeddings=args.context + args.tokens + 1,
    )
    mlp = args.hidden * 8 // 3 // 64 * 64
    pro_mlp = mlp - args.hidden // 3 // 64 * 64  # three matrices of hidden / 3 columns are an output gate
    decay = dict(decay_time_min=8, decay_time_max=args.context)
    torch.manual_seed(0)
    models = {
        "Llama": LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=mlp)),
        "FoX (LLaMA)": FoxForCausalLM(FoxConfig(**sizes, **decay, intermediate_size=mlp)),
        "FoX (Pro)": FoxForCausalLM(FoxConfig.pro(**sizes, **decay, intermediate_size=pro_mlp)),
    }
    return {name: model.to(args.device, getattr(torch, args.dtype)).eval() for name, model in models.items()}


def prefill(model, ids):
    """Seconds to read a prompt, and its cache."""
    cache = DynamicCache(config=model.config)
    begin = time.perf_counter()
    logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
    logits.sum().item()  # waits for the device
    return time.perf_counter() - begin, cache


def decode(model, cache, tokens):
    """Seconds per token of greedy decoding after a prompt; the first token warms up."""
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    for i in range(tokens + 1):
        if i == 1:
            begin = time.perf_counter()
        token = model(token, past_key_values=cache).logits.argmax(-1)
        token.sum().item()
    return (time.perf_counter() - begin) / tokens


def bytes_per_token(cache):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers) // cache.get_seq_length()


@torch.no_grad()
def measure(models, args):
    ids = torch.randint(0, args.vocab, (1, args.context), generator=torch.Generator().manual_seed(0)).to(args.device)
    seconds, sizes = {name: {"prefill": [], "decode": []} for name in models}, {}
    for _ in range(args.rounds + 1):
        caches = {}
        for name, model in models.items():
            took, caches[name] = prefill(model, ids)
            seconds[name]["prefill"].append(took / args.context)
            sizes[name] = bytes_per_token(caches[name])
        for name, model in models.items():
            seconds[name]["decode"].append(decode(model, caches[name], args.tokens))
    for name, model in models.items():
        row = {"name": name, "parameters": model.num_parameters(), "cache_bytes_per_token": sizes[name]}
        for phase, own in seconds[name].items():
            ratios = [llama / mine for llama, mine in zip(seconds["Llama"][phase][1:], own[1:])]
            row[f"{phase}_tokens_per_s"] = round(1 / statistics.median(own[1:]), 2)  # the first round warms up
            row[f"{phase}_to_llama"] = round(statistics.median(ratios), 3)
        yield row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, metavar="TOKENS", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="decoded a round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=768, metavar="N", help="width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--head-dim", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--vocab", type=int, default=8192, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", default="bench_generate.json", metavar="FILE")
    args = parser.parse_args()

    where, models = machine(), make_models(args)
    device = where["cpu"] if args.device == "cpu" else torch.cuda.get_device_name()
    print(
        f"{device}, {where['threads']} threads, torch {where['torch']}; {args.layers} layers of width {args.hidden}, "
        f"context {args.context}, {args.dtype}\n"
    )
    print("| model | parameters | prefill tokens/s | to Llama | decode tokens/s | to Llama | cache bytes a token |")
    print("|---|---|---|---|---|---|---|")
    rows = list(measure(models, args))
    for row in rows:
        print(
            f"| {row['name']} | {row['parameters'] / 1e6:.1f} M | {row['prefill_tokens_per_s']:.0f} | "
            f"{row['prefill_to_llama']:.2f}x | {row['decode_tokens_per_s']:.1f} | {row['decode_to_llama']:.2f}x | "
            f"{row['cache_bytes_per_token']} |"
        )
    with open(args.json, "w") as file:
        json.dump({"machine": {**where, "device": device}, "settings": vars(args), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
