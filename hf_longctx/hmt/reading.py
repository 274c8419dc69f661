"""Read a document once with an HMT, and save the model's memory of the document to a file."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import safe_open
from tqdm.auto import tqdm

from .modeling_hmt import HMTWrapper
from .state_hmt import HMTState


STATE = "state.safetensors"  # name of the state file in a Hub repository
SEGMENTS = 16  # segments per call
SAVE_EVERY = 60.0  # seconds


def read_text(
    model: HMTWrapper,
    tokenizer: Any,
    text: str,
    path: str | Path | None = None,
    *,
    name: str = "text",
    progress: bool = False,
) -> HMTState:
    """Read a document from its beginning, and return the state after its last token.

    Args:
        model: an HMT in eval mode.
        tokenizer: a tokenizer of transformers. It adds its special tokens.
        text: the document.
        path: file for the state. It is saved every minute, at the end and after an error. If the file already contains
            this model's state of the document, reading resumes from this state.
        name: name of the document in errors and in the progress bar.
        progress: whether to show a progress bar on stderr.

    Raises:
        ValueError: one of: the model is not an HMT; the document is empty; the file contains the memory of a different
            document or model.
        FileNotFoundError: the folder of the file does not exist.
    """
    check_memory(model)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    if not ids.numel():
        raise ValueError(f"{name} is empty: the tokenizer returned no tokens.")
    about = {
        "text": name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": ids.shape[1],
    }
    begun, saved = None, time.monotonic()
    if path is not None and Path(path).exists():
        begun = HMTState.load(path, model, model.device)
        with safe_open(str(path), "pt") as file:
            found = json.loads(file.metadata().get("about", "{}"))
        if any(found.get(key) != about[key] for key in ("sha256", "tokens")):
            raise ValueError(
                f"{path} contains the memory of a different document, {found.get('text')}. Choose another file, or "
                "remove it."
            )
    elif path is not None and not Path(path).parent.is_dir():
        raise FileNotFoundError(f"The output folder {Path(path).parent} does not exist. Create it first.")
    state, done, length = begun, 0 if begun is None else begun.position, model.config.segment_length
    begin = done + -done % length  # calls end at segment boundaries
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
        finally:  # save the state on Ctrl-C too
            if path is not None and state is not None and state is not begun:
                save(state, model, Path(path), about)
    assert state is not None
    return state


def save(state: HMTState, model: HMTWrapper, path: Path, about: dict[str, Any] | None = None) -> None:
    """Write a state to a file atomically."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        state.save(partial, model, about)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_state(name: str | Path, model: HMTWrapper) -> HMTState:
    """Load a document's state from a file or from a Hub repository NAMESPACE/NAME@REVISION.

    Args:
        name: file or repository.
        model: the model that read the document.

    Raises:
        ValueError: one of: the model is not an HMT; the file is damaged; a different model saved the file.
        OSError: the file is neither on this machine nor on the Hub.
    """
    check_memory(model)
    path = Path(name)
    repo, _, revision = str(name).partition("@")
    if not path.is_file():
        if repo.count("/") != 1 or path.suffix == ".safetensors":
            raise FileNotFoundError(
                f"{name} does not exist. Write it with `hf-longctx read MODEL TEXT --output {name}`."
            )
        path = Path(hf_hub_download(repo, STATE, revision=revision or None))
    return HMTState.load(path, model, model.device)


def check_memory(model: object) -> None:
    """Raise ValueError for a model that is not an HMT."""
    if not isinstance(model, HMTWrapper):
        raise ValueError(
            f"`model` must be an HMTWrapper, got {type(model).__name__}. Wrap it with HMTWrapper.from_backbone, or "
            "train one: hf-longctx finetune --recipe hmt."
        )
