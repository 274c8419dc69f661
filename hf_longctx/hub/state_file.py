"""The file of a text that an HMT has read (`hf-longctx read`), with a card that names the model and the text."""

import os
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ..hmt import HMTState
from ..hmt.reading import STATE, describe
from .bundle import Bundle, check_base, with_contents
from .card import CARD, SOURCE, show
from .weights import check_safetensors


TEMPLATE = Path(__file__).with_name("state_card.md")


def build_state(path: str | os.PathLike, repo: str, tag: str | None = None) -> Bundle:
    """Return what is pushed of the file of a text that was read: the file, and a card.

    Args:
        path: the file.
        repo: repository that the card's loading lines name.
        tag: revision that they name.

    Raises:
        ValueError: the file is damaged, holds NaN, or was not read to the end; its model has no name on the Hub, or no
            commit there.
    """
    path = Path(path)
    about = describe(path)
    check_safetensors(path)
    state = HMTState.load(path, None)
    if state.position != about["tokens"]:
        raise ValueError(
            f"{path} has read {state.position} of {about['tokens']} tokens; the same command reads the rest."
        )
    check_base(path, about["model"], "read the text with the model of that name")
    if not about["revision"]:
        raise ValueError(
            f"{path} was read by a model {about['model']} without a commit on the Hub. Push the model, and read the text with "
            "that one."
        )
    data = ModelCardData(
        base_model=about["model"],
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["hmt-state", "long-context"],
    )
    card = ModelCard.from_template(
        data, str(TEMPLATE), repo=repo, tag=tag, about=about, state=state, file=STATE, source=SOURCE, show=show
    )
    return with_contents(Bundle({STATE: path, CARD: f"{str(card).strip()}\n".encode()}))
