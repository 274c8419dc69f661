"""Speed and memory of HMTWrapper on random weights.

    OMP_NUM_THREADS=1 python -m scripts.bench.hmt speed
    OMP_NUM_THREADS=1 python -m scripts.bench.hmt step --rounds 40
    OMP_NUM_THREADS=1 python -m scripts.bench.hmt memory --lengths 10000 100000 1000000

`speed` compares each mode with the official code's loop in turn, and writes its row before the next mode begins. The
loop calls the causal LM twice per segment, with key/value cache, all hidden states and all logits, and stores the
memories on the CPU. `windows` is the backbone alone, in windows of one segment; `cuda_graphs` is measured on a GPU
only. Tasks are reading --tokens with all logits and with the last logits, a training step (with the last logits, as in
Trainer), and decoding token by token: the median step of a segment, and its slowest position. On a CPU, we measure the
process's CPU time. `step` compares a decoding step of a Llama of one layer with the same step through HMT. The
difference is HMT's own time, because HMT adds it once per step, whatever the number of layers. `memory` streams a
token file from disk in chunks. It reports the peak resident memory at each length, and the CPU memory added by the
loss of all tokens in one call.
"""

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.caches_hmt import fork
from hf_longctx.hmt.compat_hmt import cache_name
from scripts.bench import common


TABLES = {
    "speed": """
| L' | task | official loop, us per token | windows | paper | single_pass | cuda_graphs |
| {segment_length} | {task} | {us:.0f} | {windows:.2f}x | {paper:.2f}x | {single_pass:.2f}x | {cuda_graphs:.2f}x |
""",
    "step": """
| decoding step | microseconds | to the backbone's |
| {name} | {us_per_token:.0f} | {to_backbone:.2f}x |
""",
    "memory": """
| tokens | peak MB | numbers in the state | device MB | MB added by the loss of all tokens | MB of all logits | perplexity |
| {tokens} | {peak_rss_mb:.0f} | {state_numbers} | {peak_device_mb:.0f} | {loss_mb:.0f} | {all_logits_mb:.0f} | {perplexity:.0f} |
""",
}
SIZES = {  # hidden size, layers, heads, feed-forward width, vocabulary
    "one layer": (32, 1, 2, 64, 90),
    "tiny": (64, 2, 4, 176, 1024),
    "small": (256, 6, 4, 704, 8192),
    "demo": (64, 2, 4, 192, 112),  # model_cards/hmt-demo
    "100m": (640, 10, 10, 1728, 32000),
    "1b": (2048, 16, 16, 5632, 32000),
}
CHUNK = 8192  # tokens per chunk in `memory`
STEPS = 100  # decoding steps per round in `step`


def make_backbone(args):
    """Return a random Llama, in eval mode on args.device."""
    width, layers, heads, inner, vocabulary = SIZES[args.size]
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    with torch.device(args.device):
        return LlamaForCausalLM(config).to(getattr(torch, args.dtype)).eval()


def wrap(backbone, recall_mode, args, segment_length=222):
    """Return a wrapper around the backbone, which is not copied."""
    hmt = HMTConfig(segment_length=segment_length, sensory_tokens=args.sensory_tokens, recall_mode=recall_mode)
    return HMTWrapper.from_backbone(backbone, hmt)


def official_loop(model, ids):
    """Return the paper mode's logits by the official schedule: two full calls of the causal LM per segment."""
    c, memory, backbone = model.config, model.memory, model.backbone
    embed, j, bank, logits = backbone.get_input_embeddings(), c.summary_length, None, []
    dtype = embed.weight.dtype  # the parameters of the memory are in float32
    summary_token = memory.summary_token.to(dtype).expand(len(ids), -1, -1)

    def call(*parts):
        return backbone(inputs_embeds=torch.cat(parts, 1), output_hidden_states=True)

    for start in range(0, ids.shape[1], c.segment_length):
        x = embed(ids[:, start : start + c.segment_length])
        query = call(summary_token, x[:, :j], summary_token).hidden_states[-1][:, -1:]
        prompt = memory.initial.to(dtype).expand(len(ids), -1, -1)
        if bank is not None:
            past = bank.to(ids.device, memory.wq.dtype)
            scores = (query.to(past) @ memory.wq.mT) @ (past @ memory.wk.mT).mT / len(memory.wq) ** 0.5
            prompt = (scores.softmax(-1) @ past).to(dtype)
        sensory = embed(ids[:, max(0, start - c.sensory_tokens) : start])
        out = call(prompt, sensory, x, prompt)
        new = out.hidden_states[-1][:, -1:].cpu()
        bank = new if bank is None else torch.cat([bank, new], 1)[:, -c.memory_size :]
        logits.append(out.logits[:, 1 + sensory.shape[1] : -1].cpu())
    return torch.cat(logits, 1)


def speed(args):
    """Yield microseconds per token for the official loop and every mode."""
    for length in args.segment_lengths:
        backbone = make_backbone(args)
        models = {mode: wrap(backbone, mode, args, length) for mode in ("paper", "single_pass")}
        vocabulary = models["paper"].config.vocab_size
        ids = torch.randint(vocabulary, (1, length * max(2, args.tokens // length)), device=args.device)

        def official(ids=ids, paper=models["paper"]):
            return official_loop(paper, ids)

        readers = {mode: (lambda model=model, ids=ids: model(ids)) for mode, model in models.items()}
        last = {mode: (lambda model=model, ids=ids: model(ids, logits_to_keep=1)) for mode, model in models.items()}

        def windows(ids=ids, backbone=backbone, length=length):
            return [backbone(x) for x in ids.split(length, 1)]

        if args.device == "cuda":
            captured = wrap(backbone, "single_pass", args, length)
            captured.configure(cuda_graphs=True)
            readers["cuda_graphs"] = lambda captured=captured, ids=ids: captured(ids)
            last["cuda_graphs"] = lambda captured=captured, ids=ids: captured(ids, logits_to_keep=1)
        with torch.no_grad():
            probe = ids[:, : 2 * length + 3]
            logits = models["paper"](probe).logits.cpu()
            change = (logits - official_loop(models["paper"], probe)).abs().max().item()
            allowed = 1e-3 if args.dtype == "float32" else 0.1 * logits.abs().max().item()
            assert change < allowed, f"the official loop differs from the paper's mode by {change}"
            others = {"official loop": official, "windows": windows}
            yield from compare("all logits", others | readers, length, ids, args)
            yield from compare("last logits", others | last, length, ids, args)
        steps = {
            mode: (lambda model=model, ids=ids: train_step(model, model(ids, labels=ids, logits_to_keep=1).loss))
            for mode, model in models.items()
        }

        def official_step(ids=ids, paper=models["paper"]):
            logits = official_loop(paper, ids)[:, :-1]
            train_step(paper, torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[0, 1:].to(logits.device)))

        yield from compare("training step", {"official loop": official_step} | steps, length, ids, args)
        yield {"segment_length": length, "task": "decoding", "name": "single_pass"} | decode(
            models["single_pass"], length, args
        )


def compare(task, readers, length, ids, args):
    """Yield the rows of one task; each reader alternates with the official loop."""
    for name, reader in readers.items():
        pair = {"official loop": readers["official loop"], name: reader}
        seconds = common.time_in_turn(pair, args.rounds, device=args.device, clock=clock(args))
        row = {"segment_length": length, "task": task, "name": name}
        row["us_per_token"] = 1e6 * statistics.median(seconds[name]) / ids.numel()
        yield row | {"to_official": common.median_ratio(seconds["official loop"], seconds[name])}


def clock(args):
    """Return a clock that excludes other processes if we use one thread."""
    return time.process_time if args.device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter


def train_step(model, loss):
    loss.backward()
    model.zero_grad()


@torch.no_grad()
def decode(model, length, args):
    """Return the median step over the positions of a segment, and the slowest one, each a median over segments."""
    ids = torch.randint(model.config.vocab_size, (1, length), device=args.device)
    state, places = model(ids, use_cache=True, logits_to_keep=1).state, [[] for _ in range(length)]
    for _ in range(max(3, args.rounds)):
        for place in range(length):
            arguments = ids[:, place : place + 1], None, None, state
            seconds, out = common.timed(model, *arguments, clock=clock(args), device=args.device)
            state = out.state
            places[place].append(seconds)
    medians = [statistics.median(x) for x in places]
    typical, slowest = statistics.median(medians), max(medians)
    return {
        "us_per_token": 1e6 * typical,
        "slowest_to_median": slowest / typical,
        "slowest_place": medians.index(slowest),
    }


@torch.no_grad()
def step(args):
    """Yield microseconds per decoding step of a backbone, and of an HMT around it, in the fastest of the rounds."""
    model = wrap(make_backbone(args), "single_pass", args, segment_length=512)
    ids = torch.randint(model.config.vocab_size, (1, 512 + STEPS + 1), device=args.device)
    states = {
        "Llama": DynamicCache(config=model.backbone.config),
        "HMT": model(ids[:, :513], use_cache=True).state,
    }

    name = cache_name(type(model.backbone))
    model.backbone(ids[:, :1], **{name: states["Llama"]}, use_cache=True)

    def backbone():
        cache = fork(states["Llama"])
        for token in ids[0, :STEPS]:
            model.backbone(token[None, None], **{name: cache}, use_cache=True)

    def hmt():
        state = states["HMT"]
        for token in ids[0, :STEPS]:
            state = model(token[None, None], state=state).state

    readers = {"Llama": backbone, "HMT": hmt}
    seconds = common.time_in_turn(readers, args.rounds, device=args.device, clock=clock(args))
    for name in readers:
        ratio = min(seconds[name]) / min(seconds["Llama"])
        yield {"name": name, "us_per_token": 1e6 * min(seconds[name]) / STEPS, "to_backbone": ratio}


def memory(args):
    """Yield the peak resident (and device) memory in MB while a token file is read with a state."""
    model = wrap(make_backbone(args), "single_pass", args)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        generator = np.random.default_rng(0)
        with path.open("wb") as file:
            for _ in range(0, max(args.lengths), 100_000):
                file.write(generator.integers(model.config.vocab_size, size=100_000, dtype=np.int32).tobytes())
        tokens = np.memmap(path, dtype=np.int32, mode="r")
        state, position, rows = None, 0, []
        for length in sorted(args.lengths):
            while position < length:
                piece = tokens[position : min(length, position + CHUNK)]
                ids = torch.from_numpy(piece.astype(np.int64))[None].to(args.device)
                with torch.no_grad():
                    state = model(ids, state=state, use_cache=True, logits_to_keep=1).state
                position += len(piece)
            row = {"tokens": length, "peak_rss_mb": common.resident_mb()}
            row["state_numbers"] = sum(x.numel() for x in state.tensors().values())
            if args.device == "cuda":
                row["peak_device_mb"] = torch.cuda.max_memory_allocated() / 2**20
            rows.append(row)
        for row in rows:  # measured last, because it resets the peak
            ids = torch.from_numpy(tokens[: row["tokens"]].astype(np.int64))[None].to(args.device)
            row["loss_mb"], row["perplexity"] = common.added_mb(perplexity, model, ids)
            row["all_logits_mb"] = ids.numel() * model.config.vocab_size * 4 / 2**20
        yield from rows


@torch.no_grad()
def perplexity(model, ids):
    return model(ids, labels=ids, logits_to_keep=1).loss.exp().item()


def measure(args):
    args.size = args.size or {"speed": "small", "step": "one layer", "memory": "tiny"}[args.what]
    return {"speed": speed, "step": step, "memory": memory}[args.what](args)


def table(result):
    rows = result["rows"]
    if result["settings"]["what"] == "speed":
        rows = relative_to_official(rows)
    return common.markdown(rows, TABLES[result["settings"]["what"]])


def relative_to_official(rows):
    """Return a line for each segment length and task with the ratio of each mode; for decoding, slowest to median."""
    lines = {}
    for row in rows:
        line = lines.setdefault((row["segment_length"], row["task"]), {})
        line |= {"segment_length": row["segment_length"], "task": row["task"]}
        if row["name"] == "official loop":
            line["us"] = row["us_per_token"]
        elif "slowest_to_median" in row:
            line |= {"task": "decoding, slowest step to median", row["name"]: row["slowest_to_median"]}
        else:
            line[row["name"]] = row["to_official"]
    return list(lines.values())


def main(arguments=None):
    sizes = {
        "tokens": 8192,
        "segment_lengths": [222, 512, 1024],
        "sensory_tokens": 32,
        "lengths": [10_000, 100_000, 1_000_000],
    }
    options = {**sizes, "rounds": 3, "device": "cpu", "dtype": "float32"}
    parser = common.make_parser(__spec__.name, __doc__, name="hmt_{what}", **options)
    parser.add_argument("what", choices=list(TABLES), nargs="?", default="speed", help="task (default: speed)")
    parser.add_argument(
        "--size", choices=SIZES, help="model size (default: small for speed, one layer for step, tiny for memory)"
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
