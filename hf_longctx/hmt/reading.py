"""Reading a text once into the memory of an HMT, and the files that keep it, to be shared.

A file is that of `HMTState.save`, which also says what was read, by which model: `describe` tells.
"""

import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError, safe_open
from tqdm.auto import tqdm

from .modeling_hmt import HMTWrapper
from .state_hmt import HMTState


STATE = "state.safetensors"  # in a repository of the Hub
HASH = re.compile("[0-9a-f]+")
SEGMENTS = 16  # of a call
SAVE_EVERY = 60.0  # seconds


def read_text(
    model: HMTWrapper,
    tokenizer: Any,
    text: str,
    path: str | Path | None = None,
    *,
    name: str = "text",
    revision: str | None = None,
    progress: bool = False,
) -> HMTState:
    """Read a text from its beginning, and return the state after its last token.

    Args:
        model: in eval mode.
        tokenizer: of transformers. Its special tokens stand where it puts them in a text.
        path: a file to save the state in, every minute, at the end and at an error. One with a part of this text,
            read by this model, is gone on from.
        name: of the text, for `describe`.
        revision: the commit of the model on the Hub, for `describe`; `hf-longctx push` asks for it.
        progress: show a bar on stderr.

    Raises:
        ValueError: the model has no memory, there is no token, or the file holds the memory of another text or of
            other weights.
        FileNotFoundError: there is no folder for the file.
    """
    check_memory(model)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    if not ids.numel():
        raise ValueError(f"the tokenizer makes no token of {name}; there is nothing to read.")
    about = {
        "model": str(model.config.name_or_path),
        "revision": revision,
        "text": name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": ids.shape[1],
    }
    begun, saved = None, time.monotonic()
    if path is not None and Path(path).exists():
        found = describe(path)
        if any(found[key] != about[key] for key in ("sha256", "tokens")):
            raise ValueError(
                f"{path} holds the memory of {found['text']}, another text; name another file, or remove it."
            )
        begun = HMTState.load(path, model, model.device)
    elif path is not None and not Path(path).parent.is_dir():
        raise FileNotFoundError(f"There is no folder {Path(path).parent} to save a state in.")
    state, done, length = begun, 0 if begun is None else begun.position, model.config.segment_length
    begin = done + -done % length  # a call ends where a segment does
    pieces = [ids[:, done:begin], *ids[:, begin:].split(SEGMENTS * length, 1)]
    with tqdm(desc=name, total=ids.shape[1], initial=done, unit=" tokens", disable=not progress) as bar:
        try:
            for piece in (x.to(model.device) for x in pieces if x.shape[1]):
                with torch.no_grad():
                    state = model(piece, state=state, use_cache=True, logits_to_keep=1).state
                assert state is not None
                bar.update(state.position - bar.n)
                if path is not None and time.monotonic() > saved + SAVE_EVERY:
                    save(state, model, Path(path), about)
                    saved = time.monotonic()
        finally:  # also at Ctrl-C
            if path is not None and state is not None and state is not begun:
                save(state, model, Path(path), about)
    assert state is not None
    return state


def save(state: HMTState, model: HMTWrapper, path: Path, about: dict[str, Any] | None = None) -> None:
    """Write a state to a file, which appears when it is complete."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        state.save(partial, model, about)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def describe(path: str | Path) -> dict[str, Any]:
    """Return what a file of `read_text` says of itself: model, revision, text, sha256 and tokens of the text.

    Raises:
        ValueError: it is no such file.
    """
    try:
        with safe_open(str(path), "pt") as file:
            about = json.loads((file.metadata() or {})["about"])
        types = {"model": str, "text": str, "sha256": str, "tokens": int, "revision": str | None}
        sound = all(isinstance(about[name], kind) for name, kind in types.items())
        if sound and HASH.fullmatch(about["sha256"]) and HASH.fullmatch(about["revision"] or "0"):
            return about
    except (SafetensorError, LookupError, TypeError, ValueError, RecursionError):
        pass
    raise ValueError(f"{path} is not a file of a text that was read; `hf-longctx read MODEL TEXT` writes one.")


def load_state(name: str | Path, model: HMTWrapper) -> HMTState:
    """Load the state of a text that this model has read, from a file, or from the Hub by NAMESPACE/NAME@REVISION.

    Raises:
        ValueError: the model has no memory, the file is damaged, or was made by other weights.
        FileNotFoundError, OSError: there is no such file, or the Hub does not have it.
    """
    check_memory(model)
    path = Path(name)
    repo, _, revision = str(name).partition("@")
    if not path.is_file():
        if repo.count("/") != 1 or path.suffix == ".safetensors":
            raise FileNotFoundError(
                f"there is no file {name}; `hf-longctx read MODEL TEXT --output {name}` writes one."
            )
        path = Path(hf_hub_download(repo, STATE, revision=revision or None))
    return HMTState.load(path, model, model.device)


def check_memory(model: object) -> None:
    """Raise ValueError for a model that is no HMT."""
    if not isinstance(model, HMTWrapper):
        raise ValueError(
            f"{type(model).__name__} has no memory to read a text into; wrap it with HMTWrapper.from_backbone, or train one: "
            "hf-longctx finetune --recipe hmt."
        )
