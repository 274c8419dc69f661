"""Write long documents with a known structure, to test what a memory recalls (arXiv 2405.06067).

    python -m scripts.synthetic_data interleave books --tokenizer MODEL --output tokens.npy [--size 256]
    hf-longctx finetune --model MODEL --recipe hmt --data tokens.npy ...

    interleave      two documents in turns of 256 tokens: a turn continues the turn before the last one
    dilate          256 copies of a filler after every 256 tokens of a document, which a memory should ignore
    pubmedqa-long   the abstracts of two questions, one of the questions, and its answer in sentences
    pubmedqa-short  the same with the answer yes, no or maybe

PubMedQA is its authors' .json, or a dataset with a subset `pqa_artificial`, as in the paper. The official code reads
only a part of it, because it multiplies a group's index twice, and it does not use short answers.
"""

import argparse
import json
from collections.abc import Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from hf_longctx.corpus import open_source


KINDS = {
    "interleave": 256,
    "dilate": 256,
    "pubmedqa-long": 2,
    "pubmedqa-short": 2,
}  # with their sizes (HMT, section 4)
FILLER = "$"


def interleave(first: list[int], second: list[int], length: int) -> list[int]:
    """Interleave two documents in turns of `length` tokens, with the rest of the longer one at the end."""
    starts = range(0, max(len(first), len(second)), length)
    return [token for start in starts for ids in (first, second) for token in ids[start : start + length]]


def dilate(ids: list[int], length: int, filler: int) -> list[int]:
    """Insert `length` copies of the token `filler` after every `length` tokens."""
    pieces = (ids[start : start + length] for start in range(0, len(ids), length))
    return [token for piece in pieces for token in (piece + [filler] * length if len(piece) == length else piece)]


def arrange(kind: str, size: int, documents: list[list[int]], filler: int) -> list[list[int]]:
    """Arrange documents' token ids; interleaving takes documents in pairs, and the last may be single."""
    if kind == "interleave":
        pairs = zip_longest(documents[::2], documents[1::2], fillvalue=[])
        return [interleave(first, second, size) for first, second in pairs]
    return [dilate(ids, size, filler) for ids in documents] if kind == "dilate" else documents


def open_pubmedqa(source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of PubMedQA with its authors' field names."""
    if source.endswith(".json"):
        yield from json.loads(Path(source).read_text(encoding="utf-8")).values()
        return
    import datasets

    for row in datasets.load_dataset(source, "pqa_artificial", split="train", streaming=True):
        renamed = {"CONTEXTS": row["context"]["contexts"], "QUESTION": row["question"]}
        yield {**renamed, "LONG_ANSWER": row["long_answer"], "final_decision": row["final_decision"]}


def questions(rows: Iterator[dict[str, Any]], answers: str, size: int) -> Iterator[str]:
    """Yield a text for each row: the abstracts of its group of `size` rows, its question, and its answer.

    Args:
        rows: rows of `open_pubmedqa`. An incomplete last group is dropped.
        answers: "long", the conclusion of the abstract; or "short": yes, no or maybe.
        size: M of the paper.

    Raises:
        ValueError: a row does not have such an answer.
    """
    field = {"long": "LONG_ANSWER", "short": "final_decision"}[answers]
    while len(group := list(islice(rows, size))) == size:
        abstracts = " ".join(context for row in group for context in row["CONTEXTS"])
        for row in group:
            if not row.get(field):
                raise ValueError(
                    f"PubMedQA does not have a {answers} answer to {row['QUESTION']!r}. Its unlabeled part has long ones."
                )
            yield f"{abstracts} {row['QUESTION']} {row[field]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS, help="kind of documents")
    parser.add_argument("source", help="file, folder or dataset of documents, or PubMedQA")
    parser.add_argument("--tokenizer", required=True, metavar="MODEL", help="folder or Hub name of a tokenizer")
    parser.add_argument("--output", required=True, type=Path, metavar="PATH", help="token file, .npy")
    parser.add_argument(
        "--size", type=int, metavar="N", help="tokens per turn (default: 256), or abstracts per question (default: 2)"
    )
    parser.add_argument("--text-column", default="text", metavar="NAME", help="column of a table (default: text)")
    args = parser.parse_args()
    tokenizer, size = AutoTokenizer.from_pretrained(args.tokenizer), args.size or KINDS[args.kind]
    if args.kind.startswith("pubmedqa-"):
        documents = questions(open_pubmedqa(args.source), args.kind.removeprefix("pubmedqa-"), size)
    else:
        documents = open_source(args.source, "train", args.text_column)[1]
    encoded = tokenizer([*documents], add_special_tokens=False, verbose=False)["input_ids"]
    filler = tokenizer(FILLER, add_special_tokens=False)["input_ids"][-1]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    before = [] if bos in (None, eos) else [bos]
    tokens = np.concatenate([[*before, *ids, eos] for ids in arrange(args.kind, size, encoded, filler)])
    np.save(args.output, tokens.astype(np.uint16 if len(tokenizer) <= 2**16 else np.uint32))


if __name__ == "__main__":
    main()
