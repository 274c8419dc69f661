"""Ask a pretrained Llama with a memory about facts that are hidden in a novel.

    python -m scripts.fetch_model smollm2-135m && python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.hmt_facts --device cuda                  # SmolLM2-135M, in full
    python -m scripts.evidence.hmt_facts --segment-length 32 --sensory-tokens 4 --first-steps 300 --steps 800 \
        --most-facts 4 --learning-rate 3e-4 --save-steps 50             # on a CPU, an hour for each model and seed
    python -m scripts.evidence.hmt_facts --backbone llama-demo --segment-length 32 --sensory-tokens 4 --rows 16 \
        --rounds 1 --first-steps 600 --steps 1200 --learning-rate 1e-3  # model_cards/llama-demo, half an hour for each

Each of the first segments of a document is prose with one inserted sentence: "The colour of Ada's house is gold."
Each question follows in its own segment, independent of the other questions: prose, then the same sentence about one
of these people, up to the colour. HMT recalls with the first j tokens of a segment. An answer is correct if the colour
is the argmax over the vocabulary. (If a tokenizer splits colours into tokens, the first tokens count; they differ.)
The loss is computed on the answers only. Models are first trained on documents with one fact (HMT without recall),
then on documents with up to 8 facts (`--most-facts`), and evaluated with up to 64. Each stage takes up to four rounds
(`--rounds`) of its steps, until the loss of a round ends below 0.5. The prose comes from `scripts.demo_corpus`:
speeches and novels for training, another novel for evaluation. All parameters except the tied token embeddings are
trained; on a GPU, under bfloat16 autocast.

HMT is compared with RMT (HMT without recall), full attention, a window of the last segment and the sensory tokens
before it, and retrieval: the segment that BM25 finds for the question's words, without stop words, is read before the
last segment. Some models also answer without training. One of them is an HMT that rereads the segment that shares the
most tokens with the first half of the question's segment (`recall_tokens`).
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.hmt import HMTConfig, HMTWrapper
from hf_longctx.hmt.compat_hmt import cache_name
from scripts.bench import common
from scripts.evidence import hmt_training
from scripts.evidence.hmt_training import (
    AS_IT_IS,
    BACKBONES,
    READ_AGAIN,
    TEXT,
    autocast,
    new_model,
    second_stage,
    tenth,
)
from scripts.evidence.panels import Line, draw_panels
from scripts.evidence.parts import DAY, make_parser, measure_parts, require, run
from scripts.prove_hmt import CONTROLS, changed_recall


FACT, QUESTION = "The colour of {name}'s house is {colour}.", "The colour of {name}'s house is"
NAMES = [
    "Ada", "Alan", "Alice", "Amos", "Anna", "Boris", "Bruno", "Carla", "Cecil", "Clara", "Cyrus", "Dora",
    "Doris", "Edgar", "Edith", "Elsa", "Erik", "Esther", "Felix", "Flora", "Frida", "Gita", "Greta", "Gus",
    "Hanna", "Hector", "Helga", "Hugo", "Ida", "Igor", "Ines", "Ingrid", "Irma", "Ivan", "Jonas", "Julia",
    "Karl", "Kira", "Lars", "Laura", "Leo", "Lena", "Linus", "Luisa", "Magda", "Marco", "Maya", "Miles", "Mina",
    "Nadia", "Nina", "Nora", "Olga", "Oscar", "Otto", "Paula", "Pavel", "Petra", "Rosa", "Ruben", "Sonja",
    "Tessa", "Vera", "Victor",
]  # fmt: skip
COLOURS = [  # one token each
    "amber", "black", "blue", "brown", "copper", "cream", "gold", "gray", "green", "ivory", "orange", "pink", "purple",
    "red", "silver", "white",
]  # fmt: skip
STOP_WORDS = {"the", "of", "is", "s"}
PLAIN = ("full attention", "window", "BM25 and window")
SOLVED = 0.5  # mean loss over the last tenth of a round
LINES = {name: name for name in CONTROLS} | {"hits": "segments found"}
MEMORIES = ("HMT, single pass", "RMT")
UNTRAINED = ("HMT, single pass", READ_AGAIN, "full attention", "BM25 and window")
METHODS = (*MEMORIES, *PLAIN, *(f"{x}{AS_IT_IS}" for x in UNTRAINED))


class Questions(NamedTuple):
    """Rows of questions: question q about text t is in row q * texts + t.

    texts: tokens that are read first, (texts, n), long; None if the questions contain them.
    ids: the questions, up to the colour, (rows, m), long.
    colours: tokens (the first, where a tokenizer makes several), (rows,), long.
    facts: numbers of the segments with the answers, (rows,), long.
    retrieved: numbers of the segments that BM25 finds, (rows,), long, or None.
    """

    texts: torch.Tensor | None
    ids: torch.Tensor
    colours: torch.Tensor
    facts: torch.Tensor
    retrieved: torch.Tensor | None


class Facts:
    """A generator of documents with facts, and questions about them.

    Args:
        tokenizer: of the model.
        source: a file or folder with the filler.
        length: tokens of a segment, L'.
        border: j; the last token of a question is number j of its segment.
    """

    def __init__(self, tokenizer, source, length, border):
        self.tokenizer, self.length, self.border = tokenizer, length, border
        self.filler = load_tokens(tokenizer, str(source)).tokens.tolist()
        longest = max(len(self.tokens(" " + QUESTION.format(name=name))) for name in NAMES)
        if longest > border + 1:
            raise ValueError(
                f"A question has up to {longest} tokens, and half a segment {border}. Lengthen the segments."
            )

    def tokens(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def piece(self, count, generator):
        start = draw(len(self.filler) - count + 1, generator)
        return self.filler[start : start + count]

    def text(self, facts, questions, generator):
        """Return the segments, and (segment, words, token of the colour, number of the fact) of each question."""
        names = [NAMES[i] for i in torch.randperm(len(NAMES), generator=generator)[:facts]]
        colours = [COLOURS[draw(len(COLOURS), generator)] for _ in names]
        segments, asked = [], []
        for name, colour in zip(names, colours):
            fact = self.tokens(" " + FACT.format(name=name, colour=colour))
            piece, place = self.piece(self.length, generator), draw(self.length - len(fact) + 1, generator)
            segments.append([*piece[:place], *fact, *piece[place + len(fact) :]])
        for number in torch.randperm(facts, generator=generator)[:questions].tolist():
            words = self.tokens(" " + QUESTION.format(name=names[number]))
            before = self.piece(self.border + 1 - len(words), generator)
            asked.append(([*before, *words], words, self.tokens(" " + colours[number])[0], number))
        return segments, asked

    def sample(self, method, facts, questions, rows, args, generator):
        """Return `Questions` in the form that a method reads."""
        samples = [self.text(facts, questions, generator) for _ in range(rows)]
        in_turn = [(segments, asked[i]) for i in range(min(facts, questions)) for segments, asked in samples]
        texts, retrieved = None, None
        ids, colours, numbers = [asked[0] for _, asked in in_turn], *zip(*(asked[2:] for _, asked in in_turn))
        if method.startswith("window"):
            ids = [
                [*segments[-1][args.segment_length - args.sensory_tokens :], *x]
                for x, (segments, _) in zip(ids, in_turn)
            ]
        elif method.startswith("BM25"):
            retrieved = [self.best(asked[1], segments) for segments, asked in in_turn]
            ids = [[*segments[i], *x] for i, x, (segments, _) in zip(retrieved, ids, in_turn)]
        else:
            texts = [list(itertools.chain(*segments)) for segments, _ in samples]
        return Questions(
            *(x and torch.tensor(x, device=args.device) for x in (texts, ids, colours, numbers, retrieved))
        )

    def best(self, words, segments):
        """Return the index of the segment that BM25 finds."""
        scores = bm25(self.bag(words), [self.bag(x) for x in segments])
        return max(range(len(segments)), key=scores.__getitem__)

    def bag(self, ids):
        """Return the lower-case words of the tokens, without stop words, with their counts."""
        words = "".join(x if x.isalnum() else " " for x in self.tokenizer.decode(ids).lower()).split()
        return Counter(word for word in words if word not in STOP_WORDS)


def bm25(question, documents, k1=1.2, b=0.75):
    """Return BM25 scores of documents, as bags of words (Robertson and Zaragoza 2009), with Lucene's idf.

    >>> a, b = Counter({"ada": 1, "teal": 1}), Counter({"bob": 1, "red": 1})
    >>> [score > 0 for score in bm25(Counter(["ada"]), [a, b])]
    [True, False]
    """
    mean = sum(x.total() for x in documents) / len(documents)
    scores = [0.0] * len(documents)
    for word in question:
        containing = sum(word in x for x in documents)
        weight = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
        for i, document in enumerate(documents):
            length = 1 - b + b * document.total() / mean
            scores[i] += weight * document[word] * (k1 + 1) / (document[word] + k1 * length)
    return scores


def draw(count, generator):
    return torch.randint(count, (), generator=generator).item()


def read(model, questions):
    """Read the questions' documents, and return the state or cache with one row per question."""
    if questions.texts is None:
        return {}
    out = model(input_ids=questions.texts, use_cache=True, logits_to_keep=1)
    rows = torch.arange(len(questions.ids), device=model.device) % len(questions.texts)
    if isinstance(model, HMTWrapper):
        return {
            "state": out.state.select_rows(rows),
            "output_recall": model.config.recall and not model.config.recall_tokens,
        }
    name = cache_name(type(model))
    cache = getattr(out, name)
    cache.batch_select_indices(rows)
    return {name: cache}


def answer(model, questions, before):
    """Return next-token logits after each question, (rows, V), and recall weights, (rows, facts), or None."""
    out = model(input_ids=questions.ids, logits_to_keep=1, **before)
    return out.logits[:, -1].float(), out.recall_scores[-1] if before.get("output_recall") else None


def train(model, facts, method, counts, steps, file, args, generator):
    """Train on the answers by `hmt_training.train`, with each number of facts in `counts` in turn."""

    def losses_of(step):
        questions = facts.sample(method, counts[step % len(counts)], args.questions, args.rows, args, generator)
        with autocast(args):
            logits, _ = answer(model, questions, read(model, questions))
        yield F.cross_entropy(logits, questions.colours)

    return hmt_training.train(model, losses_of, steps, file, args, generator)


def checkpoints(method, seed, args):
    """Return the checkpoint files of a training run, one per round of both stages."""
    name = f"{common.result_name(args)}_{METHODS.index(method)}_{seed}"
    return [[args.work / f"{name}_{stage}_{i}.pt" for i in range(args.rounds)] for stage in (1, 2)]


def train_rounds(model, facts, method, counts, steps, files, args, generator):
    """Train in rounds, each with its own schedule, until the loss is below `SOLVED`; return the losses."""
    losses = []
    for file in files:
        of_round = train(model, facts, method, counts, steps, file, args, generator)
        losses += of_round
        if method == "window" or tenth(of_round[::-1]) < SOLVED:  # a window cannot solve it
            break
    return losses


def trained(method, seed, facts, args):
    """Return the model of a method, and its losses in both stages."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = new_model(method, args)
    model.get_input_embeddings().requires_grad_(False)  # and the head, which is tied to them
    if method.endswith(AS_IT_IS):
        return model, []
    counts = [count for count in (2, 4, 8) if count <= args.most_facts]
    first_files, second_files = checkpoints(method, seed, args)
    first = train_rounds(model, facts, method, (1,), args.first_steps, first_files, args, generator)
    model = second_stage(model, method, args)
    return model, [first, train_rounds(model, facts, method, counts, args.steps, second_files, args, generator)]


@torch.no_grad()
def ask(model, method, count, seed, facts, args):
    """Return the accuracy, that of each control, and how often the right segment is recalled, by name."""
    generator, values = torch.Generator().manual_seed(1000 + seed), defaultdict(list)
    while len(values["accuracy"]) < args.asked:
        questions = facts.sample(method, count, 8, 2, args, generator)
        with autocast(args):
            before = read(model, questions)
            logits, weights = answer(model, questions, before)
            values["accuracy"] += (logits.argmax(-1) == questions.colours).tolist()
            for name, control in CONTROLS.items() if weights is not None and method in MEMORIES else ():
                with changed_recall(model, control, questions.facts[:, None], count):
                    logits, _ = answer(model, questions, before)
                values[name] += (logits.argmax(-1) == questions.colours).tolist()
        if weights is not None:
            values["largest"] += weights.amax(-1).tolist()
        picked = questions.retrieved if weights is None else weights.argmax(-1)
        if picked is not None:
            values["hits"] += (picked == questions.facts).tolist()
    return {name: statistics.mean(map(float, x)) for name, x in values.items()}


def one_model(method, seed, args):
    counts = counts_asked(method, args)
    tokenizer = AutoTokenizer.from_pretrained(BACKBONES[args.backbone])
    config = HMTConfig(segment_length=args.segment_length, sensory_tokens=args.sensory_tokens)
    sizes = (args.segment_length, config.summary_length)
    model, losses = trained(method, seed, Facts(tokenizer, TEXT / "train", *sizes), args)
    held_out = Facts(tokenizer, TEXT / "held_out.txt", *sizes)
    values = {str(count): ask(model, method, count, seed, held_out, args) for count in counts}
    for file in itertools.chain(*checkpoints(method, seed, args)):
        file.unlink(missing_ok=True)
    lines = {name: {count: x[name] for count, x in values.items()} for name in values[str(counts[0])]}
    return {"model": method, "seed": seed, "losses": losses} | lines


def counts_asked(method, args):
    """Return the numbers of facts to evaluate a method on: for full attention, up to its context."""
    counts = [count for count in (2, 4, 8, 16, 32, 64) if count <= args.most_asked]
    if not method.startswith("full attention"):
        return counts
    context = AutoConfig.from_pretrained(BACKBONES[args.backbone]).max_position_embeddings
    facts = context // args.segment_length - 1  # and the question
    if facts < max(2, args.most_facts):
        raise ValueError(
            f"{method} reads at most {facts} facts and a question in its {context} tokens, and --most-facts is "
            f"{args.most_facts}. Shorten the segments, or train on fewer facts (at least 2)."
        )
    return [count for count in counts if count <= facts]


def measure(args):
    require(BACKBONES[args.backbone], TEXT)
    for method in args.methods:  # before the first of them trains for an hour
        counts_asked(method, args)
    yield from measure_parts(one_model, list(itertools.product(args.methods, args.seeds)), args)


def table(result):
    s, lines = result["settings"], []
    counts = sorted({count for row in result["rows"] for count in row["accuracy"]}, key=int)
    counts = [counts[0], counts[len(counts) // 2], counts[-1]] if len(counts) > 3 else counts
    for method in METHODS:
        rows = [row for row in result["rows"] if row["model"] == method]
        if rows:
            lines.append(line_of(method, [row["accuracy"] for row in rows]))
            for name, title in LINES.items():
                if name in rows[0]:
                    lines.append(line_of(f"{method}: {title}", [row[name] for row in rows]))
    form = f"""
    | model | {" | ".join(f"{count} facts" for count in counts)} |
    | {{name}} | {" | ".join(f"{{of{count}:.2f}}" for count in counts)} |
    """
    text = (
        f"Segments of {s['segment_length']} tokens. Each number is the share of right answers to {s['asked']} questions about a "
        f"held-out novel, as a mean over seeds. Chance is 1 in {len(COLOURS)}. The columns differ in the number of facts in a document."
    )
    return f"{text}\n\n{common.markdown(lines, form)}"


def line_of(name, shares):
    means = {f"of{count}": statistics.mean(x[count] for x in shares) for count in shares[0]}
    return {"name": name.replace(AS_IT_IS, ", untrained"), **means}


def plot(result, path):
    """Plot accuracy over the number of facts, before and after training."""
    panels = {"trained": [], "before training": []}
    for method in METHODS:
        shares = [row["accuracy"] for row in result["rows"] if row["model"] == method]
        if shares:
            name = method.removesuffix(AS_IT_IS)
            counts = list(shares[0])
            line = Line(name, list(map(int, counts)), [[entry[count] for entry in shares] for count in counts])
            panels["trained" if name == method else "before training"].append(line)
    counts = sorted({int(count) for row in result["rows"] for count in row["accuracy"]})
    for lines in panels.values():
        lines.append(Line("chance", (counts[0], counts[-1]), [[1 / len(COLOURS)]] * 2, control=True))
    draw_panels(
        path,
        f"Facts found in a novel, around {result['settings']['backbone']}",
        panels,
        across="facts in the text",
        up="right answers",
        notes="areas: range over seeds",
        percent=True,
        log=True,
        ticks={count: str(count) for count in counts},
    )


def main(arguments=None):
    sizes = {"segment_length": 512, "sensory_tokens": 32, "rows": 4, "questions": 4, "most_facts": 8}
    sizes |= {"asked": 64, "most_asked": 64}
    training = {"rounds": 4, "first_steps": 200, "steps": 400, "learning_rate": 1e-4, "save_steps": 100}
    options = {"seeds": [0, 1, 2], "methods": list(METHODS), "minutes": DAY, "device": "cpu"}
    parser = make_parser(__spec__.name, __doc__, "hmt_facts_{backbone}", **sizes, **training, **options)
    parser.add_argument("--backbone", choices=list(BACKBONES), default="smollm2", help="backbone (default: smollm2)")
    run(parser, measure, table, plot, arguments)


if __name__ == "__main__":
    main()
