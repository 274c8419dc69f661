"""Check a bundle for secrets, local paths and errors in the card before it is pushed.

The Hub makes some of these checks too, but only after the repository has been created. We find secrets and paths by
regular expressions. A secret in an unknown format remains undetected.
"""

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from huggingface_hub import EvalResult, ModelCardData, get_token
from huggingface_hub.dataclasses import type_validator
from huggingface_hub.utils import validate_repo_id

from .bundle import Bundle
from .card import CARD, model_index, read_card


# Identifiers of the licenses that the Hub accepts.
LICENSES = Path(__file__).with_name("licenses.txt").read_text().split()
# The text tasks (`pipeline_tag`) that the Hub defines.
TASKS = [
    "feature-extraction", "fill-mask", "multiple-choice", "question-answering", "sentence-similarity", "summarization",
    "table-question-answering", "text-classification", "text-generation", "text-ranking", "text2text-generation",
    "token-classification", "translation", "zero-shot-classification",
]  # fmt: skip
LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z0-9]{2,8})*|multilingual|code")
# BINARY files are not searched. Vocabularies, chat templates and code (ANY_PATH) may contain paths.
BINARY = (".png", ".model")
ANY_PATH = re.compile(r"(tokenizer\.|vocab|added_tokens|special_tokens_map|chat_template|merges).*|.*\.py")
# Access tokens, API keys and passwords.
SECRET = re.compile(
    r"""(?<![A-Za-z0-9])(?:
    hf_[A-Za-z0-9]{30,} | gh[pousr]_[A-Za-z0-9]{30,} | github_pat_\w{40,} | glpat-[\w-]{20,}
    | xox[abeoprs]-[\w-]{20,} | AIza[\w-]{35} | A[KS]IA[A-Z0-9]{16} | sk-[\w-]{32,} | pypi-[\w-]{50,}
    | npm_[A-Za-z0-9]{36} )
    | (?<![\w-])eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}
    | -----BEGIN\ (?:[A-Z]+\ ){0,2}PRIVATE\ KEY
    | ://[^\s/:@]{1,64}:[^\s/@]{1,64}@
    | (?:KEY|TOKEN|SECRET|PASSWORD|(?i:api_?key|secret|password|(?:access|auth)_?token))
      ["']?\s{0,3}[=:]\s{0,3}["']?(?=[^\s"']{0,64}\d)[\w/+.-]{16,}""",
    re.VERBOSE,
)
MACHINE = re.compile(
    r"""(?<![\w.:/~\\-])(?:
    /(?:home|Users|Volumes|root|mnt|media|[gp]?scratch|work|workspace|data|projects?|storage|shared?|private|tmp
    |gpfs|lustre|nfs|fsx|raid|export|content|kaggle|dbfs|var|opt|srv)\d*/
    | ~/(?!\.) | [A-Z]:[\\/]+(?=\w) | \\{2,4}[\w.-]+\\{1,2}(?=\w) | file://
    )[^\s"'`)<>,]+""",
    re.VERBOSE,
)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
# An unclosed comment extends to the end of the card. Without this rule, the search would take quadratic time.
COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|\b(?:src|href)=["']([^"']+)["']""")
TODO = re.compile(r"<!-- (Write\b(?:(?!<!--|-->).)*) -->", re.DOTALL)


def check(bundle: Bundle) -> None:
    """Raise ValueError with a list of all access tokens, local paths and errors in the card."""
    errors = []
    secret = get_token()
    for path, content in sorted(bundle.files.items()):
        if path.endswith(BINARY):
            continue
        if path.endswith(".safetensors") and isinstance(content, Path):
            with content.open("rb") as file:  # only the header, with metadata and tensor names
                text = file.read(int.from_bytes(file.read(8), "little")).decode(errors="replace")
        else:
            text = bundle.text(path, errors="replace")
        if SECRET.search(text) or (secret and secret in text):
            errors.append(f"{path} contains a token or key: remove it, and revoke it if it was ever published")
        if path == "tokenizer_config.json":  # the chat template may contain any path
            text = json.dumps({**json.loads(text), "chat_template": None})
        if not ANY_PATH.fullmatch(path) and (where := MACHINE.search(text)):
            errors.append(f"{path} contains the local path {where[0]}: replace it by a name that others can use")
    if CARD in bundle.files:
        errors += [f"{CARD}: {error}" for error in card_errors(bundle, bundle.text(CARD))]
    if errors:
        raise ValueError(f"The files cannot be pushed. {'. '.join(errors)}.")


def missing_fields(bundle: Bundle) -> list[str]:
    """List what is missing from the card: license, language, hand-written sections, or the base model's commit."""
    if CARD not in bundle.files:
        return [f"there is no {CARD}"]
    text = bundle.text(CARD)
    data = read_card(text).data
    fields = ("license", "language") if bundle.config else ("license",)
    missing = [f"the metadata lacks `{name}`" for name in fields if not data.get(name)]
    missing += [" ".join(hint.split()) for hint in TODO.findall(text)]
    if bundle.base is not None and not bundle.base[1]:
        missing.append(f"the base model {bundle.base[0]} is not pinned to a commit")
    return [f"{CARD}: {line}" for line in missing]


def card_errors(bundle: Bundle, text: str) -> Iterator[str]:
    """Yield a message for each error in a card's metadata, license, task, base model, model-index and links."""
    data = read_card(text).data
    yield from schema_errors(data)
    names = data.get("license") or []
    for name in names if isinstance(names, list) else [names]:
        if name not in LICENSES:
            yield (
                f"`license` must be a license that the Hub lists, got {name!r}. For another license, give other and a "
                "`license_name`"
            )
        if name == "other" and not data.get("license_name"):
            yield "`license_name` is missing, although `license` is other"
    if bundle.config and data.get("pipeline_tag") not in (None, *TASKS):
        yield f"`pipeline_tag` must be a text task (such as text-generation), got {data['pipeline_tag']!r}"
    for field in ("base_model", "datasets"):
        for name in [data.get(field)] if isinstance(data.get(field), str) else data.get(field) or ():
            try:
                validate_repo_id(name)
            except ValueError:
                yield f"`{field}` must be a name on the Hub, got {name!r}"
    if bundle.base is not None and data.get("base_model") not in (None, bundle.base[0], [bundle.base[0]]):
        yield f"`base_model` is {data['base_model']}, but the config names {bundle.base[0]}"
    figures = {(entry.dataset_name, entry.metric_name): entry.metric_value for entry in model_index(bundle)}
    for entry in data.get("eval_results") or ():
        figure = figures.get((entry.dataset_name, entry.metric_name), entry.metric_value)
        if figure != entry.metric_value:
            yield f"{entry.metric_name} is {entry.metric_value} in model-index, but {figure} in the result file"
    for match in LINK.finditer(COMMENT.sub("", CODE.sub("", text))):
        target = (match[1] or match[2]).partition("#")[0].partition("?")[0]
        if target and not re.match(r"[a-z]+:", target) and posixpath.normpath(target) not in bundle.files:
            yield f"it links to {target}, but this file is not pushed"


def schema_errors(data: Any) -> Iterator[str]:
    """Yield a message for each metadata field whose type differs from huggingface_hub's type annotation."""
    results = [("model-index", EvalResult, entry) for entry in data.eval_results or ()]
    for place, kind, values in [("its metadata", ModelCardData.__init__, data), *results]:
        for name, hint in get_type_hints(kind).items():
            try:
                if name not in ("license", "eval_results", "ignore_metadata_errors"):
                    type_validator(name, getattr(values, name, None), hint)
            except TypeError:
                shown = str(hint).removeprefix("<class '").removesuffix("'>")
                yield f"`{name}` in {place} is {getattr(values, name)!r}; the Hub expects {shown}"
    languages = [data.language] if isinstance(data.language, str) else data.language or ()
    for language in languages:
        if isinstance(language, str) and not LANGUAGE.fullmatch(language):
            yield f"`language` must be an ISO 639 code (such as en), multilingual or code, got {language!r}"
