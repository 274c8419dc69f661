"""The card of a model, README.md: written by the jinja template model_card.md from the files beside it.

A generated card begins with a comment that names the command, and is written anew at every push. A README.md without
that comment is a person's, and stays as it is. What people have to say in a generated card stands in card_notes.md,
whose sections become parts of the sections of the same name.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard

from ..metrics.report.card import eval_results, plain
from ..metrics.result import rounded
from .bundle import NOTES, PACKAGE_CODE, TRAINING, Bundle, with_contents


CARD = "README.md"
SOURCE = ""  # the address of the repository, which a release sets: see CONTRIBUTING.md
# what a card calls the settings of `hf-longctx train` and `finetune`
NAMES = {"max_length": "sequence_length", "max_steps": "steps", "lr_scheduler_type": "schedule", "lora_r": "lora_rank"}
TEMPLATE = Path(__file__).with_name("model_card.md")
GENERATED = re.compile(r"<!-- written by: hf-longctx push DIR(?: ([\w./-]+))?(?: --tag ([\w./-]+))? --write-card[;\n]")
UPSTREAM = "[More Information Needed]"  # in the templates of huggingface_hub, which PEFT and transformers write
HEAD = re.compile(r"---[\r\n]+(.*?)[\r\n]+---", re.DOTALL)
SECTION = re.compile(r"^## (.+)\n", re.MULTILINE)
EMBEDDINGS = re.compile(r"(embed_tokens|wte|wpe|embed_in|embed_out|lm_head)\.weight$")
OPENING = (
    yaml.BlockMappingStartToken,
    yaml.BlockSequenceStartToken,
    yaml.FlowMappingStartToken,
    yaml.FlowSequenceStartToken,
)
CLOSING = (yaml.BlockEndToken, yaml.FlowMappingEndToken, yaml.FlowSequenceEndToken)
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}


def with_card(bundle: Bundle, repo: str | None = None, tag: str | None = None) -> Bundle:
    """Return the bundle of a model with its card: a person's as it is, or a generated one, written anew.

    A generated card also takes the place of the templates that PEFT and transformers leave beside weights. Licence,
    language and tags of a generated card are kept.

    Args:
        repo: NAMESPACE/NAME that the loading lines name. Default: the one of the card that is there.
        tag: revision that they pin, if `repo` is given.

    Raises:
        ValueError: the head of the card is not YAML, or a file that the card is written from is damaged.
    """
    text = bundle.text(CARD)
    generated = GENERATED.search(text)
    if text.strip() and not generated and UPSTREAM not in text:
        return bundle
    if repo is None and generated:
        repo, tag = generated.groups()
    data = read_card(text).data
    try:
        text = render(bundle, data, repo, tag)
    except Exception as error:  # of a type that no code of ours writes there
        raise ValueError(
            f"a value in config.json or in a result cannot be shown ({type(error).__name__}: {error})."
        ) from error
    return with_contents(bundle, {CARD: text.encode()})


def render(bundle: Bundle, data: Any, repo: str | None, tag: str | None) -> str:
    """Return the generated card.

    Args:
        data: the metadata that it keeps, a `ModelCardData`; what follows from the files is added.
        repo, tag: repository and revision that the loading lines name.
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
    card = ModelCard.from_template(
        data,
        str(TEMPLATE),
        # what the files say
        bundle=bundle,
        config=bundle.config,
        model=bundle.config.get("backbone_config") or bundle.config,  # the part with layers
        parameters=sum(bundle.tensors.values()),
        embeddings=sum(size for tensor, size in bundle.tensors.items() if EMBEDDINGS.search(tensor)),
        kinds=[result.kind for result in bundle.results.values()],
        benchmarks={file: value for file, value in bundle.documents.items() if file not in bundle.results},
        training=read_settings(bundle),
        training_files=[file for file in TRAINING if file in bundle.files],
        last_losses=last_losses(bundle),
        package_code=bool(code) and code <= PACKAGE_CODE.keys(),
        # what people say
        name=name,
        repo=repo,
        tag=tag,
        introduction=introduction.strip(),
        notes={title.strip(): text.strip() for title, text in zip(sections[::2], sections[1::2])},
        # how it is shown
        show=show,
        source=SOURCE,
    )
    return re.sub(r"\n{3,}", "\n\n", str(card)).strip() + "\n"


def model_index(bundle: Bundle) -> list[EvalResult]:
    """Return the entries of the model-index: numbers of results, and `evaluations` that a benchmark's JSON has.

    Raises:
        ValueError: an evaluation is not a number with the names of its metric and dataset.
    """
    entries = eval_results(list(bundle.results.values()))
    for file, document in bundle.documents.items():
        for entry in document.get("evaluations", ()):
            try:
                entries.append(EvalResult(**entry))
                assert isinstance(entry["metric_value"], int | float)
            except (TypeError, AssertionError) as error:
                raise ValueError(f"{file} has an evaluation that is none, {str(entry)[:80]} ({error}).") from error
    return entries


def read_card(text: str) -> ModelCard:
    """Return a card that was parsed.

    Raises:
        ValueError: its head is not YAML, or has a model-index that the Hub does not read.
    """
    text = re.sub(r"[\r\n]{3,}", "\n\n", text)  # on many, the pattern of huggingface_hub takes hours
    head = HEAD.match(text)
    try:
        read_yaml(head[1] if head else "")
        return ModelCard(text if text.startswith("---") else f"---\n\n---\n{text}")
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the head of {CARD} cannot be read: {' '.join(str(error).split())}") from error


def read_yaml(text: str) -> Any:
    """Return what a YAML text holds; `yaml.YAMLError` for aliases and deep nesting, which can take gigabytes."""
    depth = 0
    for token in yaml.scan(text):
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError("aliases are not read; write the value where it is meant")
        depth += isinstance(token, OPENING) - isinstance(token, CLOSING)
        if depth > 30:
            raise yaml.YAMLError("lists within lists are read to a depth of 30")
    return yaml.safe_load(text)


def read_settings(bundle: Bundle) -> dict:
    """Return the settings in training.yaml, or {}.

    Raises:
        ValueError: the file does not hold settings.
    """
    try:
        settings = read_yaml(bundle.text("training.yaml")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"training.yaml is damaged ({' '.join(str(error).split())}).") from error
    if not isinstance(settings, dict):
        raise ValueError("training.yaml does not hold settings; it must have lines such as `steps: 1000`.")
    return {NAMES.get(name, name): value for name, value in settings.items()}


def last_losses(bundle: Bundle) -> dict[str, dict]:
    """Return the last row with each loss in training_log.jsonl, of the last of several trainings.

    Raises:
        ValueError: a line does not hold an object.
    """
    last = {}
    for line in bundle.text("training_log.jsonl").splitlines():
        try:
            row = json.loads(line)
            step = row.get("step", 0)
        except (json.JSONDecodeError, AttributeError) as error:
            raise ValueError(
                f'training_log.jsonl has {line[:40]!r}; its lines must be such as {{"step": 1}}.'
            ) from error
        if any(step < row["step"] for row in last.values()):  # another training, which counts its steps anew
            last = {}
        last |= {name: row for name in ("loss", "eval_loss") if "step" in row and name in row}
    return last


def loading_lines(bundle: Bundle, repo: str, revision: str | None) -> str:
    """Return the Python that loads what was pushed: this revision and no other, its code included."""
    options = f', revision="{revision}"' if revision else ""
    options += ", trust_remote_code=True" if bundle.has_code else ""
    library, name = "peft" if bundle.is_adapter else "transformers", bundle.auto_class
    return f'from {library} import {name}\n{name}.from_pretrained("{repo}"{options})'


def show(value: object) -> str:
    """Return a value as Markdown: figures rounded or with thousands apart, texts escaped."""
    if type(value) is int:
        return f"{value:,}"
    if isinstance(value, list | tuple):
        return ", ".join(map(show, value))
    return rounded(value) if isinstance(value, float) else plain(str(value))
