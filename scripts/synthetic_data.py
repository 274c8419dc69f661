"""Write long documents with a known structure, which show what a memory recalls (arXiv 2405.06067).

    python -m scripts.synthetic_data interleave books --tokenizer MODEL --output tokens.npy [--size 256]
    hf-longctx finetune MODEL --recipe hmt --data tokens.npy ...

    interleave      two documents in turns of 256 tokens: the text of a turn continues two turns back
    dilate          256 copies of a filler after every 256 tokens of a document, which a memory should ignore
    pubmedqa-long   the abstracts of two questions, one of the questions, and its answer in sentences
    pubmedqa-short  the same with the answer yes, no or maybe

The official code reads a part of PubMedQA only, as its index of a group is multiplied twice, and has no short answers.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer

from hf_longctx.corpus import open_source


KINDS = {"interleave": 256, "dilate": 256, "pubmedqa-long": 2, "pubmedqa-short": 2}  # and their sizes (HMT, section 4)
FILLER = "$"


@dataclass(frozen=True)
class Construction:
    """Make documents from those of a source.

    Args:
        kind: one of `KINDS`.
        size: tokens of a turn, or for PubMedQA the questions whose abstracts make a text.
    """

    kind: str
    size: int

    def read(self, source: str, part: str = "train", column: str = "text") -> Iterator[str]:
        """Read the documents of a source: those of `hf_longctx.corpus`, or a text for each question of PubMedQA.

        Raises:
            ValueError: `questions` raises it.
        """
        if not self.kind.startswith("pubmedqa"):
            return open_source(source, part, column)[1]
        answers = self.kind.removeprefix("pubmedqa-")
        return (f"{prompt} {answer}" for prompt, answer in questions(open_pubmedqa(source), answers, self.size))

    def arrange(self, documents: list[list[int]], tokenizer) -> list[list[int]]:
        """Arrange the token ids of documents; two of them make an interleaved one, and all are used."""
        if self.kind == "interleave":
            pairs = zip_longest(documents[::2], documents[1::2], fillvalue=[])
            return [interleave(first, second, self.size) for first, second in pairs]
        if self.kind == "dilate":
            filler = tokenizer(FILLER, add_special_tokens=False)["input_ids"][-1]
            return [dilate(document, self.size, filler) for document in documents]
        return documents


def interleave(first: list[int], second: list[int], length: int) -> list[int]:
    """Interleave two texts in turns of `length` tokens, with the rest of the longer one at the end.

    >>> interleave([1, 2, 3, 4, 5], [6, 7, 8], 2)
    [1, 2, 6, 7, 3, 4, 8, 5]
    """
    starts = range(0, max(len(first), len(second)), length)
    return [token for start in starts for text in (first, second) for token in text[start : start + length]]


def dilate(ids: list[int], length: int, filler: int) -> list[int]:
    """Insert `length` copies of the token `filler` after every `length` tokens.

    >>> dilate([1, 2, 3, 4, 5], 2, filler=0)
    [1, 2, 0, 0, 3, 4, 0, 0, 5]
    """
    pieces = (ids[start : start + length] for start in range(0, len(ids), length))
    return [token for piece in pieces for token in (piece + [filler] * length if len(piece) == length else piece)]


class Question(NamedTuple):
    """A text that ends with a question, and the answer that follows it."""

    prompt: str
    answer: str


def questions(rows: Iterator[dict[str, Any]], answers: str, size: int) -> Iterator[Question]:
    """Make `size` texts of every `size` rows of PubMedQA: all their abstracts, and one of their questions.

    Args:
        rows: as `open_pubmedqa` reads them.
        answers: "long", the conclusion of the abstract; or "short": yes, no or maybe.
        size: M of the paper. Rows that are left at the end are not used.

    Raises:
        ValueError: a row lacks fields of PubMedQA, or its answer.
    """
    fields = map(_fields, rows)
    while len(group := list(islice(fields, size))) == size:
        abstracts = " ".join(context for contexts, *_ in group for context in contexts)
        for _, question, long_answer, decision in group:
            answer = long_answer if answers == "long" else decision
            if not answer:
                raise ValueError(
                    f"PubMedQA has no {answers} answer to {question!r}; the unlabeled part has long ones only."
                )
            yield Question(f"{abstracts} {question}", answer)


def _fields(row):
    try:
        if "QUESTION" in row:  # as its authors publish it
            return row["CONTEXTS"], row["QUESTION"], row["LONG_ANSWER"], row.get("final_decision")
        return row["context"]["contexts"], row["question"], row["long_answer"], row.get("final_decision")
    except (KeyError, TypeError):
        names = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(
            f"a row of PubMedQA has question, context.contexts, long_answer and final_decision (or QUESTION, CONTEXTS, "
            f"LONG_ANSWER and final_decision); this one has {names}."
        ) from None


def open_pubmedqa(source: str) -> Iterator[dict[str, Any]]:
    """Read the rows of PubMedQA.

    Args:
        source: a .json of its authors (an object of rows, by their PubMed number) or a list, a .jsonl, a .parquet; or
            the name of a dataset, whose part `pqa_artificial` is read, as in the paper.

    Raises:
        ValueError: the file is not JSON.
        ImportError: `datasets` is needed and not installed.
        FileNotFoundError: there is neither a file nor a dataset of that name.
    """
    path = Path(source)
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_bytes())
            return iter(rows.values() if isinstance(rows, dict) else rows)
        if path.suffix == ".jsonl":
            return iter([json.loads(line) for line in path.read_bytes().split(b"\n") if line.strip()])
    except ValueError as error:  # neither JSON nor Unicode
        raise ValueError(f"{source} is not JSON: {error}") from error
    try:
        import datasets
    except ImportError:
        raise ImportError(f"reading {source} needs the datasets library: pip install 'hf-longctx[training]'") from None
    if path.suffix == ".parquet":
        return iter(datasets.load_dataset("parquet", data_files=source, split="train", streaming=True))
    try:
        return iter(datasets.load_dataset(source, "pqa_artificial", split="train", streaming=True))
    except Exception as error:  # offline, unknown name: `datasets` raises many types
        raise FileNotFoundError(f"{source} is neither a .json, .jsonl or .parquet nor a dataset: {error}") from error


def write(construction: Construction, source: str, tokenizer, path: Path, column: str = "text") -> None:
    """Write the token ids of all documents of a source to `path`, .npy; each is followed by the tokenizer's EOS."""
    before = [] if tokenizer.bos_token_id in (None, tokenizer.eos_token_id) else [tokenizer.bos_token_id]
    documents = [*construction.read(source, column=column)]
    encoded = construction.arrange(
        tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"], tokenizer
    )
    tokens = np.concatenate([[*before, *ids, tokenizer.eos_token_id] for ids in encoded])
    np.save(path, tokens.astype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("source", help="file, folder or dataset of documents, or PubMedQA")
    parser.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or Hub name of a tokenizer")
    parser.add_argument("--output", required=True, type=Path, metavar="PATH", help="token file, .npy")
    parser.add_argument("--size", type=int, metavar="N", help="tokens of a turn (default: 256), or abstracts (2)")
    parser.add_argument("--text-column", default="text", metavar="NAME", help="column of a table (default: text)")
    args = parser.parse_args()
    construction = Construction(args.kind, args.size or KINDS[args.kind])
    write(construction, args.source, AutoTokenizer.from_pretrained(args.tokenizer), args.output, args.text_column)


if __name__ == "__main__":
    main()
