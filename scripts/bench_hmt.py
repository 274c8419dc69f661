"""Speed and memory of HMTWrapper on random weights.

    python scripts/bench_hmt.py speed --size tiny --tokens 20000
    python scripts/bench_hmt.py memory --lengths 10000 100000 1000000
    python scripts/bench_hmt.py pages --out model_cards/evidence

`speed` compares tokens per second of reading with the loop of the official code: per segment two calls of the causal
LM, each with the key/value cache, all hidden states and all logits, and the memories kept on the CPU. Runs alternate
and medians are printed. `memory` streams a token file from disk, piece by piece, and prints the peak of resident
memory at each length. `pages` times one recall and one dropped memory, with pages and with one flat memory, over the
number of segments; counts the vectors a recall touches; and asks for random memories, which are the hardest to find by
the tag of their page. Results go to stdout as one JSON object; `pages` also writes hmt_pages.json and a picture.
"""

import argparse
import json
import platform
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hmt import HMTConfig, HMTMemory, HMTWrapper
from hf_longctx.hmt.pages_hmt import MemoryPages


SIZES = {  # hidden size, layers, heads, feed-forward width, vocabulary
    "tiny": (64, 2, 4, 176, 1024),
    "100m": (640, 10, 10, 1728, 32000),
}


def build(size, recall_mode, args):
    """A wrapper around a random Llama, in eval mode on args.device."""
    width, layers, heads, inner, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    backbone = LlamaForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()
    hmt = HMTConfig(segment_length=args.segment_length, sensory_tokens=args.sensory_tokens, recall_mode=recall_mode)
    return HMTWrapper.from_backbone(backbone, hmt)


@torch.no_grad()
def official_loop(model, ids):
    """Logits of the paper's mode by the official schedule: two full calls of the causal LM per segment."""
    c, memory, backbone = model.config, model.memory, model.backbone
    embed, j, bank, logits = backbone.get_input_embeddings(), c.summary_length, None, []
    summary_prompt = memory.summary_prompt.expand(len(ids), -1, -1)

    def call(*parts):
        return backbone(inputs_embeds=torch.cat(parts, 1), output_hidden_states=True)

    for start in range(0, ids.shape[1], c.segment_length):
        x = embed(ids[:, start : start + c.segment_length])
        query = call(summary_prompt, x[:, :j], summary_prompt).hidden_states[-1][:, -1:]
        prompt = memory.initial.expand(len(ids), -1, -1)
        if bank is not None:
            past = bank.to(ids.device)
            scores = (query @ memory.wq.mT) @ (past @ memory.wk.mT).mT / len(memory.wq) ** 0.5
            prompt = scores.softmax(-1) @ past
        sensory = embed(ids[:, max(0, start - c.sensory_tokens) : start])
        out = call(prompt, sensory, x, prompt)
        new = out.hidden_states[-1][:, -1:].cpu()
        bank = new if bank is None else torch.cat([bank, new], 1)[:, -c.memory_size :]
        logits.append(out.logits[:, 1 + sensory.shape[1] : -1].cpu())
    return torch.cat(logits, 1)


def seconds(function, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def speed(args):
    """Tokens per second: the official loop, and both modes with all logits and with the last logits only."""
    paper, causal = build(args.size, "paper", args), build(args.size, "causal", args)
    ids = torch.randint(paper.config.vocab_size, (args.batch, args.tokens), device=args.device)

    probe = ids[:, : 5 * args.segment_length + 3]
    with torch.no_grad():
        difference = (paper(probe).logits.cpu() - official_loop(paper, probe)).abs().max().item()
        runs = {
            "official loop": lambda: official_loop(paper, ids),
            "paper": lambda: paper(ids),
            "causal": lambda: causal(ids),
            "paper, last logits": lambda: paper(ids, logits_to_keep=1),
            "causal, last logits": lambda: causal(ids, logits_to_keep=1),
        }
        times = {name: [] for name in runs}
        for repeat in range(args.repeats + 1):
            for name, run in runs.items():
                taken = seconds(run, args.device)
                if repeat:  # the first round warms up
                    times[name].append(taken)
    rates = {name: args.batch * args.tokens / statistics.median(t) for name, t in times.items()}
    return {
        "tokens_per_second": {name: round(rate) for name, rate in rates.items()},
        "times_official": {name: round(rate / rates["official loop"], 3) for name, rate in rates.items()},
        "largest_difference_of_logits_paper": difference,
    }


def memory(args):
    """Peak resident memory (and device memory) in MB while a file of tokens is read with a state."""
    model = build(args.size, "causal", args)
    peaks = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "tokens.bin"
        generator = np.random.default_rng(0)
        with path.open("wb") as file:
            for _ in range(0, max(args.lengths), 100_000):
                file.write(generator.integers(model.config.vocab_size, size=100_000, dtype=np.int32).tobytes())
        tokens = np.memmap(path, dtype=np.int32, mode="r")
        state, position, start = None, 0, time.perf_counter()
        for length in sorted(args.lengths):
            while position < length:
                piece = tokens[position : min(length, position + args.piece)]
                ids = torch.from_numpy(piece.astype(np.int64))[None].to(args.device)
                state = model(ids, state=state, use_cache=True, logits_to_keep=1).state
                position += len(piece)
            peaks[length] = {
                "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
                "state_numbers": sum(x.numel() for x in state.tensors().values()),
                "seconds": round(time.perf_counter() - start, 1),
            }
            if args.device == "cuda":
                peaks[length]["peak_device_mb"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return {"by_length": peaks}


@torch.no_grad()
def pages(args):
    """Milliseconds per segment, vectors touched and memories found, over the number of segments."""
    torch.manual_seed(0)
    width, one = args.width, torch.ones(1, 1, dtype=torch.bool)
    memory = HMTMemory(width, 1, width)
    for projection in (memory.wq, memory.wk):
        torch.nn.init.eye_(projection)
    embeddings = torch.randn(1, max(args.segments), width)
    kept = MemoryPages.empty(1, width, embeddings.dtype, "cpu", args.page_size, args.recalled_pages)
    by_segments, start = {}, 0
    for n in sorted(args.segments):
        kept, start = kept.append(embeddings[:, start:n], one.expand(1, n - start)), n

        def flat(query, n=n):
            bank = torch.cat([embeddings[:, : n - 1], query], 1)
            memory.recall(query, bank, one.expand(1, n))

        def paged(query, kept=kept):
            found, mask, _ = kept.append(query, one).look_up(memory.direction(query))
            memory.recall(query, found, mask)

        times = {"flat": [], "pages": []}
        for repeat in range(args.repeats + 1):
            for name, recall in (("flat", flat), ("pages", paged)):
                taken = seconds(lambda recall=recall: recall(torch.randn(1, 1, width)), "cpu")
                if repeat:
                    times[name].append(1000 * taken)
        asked = torch.randint(n, (200,)).tolist()
        found = [(n - 1 - kept.look_up(memory.direction(embeddings[:, i : i + 1]))[2] == i).any() for i in asked]
        by_segments[n] = {
            "ms": {name: round(statistics.median(t), 3) for name, t in times.items()},
            "tags": kept.sums.shape[1],
            "recalled": kept.look_up(torch.zeros(1, 1, width))[0].shape[1],
            "found": sum(map(bool, found)) / len(asked),
        }
    result = {"by_segments": by_segments}
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        settings = {name: getattr(args, name) for name in ("width", "page_size", "recalled_pages", "repeats")}
        text = json.dumps({"torch": torch.__version__, "machine": platform.machine(), **settings, **result}, indent=1)
        (args.out / "hmt_pages.json").write_text(text + "\n")
        draw_pages(by_segments, args.out / "hmt_pages.png")
    return result


def draw_pages(by_segments, path):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    segments, entries = list(by_segments), list(by_segments.values())
    vectors, times = figure.subplots(1, 2)
    vectors.plot(segments, segments, "o:", color="grey", label="flat memory")
    vectors.plot(segments, [e["tags"] + e["recalled"] for e in entries], "o-", color="C4", label="tags and pages")
    vectors.set(ylabel="vectors touched by a recall")
    for name, style in (("flat", "o:"), ("pages", "o-")):
        colour = {"flat": "grey", "pages": "C4"}[name]
        times.plot(segments, [e["ms"][name] for e in entries], style, color=colour, label=name)
    times.set(ylabel="ms per segment")
    for axes in (vectors, times):
        axes.set(xscale="log", yscale="log", xlabel="segments read")
        axes.legend()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "memory", "pages"])
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--segment-length", type=int, default=222, metavar="TOKENS")
    parser.add_argument("--sensory-tokens", type=int, default=32, metavar="TOKENS")
    parser.add_argument("--batch", type=int, default=1, metavar="ROWS")
    parser.add_argument("--tokens", type=int, default=20_000, metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=3, metavar="RUNS")
    parser.add_argument("--lengths", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], metavar="TOKENS")
    segments = [1_000, 3_000, 10_000, 30_000, 100_000]
    parser.add_argument("--segments", type=int, nargs="+", default=segments, metavar="SEGMENTS")
    parser.add_argument("--width", type=int, default=512, metavar="NUMBERS")
    parser.add_argument("--page-size", type=int, default=16, metavar="EMBEDDINGS")
    parser.add_argument("--recalled-pages", type=int, default=8, metavar="PAGES")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--piece", type=int, default=8_192, metavar="TOKENS")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1, metavar="THREADS")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = {"speed": speed, "memory": memory, "pages": pages}[args.what](args)
    settings = {"torch": torch.__version__, "machine": platform.machine(), **vars(args)}
    print(json.dumps({**settings, **result}, indent=2, default=str))


if __name__ == "__main__":
    main()
