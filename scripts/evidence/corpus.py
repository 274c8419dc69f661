"""Collect long documents without the Hub, from source code of PyPI packages, and pack them.

    python -m scripts.evidence.corpus collect [--folder demo_output/code] [--megabytes 45] [--packages pandas ...]
    python -m scripts.evidence.corpus pack [--folder demo_output/code]

`collect` downloads wheels, without running their code, and reads the sources in them. Duplicates are removed, and
--held-out projects are for evaluation. It trains a tokenizer of 8,192 tokens and compresses documents into files of at
most --megabytes, for transfer. `pack` does not need a network: it encodes the documents on all cores into train.npy,
the `--data` of `hf-longctx train`, and held_out-N.npy, with the first N (--row-length) tokens of one document per row.
Both skip existing files.
"""

import argparse
import hashlib
import itertools
import json
import lzma
import multiprocessing
import os
import random
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from scripts.bench import common


FOLDER = common.ROOT / "demo_output" / "code"
HELD_OUT = ["pandas", "sympy", "sqlalchemy", "networkx"]
PACKAGES = Path(__file__).with_name("packages.txt").read_text().split()
ENDINGS = (".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cpp", ".hpp", ".rst", ".md")
SHORTEST, LONGEST = 6_000, 2_000_000  # characters of a document: shorter ones would leave a row little context
PROJECT = 10_000_000  # characters of one project, because generated ones repeat themselves
FILES = 64  # number of files with similar training documents; --megabytes limits their size
VOCABULARY = 8192
EOS = "<eos>"


# Collecting.


def download(package, folder):
    """Download a package's wheel unless it exists, and return it; None if this machine is not supported."""
    pattern = f"{package.replace('-', '_').lower()}-*.whl"
    if not (found := sorted(folder.glob(pattern))):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, "--dest", str(folder), package], check=False)
        found = sorted(folder.glob(pattern))
    return found[-1] if found else None


def read_wheel(file):
    """Return a wheel's source files, sorted by path."""
    with zipfile.ZipFile(file) as wheel:
        names = sorted(info.filename for info in wheel.infolist() if info.filename.endswith(ENDINGS))
        documents = (wheel.read(name).decode(errors="replace") for name in names)
        return [document for document in documents if SHORTEST <= len(document) <= LONGEST]


def read_projects(wheels, seen):
    """Yield (project, documents) without duplicates, at most PROJECT characters per project."""
    for project, file in wheels.items():
        documents, size = [], 0
        several = read_wheel(file)
        random.Random(0).shuffle(several)
        for document in several:
            key = hashlib.sha256(document.encode()).digest()
            if key not in seen and size < PROJECT:
                seen.add(key)
                documents.append(document)
                size += len(document)
        yield project, documents


def train_tokenizer(documents, vocabulary):
    """Train a byte-level BPE tokenizer with one special token, the EOS."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=EOS, eos_token=EOS, pad_token=EOS)


def compress(documents):
    """Compress documents to bytes, with one JSON string per line."""
    return lzma.compress("".join(json.dumps(document) + "\n" for document in documents).encode(), preset=4)


def read_documents(file):
    return [json.loads(line) for line in lzma.decompress(file.read_bytes()).decode().splitlines()]


def collect(args):
    wheels, seen = args.folder / "wheels", set()
    wheels.mkdir(parents=True, exist_ok=True)
    files = {package: download(package, wheels) for package in [*args.held_out, *args.packages]}
    found = {package: file for package, file in files.items() if file is not None}
    held_out = [x for _, several in read_projects({p: f for p, f in found.items() if p in args.held_out}, seen)
                for x in several if len(x) >= args.held_out_length]  # fmt: skip
    training, sizes = [], {}
    for project, documents in read_projects({p: f for p, f in found.items() if p not in args.held_out}, seen):
        training += [(project, document) for document in documents]
        sizes[project] = sum(map(len, documents))
    random.Random(0).shuffle(training)
    parts = [sorted(training[i::FILES], key=lambda pair: pair[0]) for i in range(FILES)]
    parts = [[document for _, document in part] for part in parts if part]
    train_tokenizer(itertools.chain(*parts[:2]), args.vocabulary).save_pretrained(args.folder / "tokenizer")
    (args.folder / "held_out.xz").write_bytes(compressed := compress(held_out))
    left = args.megabytes * 10**6 - len(compressed)
    names = [args.folder / f"train-{i:02d}.xz" for i in range(FILES)]
    kept = 0
    with multiprocessing.Pool(args.processes) as pool:
        for part, file, compressed in zip(parts, names, pool.imap(compress, parts)):
            if len(compressed) > left:
                break
            file.write_bytes(compressed)
            left, kept = left - len(compressed), kept + sum(map(len, part))
    facts = {"wheels": [file.name for file in found.values()], "characters": sizes, "kept_characters": kept,
             "held_out": args.held_out, "held_out_documents": len(held_out)}  # fmt: skip
    (args.folder / "sources.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(f"{kept:,} characters of {len(sizes)} projects, {len(held_out)} documents held out", file=sys.stderr)


# Packing.


def encode(file, tokenizer):
    """Return a file's documents as tokens, each ended by EOS, and where the documents begin."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    ids = [
        tokenizer(document, verbose=False)["input_ids"] + [tokenizer.eos_token_id] for document in read_documents(file)
    ]
    return [np.array(document, dtype=np.uint16) for document in ids]


def held_out(folder, row_length):
    """Return the file with rows of held-out documents."""
    return Path(folder) / f"held_out-{row_length}.npy"


def pack(args):
    begin, train, rows_file = time.monotonic(), args.folder / "train.npy", held_out(args.folder, args.row_length)
    files = sorted(args.folder.glob("train-*.xz"))
    if not files and not train.exists():
        raise FileNotFoundError(
            f"{args.folder} does not contain documents. Collect them by `{__spec__.name} collect`."
        )
    missing = [args.folder / "held_out.xz"] * (not rows_file.exists()) + files * (not train.exists())
    with multiprocessing.Pool(args.processes) as pool:
        encode_file = partial(encode, tokenizer=str(args.folder / "tokenizer"))
        encoded = pool.map(encode_file, missing, chunksize=1)
    if not rows_file.exists():
        rows = [document[: args.row_length] for document in encoded.pop(0) if len(document) >= args.row_length]
        np.save(rows_file, np.stack(rows))
    if not train.exists():
        np.save(args.folder / ".train.npy", np.concatenate([document for part in encoded for document in part]))
        (args.folder / ".train.npy").rename(train)
    tokens, rows = (np.load(file, mmap_mode="r") for file in (train, rows_file))
    seconds = time.monotonic() - begin
    print(f"{tokens.size:,} tokens and {len(rows)} rows held out, in {seconds:.0f} s", file=sys.stderr)


def main(arguments=None):
    parser = argparse.ArgumentParser(
        prog=f"python -m {__spec__.name}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("collect", "pack"))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="corpus (default: demo_output/code)")
    parser.add_argument("--packages", nargs="+", default=PACKAGES, help="PyPI packages to train on (default: 64)")
    parser.add_argument("--held-out", nargs="+", default=HELD_OUT, help=f"packages (default: {' '.join(HELD_OUT)})")
    parser.add_argument("--megabytes", type=float, default=45, help="maximum size of a compressed file (default: 45)")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help="vocabulary size (default: %(default)s)")
    parser.add_argument("--held-out-length", type=int, default=50_000, help="characters per document (default: 50000)")
    parser.add_argument("--row-length", type=int, default=16384, help="tokens per held-out row (default: 16384)")
    parser.add_argument("--processes", type=int, help="number of processes (default: one per core)")
    args = parser.parse_args(arguments)
    {"collect": collect, "pack": pack}[args.what](args)


if __name__ == "__main__":
    main()
