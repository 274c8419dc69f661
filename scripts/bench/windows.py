"""Memory and speed of decoding and prefill with head windows, compared with other caches.

    python -m scripts.bench.windows [--contexts 8192] [--tokens 16]

The models have random weights and the shape of SmolLM2-135M. 17 of 90 heads keep all keys, as in windows that were
learned for it. The others have windows of 64 to 1,024 tokens. StreamingLLM has the same window in all heads, so that
it stores as many keys. The quantized cache has 4 bits and requires optimum-quanto. Decoding continues a context of
random keys and values; the caches alternate token by token. Prefill reads the context in one call, in a model of
--prefill-layers layers. Times are CPU times, medians over tokens or rounds. Ratios are medians of the ratios to the
full cache in the same turn.
"""

import copy
import importlib.util
import random
import statistics
import time

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache

from hf_longctx.hmt.compat_hmt import cache_name
from hf_longctx.windows import HeadWindows
from hf_longctx.windows.attention import take_heads
from hf_longctx.windows.masks import CallMask
from scripts.bench import common


TABLE = """
| context | cache | keys | cache MB | decode ms a token | decode to full | prefill s | prefill to full |
| {context} | {cache} | {share:.0%} | {cache_mb:.0f} | {decode_ms:.1f} | {decode_to_full:.2f}x | {prefill_s:.2f} |\
 {prefill_to_full:.2f}x |
"""
SHAPE = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    tie_word_embeddings=True,
)
HEADS = {-1: 17, 1024: 6, 512: 3, 256: 8, 128: 20, 64: 36}  # windows of 90 heads, and how many heads have them


def make_windows(layers, sinks=4):
    """Return windows for the first layers of a model with 90 key heads."""
    heads = [window for window, count in HEADS.items() for _ in range(count)]
    random.Random(0).shuffle(heads)
    return HeadWindows([heads[3 * i : 3 * i + 3] for i in range(layers)], sinks)


def make_caches(context, layers, dtype):
    """Return {name: (model, function that creates a cache, share of the keys)}. The models share their weights."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, max_position_embeddings=2 * context)
    model = LlamaForCausalLM(config).to(dtype).eval()
    windows = make_windows(layers)
    same = HeadWindows([[round(windows.share(context) * context) - windows.sinks] * 3] * layers, windows.sinks)
    contenders = {"full": (model, lambda: DynamicCache(config=config), 1.0)}
    for name, x in (("head windows", windows), ("StreamingLLM", same)):
        twin = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
        contenders[name] = (x.apply(twin), x.cache, x.share(context))
    if importlib.util.find_spec("optimum"):
        contenders["quantized, 4 bits"] = (model, lambda: QuantizedCache("quanto", config, nbits=4), 1.0)
    return contenders


def fill(cache, config, dtype, length):
    """Fill a cache with random keys and values."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, config.num_key_value_heads, length, config.head_dim)
    for index in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        layer = cache.layers[index] if index < len(cache.layers) else None
        cache.update(k, v, index)
        if windows := getattr(layer, "windows", None):
            for group in windows.groups:
                part, extent = [take_heads(x, group.heads) for x in (k, v)], windows.extent(group, None)
                mask = CallMask(None, 0, length, k.device, None)
                layer.append_to_ring(group, extent, *part, mask) if extent else layer.append(group, None, *part, mask)


def megabytes(cache):
    """Return the size of the stored keys and values."""
    size = 0
    for layer in cache.layers:
        if hasattr(layer, "stores"):
            tensors = [x for store in layer.stores() for x in (store.keys, store.values)]
        elif hasattr(layer, "_quantized_keys"):
            packed = (layer._quantized_keys, layer._quantized_values)
            tensors = [getattr(x, name) for x in packed for name in ("_data", "_scale", "_shift")]
            tensors = [getattr(x, "_data", x) for x in tensors] + [layer.keys, layer.values]
        else:
            tensors = [layer.keys, layer.values]
        size += sum(x.nbytes for x in tensors)
    return size / 2**20


@torch.no_grad()
def time_in_turn(contenders, tokens, rounds, caches=None):
    """Return {name: CPU seconds of a call in every round}. Without `caches`, each call has a new one."""

    def run(name):
        model, create, _ = contenders[name]
        cache = {cache_name(type(model)): caches[name] if caches else create()}
        return common.timed(lambda: model(tokens, **cache, logits_to_keep=1), clock=time.process_time)[0]

    return common.alternate({name: lambda name=name: run(name) for name in contenders}, rounds)


def measure(args):
    dtype = getattr(torch, args.dtype)
    for context in args.contexts:
        prompt = torch.randint(SHAPE["vocab_size"], (1, context), generator=torch.Generator().manual_seed(2))
        prefill = time_in_turn(make_caches(context, args.prefill_layers, dtype), prompt, args.rounds)
        contenders = make_caches(context, args.layers, dtype)
        caches = {name: create() for name, (_, create, _) in contenders.items()}
        for name, cache in caches.items():
            fill(cache, contenders[name][0].config, dtype, context)
        sizes = {name: megabytes(cache) for name, cache in caches.items()}
        decode = time_in_turn(contenders, prompt[:, :1], args.tokens, caches)
        for name, (_, _, share) in contenders.items():
            yield {
                "context": context,
                "cache": name,
                "share": share,
                "cache_mb": sizes[name],
                "decode_ms": 1e3 * statistics.median(decode[name]),
                "decode_to_full": common.median_ratio(decode["full"], decode[name]),
                "prefill_s": statistics.median(prefill[name]),
                "prefill_to_full": common.median_ratio(prefill["full"], prefill[name]),
            }
        if "quantized, 4 bits" not in contenders:
            yield {"context": context, "cache": "quantized, 4 bits: optimum-quanto is not installed"}


def table(result):
    s = result["settings"]
    sizes = f"Shape of SmolLM2-135M, {s['dtype']}, one thread; decoding with {s['layers']} layers, prefill with"
    return f"{sizes} {s['prefill_layers']}.\n\n{common.markdown(result['rows'], TABLE)}"


def main(arguments=None):
    parser = common.make_parser(
        __spec__.name,
        __doc__,
        contexts=[8192],
        tokens=16,
        rounds=3,
        layers=30,
        prefill_layers=4,
        dtype="float32",
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
