"""Ask questions about documents beyond a model's context: HMT, BM25 search, the whole context, and truncation.

    python -m scripts.fetch_model smollm2-135m && python -m scripts.fetch_model qwen2.5-coder-0.5b
    python -m scripts.evidence.hmt_beyond [--models smollm2-135m] [--contexts 4096 16384]

The documents are records of lines, and parts of a novel with hidden sentences (`long_documents`). Each method reads a
document once, if it reads the document at all, and then answers each question from the same state:

- hmt: HMT with `recall_tokens`, as `hf-longctx read` wraps a model, without training. For each question, it re-reads
  the best passage of 256 tokens, the last 32 tokens of the document, and a prompt: 289 positions.
- search: BM25 over words. The model reads the best chunk of 290 tokens.
- search 3 chunks: the model reads the best three chunks of 96 tokens.
- truncated: the model reads the last 290 tokens of the document.
- full: the model reads the whole document. If the document is longer than the context that the model claims, it reads
  the last tokens that fit.
- hmt trained, search trained: the same methods with a trained HMT, and with its backbone. They are measured for
  SmolLM2 if WORK/trained/model exists:

    python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.long_documents WORK --model SMOLLM2 --corpus demo_output/corpus/train
    hf-longctx finetune --recipe hmt --model SMOLLM2 --data WORK/questions.npy --output_dir WORK/trained --bf16 \\
        --set recall=true recall_tokens=256 memory_size=null sum_fraction=0.125 --max_length 1024 --max_steps 160 \\
        --gradient_accumulation_steps 1

All methods answer the same questions. Differences from the search with the same weights are paired, with 95 %
bootstrap intervals over questions. Seconds are CPU seconds of one thread, because other programs do not slow them down
much. The same command resumes. With `--minutes 0`, it only writes the results of finished parts.
"""

import contextlib
import ctypes
import itertools
import math
import re
import time
from collections import Counter
from functools import cache, partial

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, set_seed

from hf_longctx.hmt import HMTWrapper
from hf_longctx.hmt.compat_hmt import cache_name
from hf_longctx.hmt.reading import ask, read_text, wrap
from hf_longctx.hmt.search_hmt import find_tokens
from hf_longctx.metrics.retrieval.answers import wilson
from hf_longctx.metrics.run.caches import cache_bytes
from hf_longctx.tokenization import encode_text
from scripts.bench import common
from scripts.evidence.long_documents import document, encode_question, states_answer
from scripts.evidence.parts import DAY, make_parser, measure_parts
from scripts.fetch_model import MODELS


METHODS = ["hmt", "search", "search 3 chunks", "truncated", "full", "hmt trained", "search trained"]
TASKS = ("lines", "needle")
DOCUMENTS = {4096: 2}  # other lengths: one document
POSITIONS = 290  # read before a question
ROOM = 128  # tokens of the claimed context that `full` leaves for a question and its answer
K1, B = 1.2, 0.75  # BM25's usual values
STEP = 512  # tokens per forward pass of `full`
TABLE = """
| model | task | tokens | method | right | 95 % CI | compared with search | fact was in the window | CPU s per document | CPU s per question | MB added at most |
| {model} | {task} | {tokens:,} | {method} | {right:.0%} | {low:.0%} to {high:.0%} | {difference:+.0%} ({difference_low:+.0%} to {difference_high:+.0%}) | {found:.0%} | {read_s:.1f} | {question_s:.1f} | {added_mb:.0f} |
"""


@cache
def load(name):
    """Return a model and its tokenizer."""
    folder = MODELS / name
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval(), AutoTokenizer.from_pretrained(
        folder
    )


@cache
def load_hmt(name, trained):
    """Return an HMT: the folder `trained`, or the untrained model if it is None."""
    if trained is not None:
        return HMTWrapper.from_pretrained(trained, dtype=torch.bfloat16).eval()
    set_seed(0)  # the memory's parameters are random
    return wrap(load(name)[0])


class Window:
    """The last `size` tokens of a document."""

    size = POSITIONS

    def __init__(self, model, tokenizer, text):
        self.model, self.tokenizer = model, tokenizer
        self.ids, self.cache = encode_text(tokenizer, text), None

    def window(self, question):
        """Return the token ids that the model reads before a question."""
        return self.ids[-self.size :]

    def answer(self, question, ids, tokens):
        """Return the window as a string, and the ids of a greedy response of at most `tokens` tokens."""
        window, options = self.window(question), {}
        if self.cache is not None:
            options = {cache_name(type(self.model)): self.cache}
        prompt = torch.tensor([[*window, *ids]])
        output = generate(self.model.generate, prompt, tokens, **options)
        if self.cache is not None:
            self.cache.crop(len(window) - self.cache.get_seq_length())  # a number of tokens to remove
        return self.tokenizer.decode(window), output[0, prompt.shape[1] :]

    def kept_bytes(self):
        """Return the bytes that are kept in memory between questions, in addition to the document."""
        return 0 if self.cache is None else cache_bytes(self.cache)


class Whole(Window):
    """The key/value cache of a document, or of its last tokens that fit into the claimed context."""

    def __init__(self, model, tokenizer, text):
        super().__init__(model, tokenizer, text)
        self.size = model.config.max_position_embeddings - ROOM
        self.cache = DynamicCache(config=model.config)
        for piece in torch.tensor([self.window(None)]).split(STEP, 1):
            model(piece, use_cache=True, logits_to_keep=1, **{cache_name(type(model)): self.cache})


class Search(Window):
    """The chunks of a document with the highest BM25 scores over words, in the order of the document."""

    chunk, number = POSITIONS, 1  # tokens per chunk, and chunks to read

    def __init__(self, model, tokenizer, text):
        super().__init__(model, tokenizer, text)
        self.chunks = [self.ids[i : i + self.chunk] for i in range(0, len(self.ids), self.chunk)]
        self.words = [Counter(words(tokenizer.decode(chunk))) for chunk in self.chunks]
        self.containing = Counter(word for counts in self.words for word in counts)
        self.mean_length = sum(counts.total() for counts in self.words) / len(self.words)

    def window(self, question):
        best = sorted(range(len(self.chunks)), key=lambda i: -self.score(question.search, self.words[i]))
        best = best[: self.number]
        return [token for i in sorted(best) for token in self.chunks[i]]

    def score(self, query, counts):
        """Return the BM25 score of a chunk (Robertson and Zaragoza 2009, with Lucene's idf)."""
        norm = K1 * (1 - B + B * counts.total() / self.mean_length)
        total = 0.0
        for word in words(query):
            n = self.containing[word]
            idf = math.log(1 + (len(self.words) - n + 0.5) / (n + 0.5))
            total += idf * counts[word] * (K1 + 1) / (counts[word] + norm)
        return total


class SearchThree(Search):
    """The three best chunks."""

    chunk, number = 96, 3


class Memory:
    """The state of an HMT that has read a document."""

    def __init__(self, model, tokenizer, text):
        self.model, self.tokenizer = model, tokenizer
        newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
        self.state = read_text(model, tokenizer, text, filler=newline)

    def answer(self, question, ids, tokens):
        """Return the passage that is re-read, as a string, and the ids of a greedy response."""
        prompt, stored = torch.tensor([ids]), self.state.memory["search"]
        passage = find_tokens(prompt[:, :-1], stored["ids"], stored["ends"] > 0, self.model.config.recall_tokens)
        output = generate(lambda x, **options: ask(self.model, self.state, x, len(ids), **options), prompt, tokens)
        return self.tokenizer.decode(passage[0]), output[0, len(ids) :]

    def kept_bytes(self):
        return cache_bytes([self.state.memory, self.state.tail])


READERS = {"hmt": Memory, "search": Search, "search 3 chunks": SearchThree, "truncated": Window, "full": Whole}


def words(text):
    return re.findall(r"\w+", text.lower())


def generate(function, prompt, tokens, **options):
    """Generate greedily, without the penalties that a generation config may set."""
    greedy = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "max_new_tokens": tokens}
    sampling = {"temperature": None, "top_p": None, "top_k": None}
    return function(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **greedy, **sampling, **options)


@torch.no_grad()
def measure_one(name, task, tokens, number, method, args):
    """Read one document with one method, and answer its questions."""
    kind, trained = method.removesuffix(" trained"), method.endswith(" trained")
    model, tokenizer = load(name)
    if kind == "hmt" or trained:
        model = load_hmt(name, args.work / "trained" / "model" if trained else None)
    if kind != "hmt" and trained:
        model = model.backbone
    questions = args.questions // DOCUMENTS.get(tokens, 1)
    text, asked = document(task, tokens, questions, tokenizer, seed=number)
    with contextlib.suppress(OSError, AttributeError):  # returns freed memory, so that the peak is that of this method
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    added, result = common.added_mb(read_and_answer, READERS[kind], model, tokenizer, text, asked)
    return result | {"added_mb": added}


def read_and_answer(reader, model, tokenizer, text, asked):
    read_s, reading = common.timed(reader, model, tokenizer, text, clock=time.process_time)
    right, found, seconds, responses = [], [], [], []
    for question in asked:
        ids, answer = encode_question(tokenizer, question)
        ask_one = partial(reading.answer, question, ids, len(answer) + 4)
        spent, (window, output) = common.timed(ask_one, clock=time.process_time)
        seconds.append(spent)
        responses.append(tokenizer.decode(output, skip_special_tokens=True))
        right.append(question.is_answered_by(responses[-1]))
        found.append(states_answer(question, window))
    facts = {"document_tokens": len(encode_text(tokenizer, text)), "kept_bytes": reading.kept_bytes()}
    lists = {"right": right, "found": found, "seconds": seconds, "responses": responses}
    return facts | {"read_s": read_s} | lists


def interval(values):
    """Return the 95 % bootstrap interval of a mean."""
    values = np.array(values, dtype=float)
    draws = np.random.default_rng(0).integers(len(values), size=(10_000, len(values)))
    return np.quantile(values[draws].mean(1), [0.025, 0.975]).tolist()


def measure(args):
    """Yield a row for each cell: a model, task, length and method."""
    for name, tokens, task in itertools.product(args.models, args.contexts, TASKS):
        trained = name == "smollm2-135m" and (args.work / "trained" / "model").exists()
        methods = [method for method in args.methods if trained or not method.endswith(" trained")]
        cells = {}
        for method, number in itertools.product(methods, range(DOCUMENTS.get(tokens, 1))):
            for part in measure_parts(measure_one, [(name, task, tokens, number, method)], args):
                cells.setdefault(method, []).append(part)
        for method, parts in cells.items():
            baseline = cells.get("search trained" if method.endswith(" trained") else "search")
            row = {"model": name, "task": task, "tokens": tokens, "method": method}
            yield row | summarize(parts, baseline)


def summarize(parts, baseline):
    """Return the fields of a row, from the results of a method and of the search (or None) on the same documents."""
    right, found, seconds = ([x for part in parts for x in part[name]] for name in ("right", "found", "seconds"))
    low, high = wilson(float(np.mean(right)), len(right))
    row = {
        "documents": len(parts),
        "questions": len(right),
        "right": float(np.mean(right)),
        "low": low,
        "high": high,
        "found": float(np.mean(found)),
        "read_s": float(np.mean([part["read_s"] for part in parts])),
        "question_s": float(np.median(seconds)),
        "added_mb": max(part["added_mb"] for part in parts),
        "kept_mb": max(part["kept_bytes"] for part in parts) / 1e6,
        "parts": parts,
    }
    if baseline is None or baseline is parts:
        return row
    differences = [a - b for a, b in zip(right, (x for part in baseline for x in part["right"]))]
    difference_low, difference_high = interval(differences)
    return row | {
        "difference": float(np.mean(differences)),
        "difference_low": difference_low,
        "difference_high": difference_high,
    }


def table(result):
    return common.markdown(result["rows"], TABLE)


def main(arguments=None):
    models = ["smollm2-135m", "qwen2.5-coder-0.5b"]
    defaults = dict(models=models, contexts=[4096, 16384, 65536], questions=20, methods=METHODS, minutes=DAY)
    parser = make_parser(__spec__.name, __doc__, "hmt_beyond", **defaults, device="cpu")
    common.run(parser, measure, table, arguments)


if __name__ == "__main__":
    main()
