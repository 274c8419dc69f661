"""The rows that a run reads: packed or found packed in its folder, and compared with those that it began with."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from ..corpus import split_mixture
from .data import FLAGS, StreamedTokenDataset, TokenDataset, digest, pack, source_digest
from .mixture import Mixture, StreamedMixture
from .model_init import read_config
from .progress import print_status
from .recipes import ResolvedFinetuning, ResolvedSettings
from .run_folder import RunLock
from .streams import DocumentStreams


class Datasets(NamedTuple):
    """Rows to train on, and rows whose loss is measured while training."""

    train: Dataset
    evaluation: Dataset | None


def prepare_datasets(run: ResolvedSettings, tokenizer, lock: RunLock) -> Datasets:
    """Read or pack the data; raises ValueError if they are less than a step, or not those of the run's lock."""
    sources = split_mixture(run.data)
    parts = prepare_parts(run, run.data, "tokens", tokenizer, run.streaming, bool(lock.before))
    packed = [rows for rows in parts if isinstance(rows, TokenDataset)]  # all, or none
    digests = [digest(rows.path) for rows in packed] or [source_digest(source) for source, _ in sources]
    shares = ["" if share is None else f"{share:g} of " for _, share in sources]
    lock.check(data=" + ".join(share + text for share, text in zip(shares, digests)))
    flags = [digest(rows.path.with_suffix(FLAGS)) for rows in packed if rows.flags is not None]
    if flags:
        lock.check(flags=" + ".join(flags))
        if run.carry_state or not run.packing:
            raise ValueError(
                f"{run.data} holds conversations, which are packed as they are; leave out --carry-state and --no-packing."
            )
    rows = sum(map(len, packed))
    if packed and rows * run.sequence_length < run.batch_tokens:  # Trainer would make a smaller step
        raise ValueError(
            f"{run.data} holds {rows} rows of {run.sequence_length} tokens, less than the {run.batch_tokens} "
            "tokens of a step. Give more text, or lower --batch-tokens."
        )
    evaluation = None
    if run.eval_data is not None:  # never streamed, because a stream has no end
        held_out = prepare_parts(run, run.eval_data, "eval_tokens", tokenizer, held_out=True)
        evaluation = mix([arrange(run, rows, tokenizer, held_out=True) for rows in held_out], run.eval_data)
    return Datasets(mix([arrange(run, rows, tokenizer) for rows in parts], run.data), evaluation)


def prepare_parts(
    run: ResolvedSettings, data: str, name: str, tokenizer, streaming=False, goes_on=False, held_out=False
) -> list[TokenDataset | StreamedTokenDataset]:
    """Return the rows of each source of a mixture, which are packed into RUN/data/`name`.npy, or `name`_2.npy etc."""
    folder = Path(run.output) / "data"
    return [
        prepare_rows(
            run,
            source,
            folder / f"{name}{'' if number == 1 else f'_{number}'}.npy",
            tokenizer,
            streaming,
            goes_on,
            held_out,
        )
        for number, (source, _) in enumerate(split_mixture(data), 1)
    ]


def arrange(run: ResolvedSettings, rows: Any, tokenizer, held_out: bool = False) -> Any:
    """Return the rows as chunks of documents where the settings say so."""
    if not isinstance(rows, TokenDataset):
        return rows
    if run.carry_state or not run.packing:
        count = run.batch_tokens // run.sequence_length if run.carry_state else 1
        chunks = DocumentStreams(rows.tokens, rows.length, tokenizer.eos_token_id, count)
        if not held_out:
            print_status(
                f"{len(chunks)} chunks of documents in {count} streams; {1 - chunks.text_share():.0%} of them is padding"
            )
        return chunks
    return rows


def mix(parts: list[Any], data: str) -> Any:
    """Return the rows of all sources in their shares, and print how often each is read while all are read once."""
    if len(parts) == 1:
        return parts[0]
    names, shares = zip(*split_mixture(data))
    if isinstance(parts[0], StreamedTokenDataset):
        return StreamedMixture(parts, shares)
    rows = Mixture(parts, None if None in shares else shares)
    for name, part, size in zip(names, parts, rows.sizes):
        print_status(
            f"{size / len(rows):.1%} of a reading is {name}: {len(part)} rows, read {size / len(part):.2f} times"
        )
    return rows


def prepare_rows(
    run: ResolvedSettings,
    source: str,
    path: Path,
    tokenizer,
    streaming: bool = False,
    goes_on: bool = False,
    held_out: bool = False,
) -> TokenDataset | StreamedTokenDataset:
    """Return the rows of a file of tokens, of a text that is packed into `path` first, or of a stream.

    A run that goes on has its tokens already, and needs the text no more. Tokens of another text are not replaced, but
    packed into a new file beside them, which `RunLock.write` gives their name.
    """
    border = None if reads_on(run) else tokenizer.eos_token_id
    if source.endswith(".npy"):
        rows = TokenDataset(source, run.sequence_length, border, len(tokenizer))
        if border is not None and border not in rows.tokens[: 2**20]:
            print_status(f"{source} begins without any EOS, {border}, which would end a document: rows hold one each")
        return rows
    if source.endswith((".bin", ".npz")):
        raise ValueError(f"{source} is no text; give tokens as .npy, which np.save writes.")
    if streaming:
        return StreamedTokenDataset(source, tokenizer, run.sequence_length, border, run.text_column)
    state = f"{digest_of(tokenizer.get_vocab())}\n{source_digest(source)}\n{run.text_column}"
    new = path.with_name(f"new_{path.name}")
    packed = {file: file.with_suffix(".source") for file in (path, new)}
    for file, packed_from in packed.items():
        if file.exists() and packed_from.exists() and packed_from.read_text() == state:
            return TokenDataset(file, run.sequence_length, border, len(tokenizer))
    if goes_on and path.exists():
        if Path(source).exists():
            raise ValueError(
                f"{source} is not the text that the run in {run.output} has packed. Go on with that, by --data {path}; "
                "or take a new folder, or begin again with --resume never."
            )
        print_status(f"there is no {source}; the run goes on with the tokens it has packed, {path}")
        return TokenDataset(path, run.sequence_length, border, len(tokenizer))
    target = new if path.exists() else path
    packed[target].unlink(missing_ok=True)
    pack(source, tokenizer, target, "held_out" if held_out else "train", run.text_column)
    packed[target].write_text(state)
    return TokenDataset(target, run.sequence_length, border, len(tokenizer))


def reads_on(run: ResolvedSettings) -> bool:
    """Return whether the model has a memory, which reads on behind the end of a document."""
    return isinstance(run, ResolvedFinetuning) and (run.recipe == "hmt" or read_config(run.model).model_type == "hmt")


def digest_of(value: Any) -> str:
    """Return the hash of a value that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


__all__ = ["Datasets", "digest_of", "prepare_datasets"]
