"""Cost and quality of recall from HMT's memory pages, compared with recall from one flat memory.

    python -m scripts.fetch_model smollm2-135m && python -m scripts.demo_corpus demo_output/corpus
    OMP_NUM_THREADS=1 python -m scripts.bench.pages

There are two kinds of memories: unrelated vectors, and those of a novel in segments of 32 tokens, computed by an
untuned SmolLM2-135M. For each number of memories there are 200 queries: memories,
which should each find themselves, and first halves of segments, as in a model. (Without training, many of these agree
on a few memories.)

"found" is the share of queries whose recalled pages contain the memory with the largest weight in a flat recall;
"weight" is the flat recall's total weight on all memories in the pages. The baseline uses equally many pages of the
same size that contain neighbours in the document, chosen by their means. Milliseconds are for one recall and one
dropped memory.
"""

import statistics
from collections import defaultdict

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.hmt import HMTConfig, HMTMemory, HMTWrapper
from hf_longctx.hmt.pages_hmt import MemoryPages
from scripts.bench import common
from scripts.evidence.parts import require
from scripts.fetch_model import SMOLLM2


TEXT = common.ROOT / "demo_output" / "corpus" / "held_out.txt"
TABLE = """
| memories | of | asked by | flat ms | pages ms | recalled | found | found by neighbours |
| {memories} | {of} | {asked_by} | {flat_ms:.2f} | {pages_ms:.2f} | {recalled:.0f} | {found:.1%} | {neighbours_found:.1%} |
"""
ASKED = 200


def unrelated(count, args):
    """Return (count, d) vectors, {kind of query: queries (count, d)}, and a memory that compares them unprojected."""
    torch.manual_seed(0)
    memory = HMTMemory(args.width, 1, args.width, single_pass=True)
    for projection in (memory.wq, memory.wk):
        torch.nn.init.eye_(projection)
    torch.nn.init.constant_(memory.log_temperature, -2)
    embeddings = torch.randn(count, args.width)
    return embeddings, {"itself": embeddings}, memory


def of_a_novel(count, args):
    """Return memories of segments (count, d), {kind of query: queries (count, d)}, and the memory that compares them.

    The model is untrained.
    """
    require(SMOLLM2, TEXT)
    backbone = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
    config = HMTConfig(segment_length=32, sensory_tokens=4, memory_size=None, summary_batch=32)
    torch.manual_seed(0)
    model = HMTWrapper.from_backbone(backbone, config).eval()
    tokens = torch.tensor(load_tokens(AutoTokenizer.from_pretrained(SMOLLM2), str(TEXT)).tokens[: 32 * count])
    if len(tokens) < 32 * count:
        raise ValueError(f"{TEXT} has {len(tokens)} tokens, and {count} memories take {32 * count}. Ask for fewer.")
    queries, recall, state = [], model.memory.recall, None

    def recorded(query, *rest):
        queries.append(query[0])
        return recall(query, *rest)

    model.memory.recall = recorded
    for ids in tokens.long()[None].split(1024, 1):
        state = model(ids, state=state, logits_to_keep=1, use_cache=True).state
    del model.memory.recall  # restore the class's method
    queries = torch.cat([queries[0], *queries])  # the first segment cannot recall anything
    embeddings = state.memory["bank"]["embeddings"][0]
    return embeddings, {"itself": embeddings, "first half": queries}, model.memory


@torch.no_grad()
def measure(args):
    for kind, make, counts in (("unrelated", unrelated, args.unrelated), ("a novel", of_a_novel, args.novel)):
        embeddings, queries, memory = make(max(counts), args)
        pages = MemoryPages.empty(embeddings.shape[1], embeddings.dtype, "cpu", args.page_size, args.recalled_pages)
        for n in sorted(counts):
            pages = pages.append(embeddings[len(pages) : n])
            for asked_by, several in queries.items():
                row = {"memories": n, "of": kind, "asked_by": asked_by, "tags": len(pages.members)}
                arguments = embeddings[:n], several, memory, pages
                yield row | cost(*arguments, args.rounds) | quality(*arguments)


def scorer(query, memory, embeddings):
    """Return a function that scores embeddings or tags (c, d) for a query (d,); its result is (c,)."""
    origin, count = embeddings.mean(0)[None, None], torch.tensor([len(embeddings)])
    return lambda keys: memory.scores(query[None, None], keys[None], origin, count)[0]


def cost(embeddings, queries, memory, pages, rounds):
    """Return the milliseconds of a recall, and of dropping a memory or adding one to the flat memory."""
    n, query, score = len(embeddings), queries[None, :1], scorer(queries[0], memory, embeddings)
    origin, count = embeddings.mean(0)[None, None], torch.tensor([n])

    def recall(bank):
        memory.recall(query, bank[None], torch.ones(1, len(bank), dtype=torch.bool), origin, count)

    def flat():
        recall(torch.cat([embeddings[: n - 1], query[0]]))

    def paged():
        recall(pages.append(query[0]).look_up(score)[0])

    seconds = common.time_in_turn({"flat": flat, "pages": paged}, rounds)
    return {f"{name}_ms": 1e3 * statistics.median(x) for name, x in seconds.items()}


def quality(embeddings, queries, memory, pages):
    """Return means over queries: memories recalled, whether the best is found, the weight of all that are found."""
    n, generator, values = len(embeddings), torch.Generator().manual_seed(0), defaultdict(list)
    for i in torch.randint(n, (ASKED,), generator=generator).tolist():
        score = scorer(queries[i], memory, embeddings)
        weights = score(embeddings).softmax(-1)
        _, in_pages = pages.look_up(score)
        values["recalled"].append(len(in_pages))
        baseline = neighbours(embeddings, score, len(in_pages), pages.recalled)
        for name, numbers in (("", in_pages), ("neighbours_", baseline)):
            values[f"{name}found"].append((numbers == weights.argmax()).any().item())
            values[f"{name}weight"].append(weights[numbers].sum().item())
    return {name: statistics.mean(map(float, x)) for name, x in values.items()}


def neighbours(embeddings, score, count, pages):
    """Return the indices of about `count` embeddings in pages of document neighbours, chosen by their means."""
    size = max(1, round(count / pages))
    tags = torch.stack([page.mean(0) for page in embeddings.split(size)])
    chosen = score(tags).topk(min(len(tags), pages)).indices
    numbers = (chosen[:, None] * size + torch.arange(size)).flatten()
    return numbers[numbers < len(embeddings)]


def table(result):
    rows = [row for row in result["rows"] if row["memories"] >= 1000]
    return common.markdown(rows or result["rows"], TABLE)


def main(arguments=None):
    sizes = {"unrelated": [1_000, 10_000, 30_000], "novel": [300, 1_000, 3_000], "width": 512}
    parser = common.make_parser(
        __spec__.name, __doc__, "hmt_pages", **sizes, page_size=16, recalled_pages=8, rounds=20, device="cpu"
    )
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
