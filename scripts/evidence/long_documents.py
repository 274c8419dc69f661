"""Documents with several questions each, for `hmt_beyond`: records of lines, and novels with hidden sentences.

    python -m scripts.evidence.long_documents FOLDER --model MODEL [--sequences 160]

The command writes FOLDER/questions.npy, the training sequences for `hf-longctx finetune --recipe hmt`. A sequence
contains a segment of a document, and a segment that asks for facts of one passage of this document. Only the answers
are scored. The novels, facts and records differ from those of the evaluation.
"""

import argparse
import gzip
import random
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import AutoTokenizer

from hf_longctx.corpus import open_source
from hf_longctx.metrics.retrieval.answers import contains_number, contains_text
from hf_longctx.metrics.retrieval.haystack import ends_sentence, insertion_point, split_encoding
from hf_longctx.metrics.retrieval.wording import ANSWER_BEGIN, QUESTION, TASK
from hf_longctx.metrics.tasks.lines import ADJECTIVES, NOUNS, draw_record
from hf_longctx.tokenization import encode_text
from hf_longctx.training.conversations import TOKEN
from scripts.bench import common


NOVEL = common.ROOT / "model_cards" / "held_out.txt.gz"
SEGMENT, PASSAGE, QUERY = 512, 256, 64  # tokens per segment, per passage that HMT re-reads, and of the recall query
CITY_NAMES = (
    "San Francisco,Amsterdam,Athens,Bangkok,Barcelona,Berlin,Boston,Brussels,Budapest,Cairo,Chicago,"
    "Copenhagen,Dublin,Edinburgh,Florence,Geneva,Hamburg,Helsinki,Istanbul,Jakarta,Kyoto,Lagos,"
    "Lima,Lisbon,London,Madrid,Manila,Marseille,Melbourne,Milan,Montreal,Moscow,Mumbai,Munich,"
    "Nairobi,Naples,Oslo,Paris,Prague,Rome,Seoul,Shanghai,Singapore,Stockholm,Sydney,Tokyo,"
    "Toronto,Vienna,Warsaw,Zurich"
)
CITIES = CITY_NAMES.split(",")


class Question(NamedTuple):
    """A question about a document. `search` is its search query, and `answer` is the expected continuation."""

    text: str
    search: str
    answer: str

    def is_answered_by(self, response):
        number = self.answer.strip(" <>")
        return contains_number(response, int(number)) if number.isdigit() else contains_text(response, self.answer)


def record(lines, questions, seed):
    """Return a record of lines as in `line_retrieval`, and questions about lines at even distances."""
    drawn = draw_record(lines, seed, 0)
    rows = drawn.text.splitlines()[-lines:]
    asked_name, found = rows[drawn.asked_line].split()[1].rstrip(":"), []
    for i in range(questions):
        row = rows[int((i + 0.5) / questions * lines)]
        key, content = row.split(" is ")  # the question and the introduction share words, so the search is for the key
        text = drawn.question.replace(asked_name, row.split()[1].rstrip(":"))
        found.append(Question(text, key, f" {content}"))
    return drawn.text, found


def hide_facts(novel, facts, tokenizer, seed, offset=0):
    """Hide sentences in a novel at even distances, and return the document and a question about each sentence.

    Args:
        novel: token ids.
        facts: number of sentences, with the wording of `needle_in_a_haystack`. Each is about another city.
        offset: index of the first city.
    """
    rng, pieces, found, begin = random.Random(f"facts {seed}"), [], [], 0
    adjectives, nouns = ADJECTIVES.split(), NOUNS.split()
    cities = CITIES[offset : offset + facts]
    rng.shuffle(cities)
    ends = np.array([is_end(tokenizer, token) for token in novel])
    for i, city in enumerate(cities):
        a, b, c, d = *rng.sample(adjectives, 2), *rng.sample(nouns, 2)
        answer = f" carry the {a} {c} to the {b} {d}."
        at = max(begin, insertion_point(ends, (i + 0.5) / facts))
        start = ANSWER_BEGIN.replace(CITIES[0], city)
        pieces += [tokenizer.decode(novel[begin:at]), f"\n{start}{answer}\n"]
        question = QUESTION.replace(CITIES[0], city)
        found.append(Question(f"\n{TASK} {question} Answer: {start}", question, answer))
        begin = at
    return "".join([*pieces, tokenizer.decode(novel[begin:])]), found


@cache
def is_end(tokenizer, token):
    return ends_sentence(tokenizer.decode([token]))


def encode_question(tokenizer, question):
    """Return the token ids of a question and of its answer."""
    return split_encoding(partial(encode_text, tokenizer), question.text, question.answer)


@cache
def novel_tokens(tokenizer):
    return np.array(encode_text(tokenizer, gzip.open(NOVEL, "rt").read()))


def document(task, tokens, questions, tokenizer, seed):
    """Return a document of about `tokens` tokens, and questions about it.

    Args:
        task: "lines", a record of lines; or "needle", a part of the novel Persuasion with hidden sentences.
    """
    if task == "lines":
        per_line = len(encode_text(tokenizer, draw_record(100, 0, 0).text)) / 103  # 100 lines and their introduction
        return record(int(tokens / per_line), questions, seed)
    size, novel = tokens - 32 * questions, novel_tokens(tokenizer)
    begin = random.Random(f"begin {seed} {tokens}").randrange(len(novel) - size)
    return hide_facts(novel[begin : begin + size], questions, tokenizer, seed)


def training_sequences(tokenizer, novels, sequences):
    """Yield `TOKEN` records (2 * SEGMENT,): a segment of a document, and questions about one of its passages."""
    rng = random.Random(0)
    while sequences:
        if sequences % 2:
            text, questions = record(40, 40, seed=1000 + sequences)
        else:
            begin = rng.randrange(len(novels) - SEGMENT)
            text, questions = hide_facts(novels[begin : begin + SEGMENT], 6, tokenizer, 1000 + sequences, offset=24)
        ids = encode_text(tokenizer, text)[:SEGMENT]
        begin = PASSAGE * rng.randrange(SEGMENT // PASSAGE)
        passage = tokenizer.decode(ids[begin : begin + PASSAGE])
        asked = [question for question in questions if states_answer(question, passage)]
        if not asked or len(ids) < SEGMENT:
            continue
        rng.shuffle(asked)
        tokens, scored = [], []
        for question in asked:
            prompt, answer = encode_question(tokenizer, question)
            if not tokens:  # the first part of the segment, which HMT searches for, ends with the first question
                prompt = [*ids[-QUERY:], *prompt][-QUERY:]
            tokens += [*prompt, *answer]
            scored += [False] * len(prompt) + [True] * len(answer)
        rest = max(0, SEGMENT - len(tokens))
        tokens, scored = [*tokens[:SEGMENT], *ids[:rest]], [*scored[:SEGMENT], *[False] * rest]
        row = np.zeros(2 * SEGMENT, TOKEN)
        row["id"], row["scored"] = [*ids, *tokens], [*[False] * SEGMENT, *scored]
        row["first"][0] = True
        sequences -= 1
        yield row


def states_answer(question, passage):
    """Return whether a passage contains the fact that a question asks for."""
    begin = question.text.rpartition("Answer: ")[2]
    return f"{begin}{question.answer}" in passage


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="output folder")
    parser.add_argument("--model", required=True, help="folder of the model whose tokenizer is used")
    parser.add_argument("--corpus", required=True, metavar="DATA", help="novels of the training sequences")
    parser.add_argument("--sequences", type=int, default=160, metavar="N", help="sequences (default: %(default)s)")
    args = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    novels = np.array(encode_text(tokenizer, "\n\n".join(text for text in open_source(args.corpus)[1])))
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = np.concatenate([*training_sequences(tokenizer, novels, args.sequences)])
    np.save(args.folder / "questions.npy", rows)
    print(f"wrote {len(rows):,} tokens, {int(rows['scored'].sum()):,} of them scored")


if __name__ == "__main__":
    main()
