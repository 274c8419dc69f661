"""What is wrong with a bundle before it is pushed, beyond what the Hub checks itself: cards, secrets, paths.

The Hub validates the YAML of a card. That a licence exists, that a link leads somewhere, that a figure is that of its
file, and that no token or path of a machine is published, is looked at here.
"""

import ast
import posixpath
import re
from pathlib import Path

import yaml
from huggingface_hub import get_token, parse_eval_result_entries

from ..metrics.report.card import eval_results
from .bundle import EVALUATIONS, Bundle
from .card import CARD, PLACE, UPSTREAM, Card, fill, read_card


# As the Hub lists them when it refuses another one.
LICENSES = Path(__file__).with_name("licenses.txt").read_text().split()
TASKS = {
    *(
        "feature-extraction",
        "fill-mask",
        "multiple-choice",
        "question-answering",
        "sentence-similarity",
        "summarization",
    ),
    *("table-question-answering", "text-classification", "text-generation", "text-ranking", "text2text-generation"),
    *("token-classification", "translation", "zero-shot-classification"),
}  # of text, at the Hub
# Text, but for vocabularies, which may hold anything.
TEXTS = re.compile(
    r"(?!tokenizer\.|vocab|added_tokens|special_tokens_map)(LICENSE.*|.*\.(md|json|jsonl|ya?ml|txt|py|svg|jinja|toml|nix))"
)
SECRET = re.compile(r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[A-Z0-9]{16})\b")
MACHINE = re.compile(
    r"(?<![\w.:/-])(/(home|Users|root|mnt|scratch|work|workspace)/|[A-Z]:\\+Users\\|file://)[^\s\"'`)<>,]+"
)
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
LINK = re.compile(r"""\]\(\s*<?([^)\s>]+)|\b(?:src|href)=["']([^"']+)["']""")
ADDRESS = re.compile(r"\[[^\]]*\]\([^)]*\)|<?https?://\S+|<[^>]+>")
FIGURE = re.compile(r"(?<![\w.-])\d[\d.,]*")
TODO = re.compile(r"<!-- Write: (.*?) -->", re.DOTALL)
LOADERS = ("from_pretrained", "load", "load_dataset", "pipeline", "get_kernel", "snapshot_download", "hf_hub_download")


def problems(bundle: Bundle) -> list[str]:
    """What must not be pushed, in sentences: tokens, paths of this machine, a card that says what its files do not.

    Raises:
        ValueError: the card cannot be read at all, or has a place without its file.
    """
    lines = [*leaks(bundle), *evaluation_problems(bundle)]
    if CARD in bundle.files:
        text = bundle.text(CARD)
        lines += [f"{CARD}: {line}" for line in (*head_problems(bundle, text), *link_problems(bundle, text))]
        lines += [f"{CARD}: {line}" for line in (*code_problems(text), *figure_problems(bundle, text))]
    return lines


def gaps(bundle: Bundle) -> list[str]:
    """What a good card has and this one lacks, in sentences."""
    if CARD not in bundle.files:
        return [f"there is no {CARD}"]
    text = bundle.text(CARD)
    data, lines = read_card(text).data, []
    fields = ("license", "language", "library_name", "pipeline_tag", "tags") if bundle.config else ("license",)
    lines += [f"its head lacks `{name}`" for name in fields if not data.get(name)]
    lines += [f"still to write: {' '.join(hint.split())}" for hint in TODO.findall(text)]
    if UPSTREAM in text:
        lines.append(f"it still says {UPSTREAM}")
    card = Card(bundle)
    base = str(card.training.get("model", ""))
    if re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not data.get("base_model"):
        lines.append(f"its head lacks `base_model`; training.yaml names {base}")
    if bundle.config and eval_results([*card.results.values()]) and not data.get("eval_results"):
        lines.append("its head lacks `model-index`, and there are results")
    if bundle.base is not None and not bundle.base[1]:
        lines.append(f"the base {bundle.base[0]} is at no fixed commit")
    for call, name in loads(text):
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        pin = keywords.get("revision", keywords.get("version"))
        if pin is None or (isinstance(pin, ast.Constant) and pin.value in (None, "main")):
            lines.append(f"it loads {name} without a revision, in {ast.unparse(call)}")
    return [f"{CARD}: {line}" for line in lines]


def check(bundle: Bundle) -> None:
    """ValueError with all problems of a bundle."""
    if lines := problems(bundle):
        raise ValueError(f"this cannot be pushed. {'. '.join(lines)}.")


def leaks(bundle):
    """Tokens, and paths of this machine, in the text files."""
    secret = get_token()
    for path in sorted(bundle.files):
        if not TEXTS.fullmatch(posixpath.basename(path)):
            continue
        text = bundle.text(path)
        if SECRET.search(text) or (secret and secret in text):
            yield f"{path} holds a token or key; remove it, and revoke it if it was ever published"
        where = None if path.endswith(".py") else MACHINE.search(text)
        if where:
            yield f"{path} names {where[0]}, a path of one machine; write a name that others can use"


def evaluation_problems(bundle):
    """Results on registered benchmarks that the Hub would not read."""
    for path in (path for path in bundle.files if path.startswith(f"{EVALUATIONS}/")):
        try:
            entries = parse_eval_result_entries(yaml.safe_load(bundle.text(path)))
            if not entries:
                yield f"{path} has no entry"
        except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
            yield f"{path} is no list of results as the Hub reads them ({type(error).__name__}: {error})"


def head_problems(bundle, text):
    """Licence, task, base model and model-index."""
    data = read_card(text).data
    names = data.get("license") or []
    for name in names if isinstance(names, list) else [names]:
        if name not in LICENSES:
            yield f"license {name!r} is none that the Hub knows, such as apache-2.0; of your own: other, with license_name"
        if name == "other" and not data.get("license_name"):
            yield "license is other, and license_name does not say which"
    if bundle.config and data.get("pipeline_tag") not in (None, *TASKS):
        yield f"pipeline_tag {data['pipeline_tag']!r} is no task of a model of text, such as text-generation"
    if bundle.base is not None and data.get("base_model") not in (None, bundle.base[0], [bundle.base[0]]):
        yield f"base_model is {data['base_model']}, and the configuration names {bundle.base[0]}"
    if bundle.config:
        figures = {
            (e.dataset_name, e.metric_name): e.metric_value for e in eval_results([*Card(bundle).results.values()])
        }
        for entry in data.get("eval_results") or ():
            figure = figures.get((entry.dataset_name, entry.metric_name), entry.metric_value)
            if figure != entry.metric_value:
                yield f"model-index has {entry.metric_value} as {entry.metric_name}, and the result file {figure}"


def link_problems(bundle, text):
    for match in LINK.finditer(COMMENT.sub("", CODE.sub("", text))):
        target = (match[1] or match[2]).partition("#")[0].partition("?")[0]
        if target and not re.match(r"[a-z]+:", target) and posixpath.normpath(target) not in bundle.files:
            yield f"it links to {target}, which is not among the files that are pushed"


def code_problems(text):
    for block in PYTHON.findall(text):
        try:
            ast.parse(block)
        except SyntaxError as error:
            yield f"its Python does not parse: {error.msg} in {(error.text or '').strip()!r}"


def loads(text):
    """(call, repository) of every call in the Python of a card that loads something from the Hub by name."""
    for block in PYTHON.findall(text):
        try:
            calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        except SyntaxError:  # one of the problems
            continue
        for call in calls:
            name = getattr(call.func, "attr", getattr(call.func, "id", None))
            strings = [x.value for x in call.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            repos = [x for x in strings if re.fullmatch(r"[\w.-]+/[\w.-]+", x)]
            if name in LOADERS and repos:
                yield call, repos[0]


def figure_problems(bundle, text):
    """Of a card with places: places that are not what their files say, and figures outside of them."""
    if not PLACE.search(text):
        return
    if fill(bundle, text) != text:
        yield "its places are not what their files say; run `hf-longctx card`"
    body = read_card(PLACE.sub("", text)).text
    for line in ADDRESS.sub("", COMMENT.sub("", CODE.sub("", body))).splitlines():
        line = re.sub(r"^\s*\d+\. ", "", line)
        if figure := FIGURE.search(line):
            yield f"{figure[0]} in {line.strip()!r} comes from no file; write <!-- card: value FILE KEY --><!-- end -->"
