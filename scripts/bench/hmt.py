"""Speed and memory of HMTWrapper on random weights.

    OMP_NUM_THREADS=1 python -m scripts.bench.hmt speed --size tiny --tokens 20000
    OMP_NUM_THREADS=1 python -m scripts.bench.hmt memory --lengths 10000 100000 1000000
    OMP_NUM_THREADS=1 python -m scripts.bench.hmt pages

`speed` compares tokens per second of reading with the loop of the official code: per segment two calls of the causal
LM, each with the key/value cache, all hidden states and all logits, and the memories kept on the CPU. `memory`
streams a token file from disk, piece by piece, and gives the peak of resident memory at each length, and what the loss
of all its tokens in one call adds (of CPU memory). `pages` times
one recall and one dropped memory, with pages and with one flat memory, over the number of segments; counts the
vectors that a recall touches; and recalls random memories, which are the hardest to find by the tag of their page.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_longctx.hmt import HMTConfig, HMTMemory, HMTWrapper
from hf_longctx.hmt.pages_hmt import MemoryPages
from scripts.bench import common


TABLES = {
    "speed": """
| reader | tokens/s | to official | largest change of logits |
| {name} | {tokens_per_s:.0f} | {to_official:.2f}x | {largest_change_of_logits:.1e} |
""",
    "memory": """
| tokens | peak MB | numbers in the state | device MB | MB that a loss over the text adds | all its logits, MB |
| {tokens} | {peak_rss_mb:.0f} | {state_numbers} | {peak_device_mb:.0f} | {loss_mb:.0f} | {all_logits_mb:.0f} |
""",
    "pages": """
| segments | flat ms | pages ms | tags | recalled | found |
| {segments} | {flat_ms:.2f} | {pages_ms:.2f} | {tags} | {recalled} | {found:.1%} |
""",
}
SIZES = {  # hidden size, layers, heads, feed-forward width, vocabulary
    "tiny": (64, 2, 4, 176, 1024),
    "100m": (640, 10, 10, 1728, 32000),
}
SEGMENT_LENGTH = 222
PIECE = 8192  # tokens that `memory` reads at a time
PAGES = {"width": 512, "page_size": 16, "recalled_pages": 8}


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
    hmt = HMTConfig(segment_length=SEGMENT_LENGTH, sensory_tokens=32, recall_mode=recall_mode)
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


@torch.no_grad()
def speed(args):
    """Tokens per second: the official loop, and both modes with all logits and with the last logits only."""
    paper, causal = build(args.size, "paper", args), build(args.size, "causal", args)
    ids = torch.randint(paper.config.vocab_size, (1, args.tokens), device=args.device)
    probe = ids[:, : 5 * SEGMENT_LENGTH + 3]
    change = (paper(probe).logits.cpu() - official_loop(paper, probe)).abs().max().item()
    readers = {
        "official loop": lambda: official_loop(paper, ids),
        "paper": lambda: paper(ids),
        "causal": lambda: causal(ids),
        "paper, last logits": lambda: paper(ids, logits_to_keep=1),
        "causal, last logits": lambda: causal(ids, logits_to_keep=1),
    }
    seconds = common.time_in_turn(readers, args.rounds, device=args.device)
    for name in readers:
        row = {"name": name, "tokens_per_s": args.tokens / statistics.median(seconds[name])}
        row["to_official"] = common.median_ratio(seconds["official loop"], seconds[name])
        yield row | ({"largest_change_of_logits": change} if name == "paper" else {})


def memory(args):
    """Peak resident memory (and device memory) in MB while a file of tokens is read with a state."""
    model = build(args.size, "causal", args)
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
                piece = tokens[position : min(length, position + PIECE)]
                ids = torch.from_numpy(piece.astype(np.int64))[None].to(args.device)
                with torch.no_grad():
                    state = model(ids, state=state, use_cache=True, logits_to_keep=1).state
                position += len(piece)
            row = {"tokens": length, "peak_rss_mb": common.resident_mb()}
            row["state_numbers"] = sum(x.numel() for x in state.tensors().values())
            if args.device == "cuda":
                row["peak_device_mb"] = torch.cuda.max_memory_allocated() / 2**20
            rows.append(row)
        for row in rows:  # last, because it resets the peak
            ids = torch.from_numpy(tokens[: row["tokens"]].astype(np.int64))[None].to(args.device)
            row["loss_mb"], _ = common.added_mb(perplexity, model, ids)
            row["all_logits_mb"] = ids.numel() * model.config.vocab_size * 4 / 2**20
        yield from rows


@torch.no_grad()
def perplexity(model, ids):
    return model(ids, labels=ids, logits_to_keep=1).loss.exp().item()


@torch.no_grad()
def pages(args):
    """Milliseconds per segment, vectors touched and the share of memories found, over the number of segments."""
    torch.manual_seed(0)
    width, mask = PAGES["width"], torch.ones(1, 1, dtype=torch.bool)
    memory = HMTMemory(width, 1, width)
    for projection in (memory.wq, memory.wk):
        torch.nn.init.eye_(projection)
    embeddings = torch.randn(max(args.segments), width)
    kept = MemoryPages.empty(width, embeddings.dtype, "cpu", PAGES["page_size"], PAGES["recalled_pages"])
    start = 0
    for n in sorted(args.segments):
        kept, start = kept.append(embeddings[start:n]), n

        def flat(n=n):
            query = torch.randn(1, 1, width)
            bank = torch.cat([embeddings[None, : n - 1], query], 1)
            memory.recall(query, bank, mask.expand(1, n))

        def paged(kept=kept):
            query = torch.randn(1, 1, width)
            recalled, _ = kept.append(query[0]).look_up(memory.direction(query)[0])
            memory.recall(query, recalled[None], mask.expand(1, len(recalled)))

        seconds = common.time_in_turn({"flat": flat, "paged": paged}, args.rounds)
        places = torch.randint(n, (200,)).tolist()
        hits = [(n - 1 - kept.look_up(memory.direction(embeddings[i : i + 1]))[1] == i).any() for i in places]
        yield {
            "segments": n,
            "flat_ms": 1e3 * statistics.median(seconds["flat"]),
            "pages_ms": 1e3 * statistics.median(seconds["paged"]),
            "tags": len(kept.sums),
            "recalled": len(kept.look_up(torch.zeros(1, width))[0]),
            "found": sum(map(bool, hits)) / len(places),
        }


def measure(args):
    return {"speed": speed, "memory": memory, "pages": pages}[args.what](args)


def table(result):
    return common.markdown(result["rows"], TABLES[result["settings"]["what"]])


def main(arguments=None):
    sizes = {
        "tokens": 20_000,
        "lengths": [10_000, 100_000, 1_000_000],
        "segments": [1_000, 3_000, 10_000, 30_000, 100_000],
    }
    options = {**sizes, "rounds": 3, "device": "cpu", "dtype": "float32"}
    parser = common.make_parser(__spec__.name, __doc__, name="hmt_{what}", **options)
    parser.add_argument("what", choices=list(TABLES), nargs="?", default="speed")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
