"""Generate the model card, README.md, from the files in a model's folder and the jinja template model_card.md.

A generated card contains a comment with the command that wrote the card. Every push regenerates such a card. A
README.md without this comment is hand-written, and a push does not change it. To add text to a generated card, write
the text into card_notes.md. Each section of that file is inserted into the card's section of the same name.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard

from ..metrics.report.card import eval_results, plain
from ..metrics.result import rounded
from .bundle import NOTES, PACKAGE_CODE, TRAINING, Bundle, with_contents


CARD = "README.md"
SOURCE = ""  # URL of the source repository, set for a release (see CONTRIBUTING.md)
# Settings of `hf-longctx train` and `finetune` that have another name in the card.
NAMES = {"max_length": "sequence_length", "max_steps": "steps", "lr_scheduler_type": "schedule", "lora_r": "lora_rank"}
TEMPLATE = Path(__file__).with_name("model_card.md")
GENERATED = re.compile(r"<!-- written by: hf-longctx push DIR(?: ([\w./-]+))?(?: --tag ([\w./-]+))? --write-card[;\n]")
UPSTREAM = "[More Information Needed]"  # placeholder in the template cards of PEFT and transformers
SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
EMBEDDINGS = re.compile(r"(embed_tokens|wte|wpe|embed_in|embed_out|lm_head)\.weight$")
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


def with_card(bundle: Bundle, repo: str | None = None, tag: str | None = None) -> Bundle:
    """Add a generated card to the bundle of a model. A hand-written card is left unchanged.

    The generated card replaces an earlier generated card. It also replaces the template card that PEFT and
    transformers save alongside the weights. It retains the old card's license, language, tags and datasets.

    Args:
        repo: repository (NAMESPACE/NAME) in the loading code. Default: the repository in the current card.
        tag: revision that the loading code pins, if `repo` is given.

    Raises:
        ValueError: the metadata of the card is not valid YAML, or a file that the card describes is damaged.
    """
    text = bundle.text(CARD)
    generated = GENERATED.search(text)
    if text.strip() and not generated and UPSTREAM not in text:
        return bundle
    if repo is None and generated:
        repo, tag = generated.groups()
    return with_contents(bundle, {CARD: render(bundle, read_card(text).data, repo, tag).encode()})


def render(bundle: Bundle, data: Any, repo: str | None, tag: str | None) -> str:
    """Generate the text of the card.

    Args:
        data: `ModelCardData` of the current card. This function updates it from the files.
        repo: repository in the loading code.
        tag: revision in the loading code.
    """
    name = (repo or "a model").rpartition("/")[2]
    data["library_name"] = "peft" if bundle.is_adapter else "transformers"
    data.pipeline_tag = PIPELINES.get(bundle.auto_class.replace("Peft", ""), data.pipeline_tag)
    if bundle.base is not None:
        data.base_model, data.base_model_relation = bundle.base[0], "adapter" if bundle.is_adapter else "finetune"
    data.tags = data.tags or [bundle.config.get("model_type", "lora"), "long-context"]
    data.eval_results = model_index(bundle) or None
    for entry in (data.eval_results or []) if repo else []:
        entry.source_name = "the results, as JSON"
        entry.source_url = f"https://huggingface.co/{repo}/tree/{tag or 'main'}"
    data.model_name = name if data.eval_results else None
    if bundle.samples:
        data.widget = [{"text": x["prompt"], "output": {"text": x["text"]}} for x in bundle.samples.values()]
    introduction, *sections = SECTION.split(bundle.text(NOTES).strip())
    code = {path for path in bundle.files if path.endswith(".py")}
    with reading("training.yaml"):
        settings = (yaml.safe_load(bundle.text("training.yaml")) or {}).items()
    card = ModelCard.from_template(
        data,
        str(TEMPLATE),
        # read from the files of the bundle
        bundle=bundle,
        config=bundle.config,
        model=bundle.config.get("backbone_config") or bundle.config,  # for an HMT, the config of its backbone
        parameters=sum(bundle.tensors.values()),
        embeddings=sum(size for tensor, size in bundle.tensors.items() if EMBEDDINGS.search(tensor)),
        kinds=[result.kind for result in bundle.results.values()],
        benchmarks={file: value for file, value in bundle.documents.items() if file not in bundle.results},
        training={NAMES.get(name, name): value for name, value in settings},
        training_files=[file for file in TRAINING if file in bundle.files],
        last_losses=last_losses(bundle),
        package_code=bool(code) and all(bundle.files[path] == PACKAGE_CODE.get(path) for path in code),
        # hand-written
        name=name,
        repo=repo,
        tag=tag,
        introduction=introduction.strip(),
        notes={title.strip(): text.strip() for title, text in zip(sections[::2], sections[1::2])},
        # formatting
        show=show,
        source=SOURCE,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).strip() + "\n"


def model_index(bundle: Bundle) -> list[EvalResult]:
    """Return the model-index entries for the results of metrics and for `evaluations` in benchmark files."""
    entries = []
    for file, result in bundle.results.items():
        with reading(file):
            entries += eval_results([result])
            _ = result.summary(), result.table()  # the card also contains these
    for file, document in bundle.documents.items():
        with reading(file):
            entries += [EvalResult(**entry) for entry in document.get("evaluations", [])]
    return entries


@contextmanager
def reading(file: str) -> Iterator[None]:
    """Convert any exception in the block to a ValueError that reports `file` as damaged."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{file} is damaged ({reason}). Write it again, or remove it.") from error


def read_card(text: str) -> ModelCard:
    """Parse a model card and its metadata.

    Raises:
        ValueError: the metadata is not valid YAML, or contains an invalid model-index.
    """
    try:
        return ModelCard(text if text.startswith("---") else f"---\n\n---\n{text}")
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the metadata of {CARD} cannot be read: {' '.join(str(error).split())}") from error


def last_losses(bundle: Bundle) -> dict[str, dict]:
    """Return the last entry with `loss` and the last one with `eval_loss`, from the last run in training_log.jsonl."""
    last = {}
    with reading("training_log.jsonl"):
        for row in map(json.loads, bundle.text("training_log.jsonl").splitlines()):
            step = row.get("step", 0)
            if any(step < row["step"] for row in last.values()):  # a new run, whose steps start at 0 again
                last = {}
            last |= {name: row for name in ("loss", "eval_loss") if "step" in row and name in row}
    return last


def loading_lines(bundle: Bundle, repo: str, revision: str | None) -> str:
    """Return Python code that loads the given revision of a pushed model."""
    options = f', revision="{revision}"' if revision else ""
    options += ", trust_remote_code=True" if bundle.has_code else ""
    library, name = "peft" if bundle.is_adapter else "transformers", bundle.auto_class
    return f'from {library} import {name}\n{name}.from_pretrained("{repo}"{options})'


def show(value: object) -> str:
    """Format a value as Markdown: round floats, separate thousands in integers, and escape strings."""
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    return rounded(value) if isinstance(value, float) else plain(str(value))
