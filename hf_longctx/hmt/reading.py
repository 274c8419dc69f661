"""Read a document once with an HMT, save the model's memory of the document to a file, and ask questions about it.

`wrap` makes an HMT from any causal language model. Its retrievers work without training. The memory of the wrapped
model is recalled after the first j tokens of a segment. A question is therefore the beginning of a segment, and `ask`
sets j to the length of the question.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, hf_hub_download
from safetensors import safe_open
from torch import Tensor, nn
from tqdm.auto import tqdm

from .configuration_hmt import HMTConfig
from .modeling_hmt import HMTWrapper
from .state_hmt import HMTState, weights_hash


STATE = "state.safetensors"  # name of the state file in a Hub repository
SEGMENTS = 16  # segments per call
SAVE_EVERY = 60.0  # seconds
LINE_EVERY = 60.0  # seconds between lines of progress


def wrap(model: nn.Module, retriever: str = "recall_tokens") -> HMTWrapper:
    """Wrap a causal language model that was not trained as an HMT, with 512 tokens per segment if they fit.

    Args:
        model: a causal language model of transformers.
        retriever: what a segment receives from earlier segments. One of: "recall_tokens", half a segment of tokens
            that match its beginning; "neural_cache", predictions after similar tokens, with a weight of 0.1; "bank",
            only the mean of memory embeddings.

    Raises:
        ValueError: the retriever is unknown, or the model is already an HMT.
    """
    if isinstance(model, HMTWrapper):
        raise ValueError("`retriever` must be None for a model that is already an HMT. Use model.configure instead.")
    config: Any = model.config
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or 1024
    length = 2 ** min(9, (positions // 2).bit_length() - 1)
    settings = {
        "recall_tokens": {"recall_tokens": length // 2},
        "neural_cache": {"neural_cache_weight": 0.1},
        "bank": {},
    }
    if retriever not in settings:
        raise ValueError(f"`retriever` must be one of {[*settings]}, got {retriever!r}.")
    fields: dict[str, Any] = {"segment_length": length, "sensory_tokens": length // 16, "memory_size": None}
    return HMTWrapper.from_backbone(model, HMTConfig(**fields, **settings[retriever])).eval()


def read_text(
    model: HMTWrapper,
    tokenizer: Any,
    text: str,
    path: str | Path | None = None,
    *,
    name: str = "text",
    progress: bool = False,
    filler: int | None = None,
) -> HMTState:
    """Read a document from its beginning, and return the state after its last token.

    Args:
        model: an HMT in eval mode.
        tokenizer: a tokenizer of transformers. It adds its special tokens.
        text: the document.
        path: file for the state. It is saved every minute, at the end and after an error. If the file already contains
            this model's state of the document, reading resumes from this state.
        name: name of the document in errors and in the progress bar.
        progress: whether to show a progress bar on stderr, or one line per minute if stderr is not a terminal.
        filler: token that fills the last segment, so that a question begins a new one. Default: not filled.

    Raises:
        ValueError: one of: the model is not an HMT; the document is empty; the file contains the memory of a different
            document or model.
        FileNotFoundError: the folder of the file does not exist.
    """
    check_memory(model)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    if not ids.numel():
        raise ValueError(f"{name} is empty: the tokenizer returned no tokens.")
    if filler is not None:
        ids = torch.cat([ids, ids.new_full((1, -ids.shape[1] % model.config.segment_length), filler)], 1)
    about = {"text": name, "sha256": hashlib.sha256(text.encode()).hexdigest(), "tokens": ids.shape[1]}
    begun = None
    saved = time.monotonic()
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
    state = begun
    done = 0 if begun is None else begun.position
    length = model.config.segment_length
    begin = done + -done % length  # calls end at segment boundaries
    pieces = [ids[:, done:begin], *ids[:, begin:].split(SEGMENTS * length, 1)]
    with show_progress(name, ids.shape[1], done, progress) as update:
        try:
            for piece in (x.to(model.device) for x in pieces if x.shape[1]):
                with torch.no_grad():
                    state = model(piece, state=state, use_cache=True, logits_to_keep=1).state
                assert state is not None
                update(state.position)
                if path is not None and time.monotonic() > saved + SAVE_EVERY:
                    save(state, model, Path(path), about)
                    saved = time.monotonic()
        finally:  # save the state on Ctrl-C too
            if path is not None and state is not None and state is not begun:
                save(state, model, Path(path), about)
    assert state is not None
    return state


@contextmanager
def show_progress(name: str, total: int, done: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports the number of tokens read: as a bar in a terminal, otherwise as lines."""
    if sys.stderr.isatty() or not shown:
        with tqdm(desc=name, total=total, initial=done, unit=" tokens", disable=not shown) as bar:
            yield lambda read: bar.update(read - bar.n)
        return
    start = written = time.monotonic()

    def update(read: int) -> None:
        nonlocal written
        now = time.monotonic()
        if read == total or now >= written + LINE_EVERY:
            written, left = now, (now - start) * (total - read) / max(1, read - done)
            print(f"{name}: {read:,} of {total:,} tokens in {now - start:.0f} s, {left:.0f} s left", file=sys.stderr)

    yield update


def cache_path(model: HMTWrapper, tokenizer_hash: str | None, text: str) -> Path:
    """Return the path of the cached state of a document, and create its folder.

    The path depends on the document, the tokenizer, the weights and the settings.
    """
    known = [text, tokenizer_hash, weights_hash(model), model.config.to_json_string(use_diff=False), str(model.dtype)]
    folder = Path(constants.HF_HOME) / "hf_longctx" / "read"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.sha256(json.dumps(known).encode()).hexdigest()}.safetensors"


def ask(model: HMTWrapper, state: HMTState, question: Tensor, searched: int, **options: Any) -> Any:
    """Generate an answer from a model that `wrap` returned, and return the output of `generate`.

    The model recalls before it reads the last token of the question, because only later tokens attend to a memory.

    Args:
        model: the model.
        state: the state after a document whose last segment is full; see `filler` of `read_text`.
        question: ids of the question, (1, T), T >= 2.
        searched: number of leading tokens of the question that select what is recalled, at least 1. The last of these
            tokens count most, and the last token of the question is not searched. Of a question longer than a segment,
            the recall uses the last segment.
        options: arguments of `generate`.
    """
    length = model.config.segment_length
    if state.position % length:
        raise ValueError(
            f"`state` must end with a full segment, got {state.position} tokens. Read the document with filler=... of "
            "read_text."
        )
    last = question.shape[1] - 1
    begin = last // length * length  # of the segment from which the model answers
    model.configure(sum_fraction=max(1, min(searched, last) - begin) / length)
    signature = {**state.signature, "sum_fraction": model.config.sum_fraction}
    return model.generate(question, state=replace(state, signature=signature), **options)


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
