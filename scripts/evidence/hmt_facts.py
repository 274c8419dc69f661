"""Facts in natural text around SmolLM2-135M: does a memory beside a pretrained model find them again?

    python -m scripts.fetch_smollm2 && python -m scripts.demo_corpus demo_output/corpus
    python -m scripts.evidence.hmt_facts --device cuda
    python -m scripts.evidence.hmt_facts --segment-length 64 --sensory-tokens 8 --first-steps 20 --steps 40 --rows 2

Each of the first W segments of a text is a piece of a novel with one sentence in it: "The colour of Ada's house is
teal." In the last segment, the piece of a novel is interrupted for such a sentence about one of the same people. Token
j of the segment comes before the colour (a recall is made of the first j tokens). An answer is right if each token of
the colour is the arg-max. Every model is trained on the answers alone, on texts of up to 8 facts, and asked on texts
of up to 64. HMT learns in two stages, the first one without recall on one fact. All parameters are trained.

Beside HMT stand RMT (the same without recall), full attention over the text, a window of the last segment and the
sensory tokens before it, and what a user would do instead: the segment that BM25 finds for the words of the question
(without stop words), before the last one, with the model as it is, or trained on such texts.
"""

import itertools
import math
import tempfile
import time
from collections import Counter

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_longctx.corpus import load_tokens
from hf_longctx.hmt import HMTConfig, HMTWrapper
from scripts.bench import common
from scripts.evidence.parts import make_parser, mean_and_range, measure_parts, run
from scripts.fetch_smollm2 import FOLDER
from scripts.prove_hmt import CONTROLS, changed_recall


TEXT = common.ROOT / "demo_output" / "corpus"
FACT, QUESTION = "The colour of {name}'s house is {colour}.", "The colour of {name}'s house is"
NAMES = [
    "Ada", "Alan", "Alice", "Amos", "Anna", "Boris", "Bruno", "Carla", "Cecil", "Clara", "Cyrus", "Dora",
    "Doris", "Edgar", "Edith", "Elsa", "Erik", "Esther", "Felix", "Flora", "Frida", "Gita", "Greta", "Gus",
    "Hanna", "Hector", "Helga", "Hugo", "Ida", "Igor", "Ines", "Ingrid", "Irma", "Ivan", "Jonas", "Julia",
    "Karl", "Kira", "Lars", "Laura", "Leo", "Lena", "Linus", "Luisa", "Magda", "Marco", "Maya", "Miles", "Mina",
    "Nadia", "Nina", "Nora", "Olga", "Oscar", "Otto", "Paula", "Pavel", "Petra", "Rosa", "Ruben", "Sonja",
    "Tessa", "Vera", "Victor",
]  # fmt: skip
COLOURS = [
    "amber", "beige", "black", "blue", "bronze", "brown", "copper", "coral", "cream", "crimson", "cyan",
    "emerald", "gold", "gray", "green", "indigo", "ivory", "jade", "lavender", "lilac", "magenta", "maroon",
    "navy", "olive", "orange", "pink", "purple", "red", "silver", "teal", "white", "yellow",
]  # fmt: skip
STOP_WORDS = {"the", "of", "is", "s"}
HMT = {  # arguments of HMTConfig in the second stage
    "HMT, single": {"recall_mode": "single"},
    "HMT, single, no recurrence": {"recall_mode": "single", "recurrence": False},
    "HMT, causal": {"recall_mode": "causal"},
    "RMT": {"recall": False, "recall_mode": "causal"},
}
PLAIN = ("full attention", "window", "BM25 and window", "BM25 and window, as it is")
METHODS = (*HMT, *PLAIN)


class Facts:
    """Texts of facts.

    Args:
        tokenizer: of the model.
        source: a file or folder with the filler.
        length: tokens of a segment, L'.
        border: j; the question ends there.
    """

    def __init__(self, tokenizer, source, length, border):
        self.tokenizer, self.length, self.border = tokenizer, length, border
        self.filler = load_tokens(tokenizer, str(source)).tokens.tolist()

    def tokens(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def piece(self, count, generator):
        start = draw(len(self.filler) - count + 1, generator)
        return self.filler[start : start + count]

    def text(self, facts, generator):
        """One text of (facts + 1) segments: ids, labels (-100 but for the answer), number of the fact, question."""
        names = [NAMES[i] for i in torch.randperm(len(NAMES), generator=generator)[:facts]]
        colours = [COLOURS[draw(len(COLOURS), generator)] for _ in names]
        ids = []
        for name, colour in zip(names, colours):
            fact = self.tokens(" " + FACT.format(name=name, colour=colour))
            piece, place = self.piece(self.length, generator), draw(self.length - len(fact) + 1, generator)
            ids += [*piece[:place], *fact, *piece[place + len(fact) :]]
        number = draw(facts, generator)
        question = QUESTION.format(name=names[number])
        question_ids, answer = self.tokens(" " + question), self.tokens(" " + colours[number])
        before = self.piece(max(0, self.border - len(question_ids)), generator)
        after = self.piece(self.length - len(before) - len(question_ids) - len(answer), generator)
        start = len(ids) + len(before) + len(question_ids)
        ids += [*before, *question_ids, *answer, *after]
        labels = [-100] * len(ids)
        labels[start : start + len(answer)] = answer
        return ids, labels, number, question

    def sample(self, method, facts, rows, args, generator):
        """Ids and labels (rows, n) as a method reads them, the number of each row's fact, and that of BM25 or None."""
        length, ids, labels, numbers, best = self.length, [], [], [], []
        for _ in range(rows):
            text, answers, number, question = self.text(facts, generator)
            if method == "window":
                first = max(0, facts * length - args.sensory_tokens)
                text, answers = text[first:], answers[first:]
            elif method.startswith("BM25"):
                segments = [text[i : i + length] for i in range(0, facts * length, length)]
                scores = bm25(self.bag(self.tokens(question)), [self.bag(x) for x in segments])
                best.append(max(range(facts), key=scores.__getitem__))
                text, answers = segments[best[-1]] + text[-length:], [-100] * length + answers[-length:]
            ids.append(text)
            labels.append(answers)
            numbers.append(number)
        return *(torch.tensor(x, device=args.device) for x in (ids, labels, numbers)), best or None

    def bag(self, ids):
        """The words of some tokens, in lower case and without stop words, with their counts."""
        words = "".join(x if x.isalnum() else " " for x in self.tokenizer.decode(ids).lower()).split()
        return Counter(word for word in words if word not in STOP_WORDS)


def bm25(question, documents, k1=1.2, b=0.75):
    """Scores of documents, all of them bags of words (Robertson and Zaragoza 2009), with the idf of Lucene.

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


def autocast(args):
    return torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda")


def train(model, facts, method, writes, steps, args, generator):
    """Train on the answers, with each number of facts in `writes` in turn.

    AdamW, a tenth of the steps to warm up, then linear decay to a tenth; gradients are clipped at 1.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 1 - 0.9 * step / steps)
    )
    model.train()
    for step in range(steps):
        ids, labels, *_ = facts.sample(method, writes[step % len(writes)], args.rows, args, generator)
        with autocast(args):
            loss = model(input_ids=ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()


def trained(method, seed, facts, args):
    """The model of a method."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).to(args.device)
    writes = [w for w in (2, 4, 8) if w <= args.most_facts]
    if method in HMT:
        sizes = {"segment_length": args.segment_length, "sensory_tokens": args.sensory_tokens}
        model = HMTWrapper.from_backbone(model, HMTConfig(**sizes, **HMT[method] | {"recall": False}))
        train(model, facts, method, (1,), args.first_steps, args, generator)
        if method != "RMT":
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder)
                model = HMTWrapper.from_pretrained(folder, recall=True).to(args.device)
    elif method.endswith("as it is"):
        return model.eval()
    return train(model, facts, method, writes, args.steps, args, generator)


@torch.no_grad()
def ask(model, method, count, seed, facts, args, control=None):
    """Share of right answers on texts of `count` facts, and of texts in which BM25 finds the segment, or None."""
    generator, right, hits = torch.Generator().manual_seed(1000 + seed), [], []
    for _ in range(args.texts // 2):
        ids, labels, numbers, best = facts.sample(method, count, 2, args, generator)
        with autocast(args):
            if control is None:
                logits = model(input_ids=ids).logits
            else:
                with changed_recall(model, control, numbers[:, None], count):
                    logits = model(input_ids=ids).logits
        wrong = (logits[:, :-1].argmax(-1) != labels[:, 1:]) & (labels[:, 1:] != -100)
        right += (~wrong.any(1)).tolist()
        hits += [] if best is None else [a == b for a, b in zip(best, numbers.tolist())]
    return sum(right) / len(right), sum(hits) / len(hits) if hits else None


def one_model(method, seed, args):
    clock = time.process_time if args.device == "cpu" else time.perf_counter
    tokenizer, begin = AutoTokenizer.from_pretrained(FOLDER), clock()
    config = HMTConfig(segment_length=args.segment_length, sensory_tokens=args.sensory_tokens)
    sizes = (args.segment_length, config.summary_length)
    model = trained(method, seed, Facts(tokenizer, TEXT / "train", *sizes), args)
    row = {"model": method, "seed": seed, "training_seconds": round(clock() - begin, 1)}
    held_out = Facts(tokenizer, TEXT / "held_out.txt", *sizes)
    counts = [count for count in (2, 4, 8, 16, 32, 64) if count <= args.most_asked]
    if method == "full attention":
        limit = model.config.max_position_embeddings
        counts = [count for count in counts if (count + 1) * args.segment_length <= limit]
    shares = {count: ask(model, method, count, seed, held_out, args) for count in counts}
    row["accuracy"] = {str(count): share for count, (share, _) in shares.items()}
    if method.startswith("BM25"):
        row["hits"] = {str(count): share for count, (_, share) in shares.items()}
    if isinstance(model, HMTWrapper) and model.config.recall:
        row["controls"] = {
            name: {str(count): ask(model, method, count, seed, held_out, args, control)[0] for count in counts}
            for name, control in CONTROLS.items()
        }
    return row


def measure(args):
    yield from measure_parts(one_model, list(itertools.product(args.methods, args.seeds)), args)


def table(result):
    s, lines = result["settings"], []
    counts = sorted({count for row in result["rows"] for count in row["accuracy"]}, key=int)
    for method in METHODS:
        rows = [row for row in result["rows"] if row["model"] == method]
        if rows:
            lines.append(line_of(method, [row["accuracy"] for row in rows], rows))
            for control in rows[0].get("controls", ()):
                lines.append(line_of(f"{method}: {control}", [row["controls"][control] for row in rows]))
            if "hits" in rows[0]:
                lines.append(line_of(f"{method}: segments found", [row["hits"] for row in rows]))
    form = f"""
    | model | seeds | {" | ".join(f"{count} facts" for count in counts)} | s to train |
    | {{name}} | {{seeds}} | {" | ".join(f"{{of{count}}}" for count in counts)} | {{seconds}} |
    """
    text = (
        f"Segments of {s['segment_length']} tokens, {s['sensory_tokens']} of them read again; {s['first_steps']} and "
        f"{s['steps']} steps on {s['rows']} texts of up to {s['most_facts']} facts, learning rate {s['learning_rate']:g}; asked "
        f"on {s['texts']} texts of a held-out novel. Share of right answers, mean (and range) over seeds, by the number of "
        f"facts; one of {len(COLOURS)} colours is right by chance."
    )
    return f"{text}\n\n{common.markdown(lines, form)}"


def line_of(name, shares, rows=()):
    line = {"name": name, "seeds": len(shares)}
    line |= {f"of{count}": mean_and_range([x[count] for x in shares]) for count in shares[0]}
    return line | ({"seconds": round(sum(row["training_seconds"] for row in rows) / len(rows))} if rows else {})


def plot(result, path):
    """Accuracy over the number of facts: means over seeds, ranges as bars."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for i, method in enumerate(METHODS):
        shares = [row["accuracy"] for row in result["rows"] if row["model"] == method]
        if shares:
            values = {int(count): [x[count] for x in shares] for count in shares[0]}
            means = [sum(v) / len(v) for v in values.values()]
            ranges = [[m - min(v) for m, v in zip(means, values.values())]]
            ranges.append([max(v) - m for m, v in zip(means, values.values())])
            axes.errorbar(list(values), means, ranges, fmt="o-", color=f"C{i}", capsize=3, label=method)
    axes.set(xscale="log", xlabel="facts in the text", ylabel="right answers", ylim=(0, 1.03))
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=90)


def main(arguments=None):
    sizes = {"segment_length": 512, "sensory_tokens": 32, "rows": 4, "texts": 64, "most_facts": 8, "most_asked": 64}
    training = {"first_steps": 200, "steps": 400, "learning_rate": 1e-4}
    options = {"seeds": [0, 1, 2], "methods": list(METHODS), "device": "cpu"}
    run(
        make_parser(__spec__.name, __doc__, "hmt_facts", **sizes, **training, **options),
        measure,
        table,
        plot,
        arguments,
    )


if __name__ == "__main__":
    main()
