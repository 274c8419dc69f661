"""The card of a model, README.md: what people write, and between it places that are filled from files beside it.

    <!-- card: results -->
    (written by `fill`)
    <!-- end -->

A figure stands in a place, and a place only knows files: configuration, weights, results of the metrics (JSON),
benchmarks (JSON of scripts/bench), training.yaml and training_log.jsonl (config.yaml and metrics.jsonl of a run of
`hf-longctx train`). In model_card.md the places are empty; `lint` refuses a figure outside of a place.
"""

import inspect
import json
import math
import re
from functools import cached_property
from pathlib import Path

import yaml
from huggingface_hub import ModelCard

from ..fox.checkpoint_files import open_safetensors
from ..metrics import ForgettingCurve, RopeReport, read_result
from ..metrics.report.card import eval_results, plain
from ..metrics.result import Result, rounded
from .bundle import PACKAGE_CODE, TRAINING, Bundle, is_benchmark, with_contents


CARD = "README.md"
TEMPLATE = Path(__file__).with_name("model_card.md")
END = "<!-- end -->"
MARK = re.compile(rf"<!-- card: .*?-->|{END}")
PLACE = re.compile(r"(<!-- card: (\w+)((?: (?!--)\S+)*) -->)(.*?)(<!-- end -->)", re.DOTALL)
LOADING = re.compile(r"<!-- card: loading(?: ([^\s-]\S*))?(?: ([^\s-]\S*))? -->")
UPSTREAM = "[More Information Needed]"  # in the templates of huggingface_hub, which PEFT and transformers write
EMBEDDINGS = re.compile(r"(embed_tokens|wte|wpe|embed_in|embed_out|lm_head)\.weight$")
PIPELINES = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
}
SETTINGS = (
    *("recipe", "preset", "construction", "sequence_length", "batch_tokens", "steps", "learning_rate", "schedule"),
    *("warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "dtype", "repeated_rows"),
    *("decay_time", "rope_base", "lora_rank", "lora_alpha", "seed"),
)


def with_card(bundle: Bundle, repo: str | None = None, tag: str | None = None) -> Bundle:
    """The bundle of a model with its card: the folder's, its places filled, or a new one from the template.

    A new one takes the place of none, and of the templates that PEFT and transformers leave beside weights.

    Args:
        repo: NAMESPACE/NAME that the loading lines name. Default: what the card's place `loading` says.
        tag: revision that they pin, if `repo` is given.

    Raises:
        ValueError: a place does not exist, or lacks its file; the head of the card is no YAML.
    """
    text = bundle.text(CARD) if CARD in bundle.files else ""
    if not text.strip() or UPSTREAM in text:
        name = repo.partition("/")[2] if repo else "NAME"
        text = TEMPLATE.read_text(encoding="utf-8").replace("NAME", name)
    if repo is not None:
        place = f"<!-- card: loading {repo} {tag} -->" if tag else f"<!-- card: loading {repo} -->"
        text = LOADING.sub(place, text)
    return with_contents(bundle, {CARD: fill(bundle, text).encode()})


def fill(bundle: Bundle, text: str) -> str:
    """A card with its places and its head as the files of the bundle have it; without places, the text as it is."""
    if "<!-- card: " not in text:
        return text
    check_ends(text)
    card = Card(bundle)

    def place(match):
        begin, name, arguments, _, end = match.groups()
        if name not in PLACES:
            raise ValueError(f"{CARD} has a place {name!r}; the places are {', '.join(PLACES)}.")
        try:
            inspect.signature(PLACES[name]).bind(card, *arguments.split())
        except TypeError as error:
            raise ValueError(f"{begin} in {CARD}: {error}.") from error
        content = PLACES[name](card, *arguments.split())
        return f"{begin}{content}{end}" if name in INLINE else f"{begin}\n{content}\n{end}"

    text = PLACE.sub(place, text)
    return with_head(card, text) if bundle.config else text


def check_ends(text):
    """ValueError for a place without an end, which would reach to the end of the next one."""
    marks = iter(MARK.findall(text))
    for begin in marks:
        if begin == END or next(marks, None) != END:
            raise ValueError(f"{CARD} has {begin} alone; a place is <!-- card: NAME --> and, before the next, {END}.")


def with_head(card, text):
    """The card with what follows from the files in its metadata: library, task, base, model-index."""
    bundle, page = card.bundle, read_card(text)
    page.data.library_name = "peft" if bundle.is_adapter else "transformers"
    page.data.pipeline_tag = PIPELINES.get(bundle.auto_class.replace("Peft", ""), page.data.pipeline_tag)
    if bundle.base is not None:
        page.data.base_model = bundle.base[0]
        page.data.base_model_relation = "adapter" if bundle.is_adapter else "finetune"
    page.data.tags = page.data.tags or [bundle.config.get("model_type", "lora"), "long-context"]
    repo, revision = repo_of(text)
    entries = eval_results(list(card.results.values()))
    for entry in entries if repo else ():
        entry.source_name = "the results, as JSON"
        entry.source_url = f"https://huggingface.co/{repo}/tree/{revision or 'main'}"
    page.data.eval_results = entries or None
    page.data.model_name = (page.data.model_name or (repo or "a model").rpartition("/")[2]) if entries else None
    return str(page)


def read_card(text: str) -> ModelCard:
    """
    Raises:
        ValueError: its head is no YAML, or has a model-index that the Hub does not read.
    """
    try:
        return ModelCard(text)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"the head of {CARD} cannot be read: {' '.join(str(error).split())}") from error


def repo_of(text: str) -> tuple[str | None, str | None]:
    """Repository and revision that the loading lines of a card name."""
    match = LOADING.search(text)
    return (match[1], match[2]) if match else (None, None)


class Card:
    """What the files of a bundle say.

    Attributes:
        results, benchmarks: by the name of their file.
        training: the settings of the training, {} if they are not there.
        log: rows of the training's log.
    """

    def __init__(self, bundle: Bundle):
        self.bundle = bundle
        backbone = bundle.config.get("backbone_config") or {}
        self.model = backbone or bundle.config  # the part with layers
        self.names = [name for name in bundle.files if name.endswith(".json") and "/" not in name]

    @cached_property
    def results(self) -> dict[str, Result]:
        results = {}
        for name in sorted(self.names):
            path = self.bundle.files[name]
            if isinstance(path, Path):
                try:
                    results[name] = read_result(path)
                except ValueError:
                    continue
        return results

    @cached_property
    def benchmarks(self) -> dict[str, dict]:
        paths = {name: self.bundle.files[name] for name in sorted(self.names)}
        return {n: json.loads(p.read_text()) for n, p in paths.items() if isinstance(p, Path) and is_benchmark(p)}

    @cached_property
    def training(self) -> dict:
        settings = self.read("training.yaml") if "training.yaml" in self.bundle.files else {}
        if not isinstance(settings, dict):
            raise ValueError("training.yaml holds no settings; it must have lines such as `steps: 1000`.")
        return settings

    @cached_property
    def log(self) -> list[dict]:
        rows = self.read("training_log.jsonl") if "training_log.jsonl" in self.bundle.files else []
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError(
                'training_log.jsonl has a line that is no object; it must have lines such as {"step": 1}.'
            )
        return rows

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Numbers in each tensor of the weights, by its name."""
        sizes = {}
        for path in (path for name, path in self.bundle.files.items() if name.endswith(".safetensors")):
            with open_safetensors(path) as tensors:
                names = list(tensors.keys())
                sizes |= {name: math.prod(tensors.get_slice(name).get_shape()) for name in names}
        return sizes

    def read(self, name: str):
        """Content of a JSON, YAML or JSONL file of the bundle.

        Raises:
            ValueError: it is not there, or damaged.
        """
        if name not in self.bundle.files:
            raise ValueError(f"{CARD} has a place for {name}, which is not among the files that are pushed.")
        try:
            if name.endswith(".jsonl"):
                return [json.loads(line) for line in self.bundle.text(name).splitlines()]
            return yaml.safe_load(self.bundle.text(name))
        except (json.JSONDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{name} is damaged ({' '.join(str(error).split())}).") from error


# -- The places: functions of a `Card` and of the words in the place, which return Markdown.


def facts(card):
    """What the model is, from its configuration and its weights."""
    config, model = card.bundle.config, card.model
    embeddings = sum(size for name, size in card.sizes.items() if EMBEDDINGS.search(name))
    rows = {
        "class": ", ".join(config.get("architectures") or []),
        "base": "" if card.bundle.base is None else at(*card.bundle.base),
        "parameters": f"{sum(card.sizes.values()):,}, of which {embeddings:,} are embeddings",
        "weights": config.get("dtype"),
    }
    if "r" in config:
        rows |= {"LoRA": f"rank {config['r']}, alpha {config.get('lora_alpha')}"}
        rows |= {
            "adapted": listed(config.get("target_modules")),
            "trained in full": listed(config.get("modules_to_save")),
        }
    if "hidden_size" in model:
        heads, kv = model.get("num_attention_heads"), model.get("num_key_value_heads")
        rows["layers"] = f"{model.get('num_hidden_layers')} of width {model['hidden_size']}"
        rows["heads"] = f"{heads} for queries, {kv or heads} for keys and values"
        rows["vocabulary"] = f"{shown(model.get('vocab_size'))} tokens"
        rows["positions"] = positions(model)
    if config.get("model_type") == "hmt":
        kept = "all" if config.get("memory_size") is None else config["memory_size"]
        rows["memory"] = (
            f"segments of {config['segment_length']} tokens and the {config['sensory_tokens']} before them; {kept} "
            f"memory embeddings are kept; recall: {config['recall_mode'] if config['recall'] else 'none'}"
        )
    return table(("", ""), [(name, plain(str(value))) for name, value in rows.items() if value])


def positions(model):
    """How a model tells positions apart, in words."""
    rope = model.get("rope_parameters") or {}
    if rope.get("rope_theta"):
        scaling = "" if rope.get("rope_type", "default") == "default" else f", {rope['rope_type']} scaling"
        return f"RoPE of base {rope['rope_theta']:g}{scaling}"
    return "none but the forget gates" if model.get("model_type") == "fox" and not rope else ""


def context(card):
    """Claimed, trained and measured context, one below the other."""
    rows, config = [], card.bundle.config
    source = "adapter_config.json" if card.bundle.is_adapter else "config.json"
    claimed = config.get("max_position_embeddings")
    if config.get("model_type") == "hmt":
        rows.append(("claimed", "any length", "segment by segment", link(source)))
    elif claimed is not None:
        rows.append(("claimed", f"{claimed:,} tokens", "`max_position_embeddings`", link(source)))
    if "sequence_length" in card.training:
        rows.append(("trained", f"{card.training['sequence_length']:,} tokens", "a row", link("training.yaml")))
    for name, result in card.results.items():
        title = "RoPE bound" if isinstance(result, RopeReport) else "measured"
        for row in result.overview():
            notes = "; ".join(filter(None, (row.interval, row.sample)))
            rows.append((title, plain(f"{row.name}: {row.value}"), plain(notes), link(name)))
    if not card.bundle.is_adapter and not any(isinstance(result, RopeReport) for result in card.results.values()):
        with_rope = card.model.get("rope_parameters") or card.model.get("rope_theta")
        rows.append(("RoPE bound", "not computed" if with_rope else "none: no RoPE", "", ""))
    return table(("context", "", "", "from"), rows) if rows else "Not measured; see its base."


def results(card):
    """Every result: in a line, in a table by length, and its picture."""
    parts = []
    for name, result in card.results.items():
        columns, rows = result.table()
        parts.append(f"### {result.title}\n\n{plain(result.summary())}. From {link(name)}.")
        parts.append(table(columns, [[plain(str(cell)) for cell in row] for row in rows]))
        parts += [f"![{result.title}]({path})" for path in pictures(card, name)]
        parts += [plain(remark) for remark in result.remarks()]
    return "\n\n".join(parts) or "Nothing was measured."


def pictures(card, name):
    paths = (name.removesuffix(".json") + ending for ending in (".png", ".svg"))
    return [path for path in paths if path in card.bundle.files][:1]


def cost(card):
    """Memory and speed, as scripts/bench measured them."""
    names = [name for name in card.benchmarks if is_cost(card, name)]
    return "\n\n".join(measured(card, name) for name in names) or "Not measured."


def is_cost(card, name):
    return " scripts.bench." in card.benchmarks[name]["command"]


def measured(card, name):
    """The figures of a benchmark, or of another script, with command and machine."""
    if name not in card.benchmarks:
        raise ValueError(
            f"{CARD} has a place for {name}, which is not among the measurements of scripts in the folder."
        )
    benchmark = card.benchmarks[name]
    rows, where = benchmark["rows"], benchmark["machine"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [[plain(shown(row.get(column, ""))) for column in columns] for row in rows]
    threads = f", {where['threads']} thread{'s' * (where['threads'] > 1)}" if "threads" in where else ""
    device, torch = plain(where.get("device", "an unknown machine")), benchmark["versions"].get("torch")
    text = f"`{benchmark['command']}` on {device}{threads}, torch {torch}: {link(name)}."
    return f"{text}\n\n{table([plain(column.replace('_', ' ')) for column in columns], cells)}"


def training(card):
    """How it was trained, from training.yaml and training_log.jsonl."""
    settings = card.training
    unused = ("recipe", "lora_rank", "lora_alpha") if settings.get("full") else ()
    names = [name for name in SETTINGS if name in settings and name not in unused]
    rows = [(name.replace("_", " "), settings[name]) for name in names if settings[name] or name == "seed"]
    if {"steps", "batch_tokens"} <= settings.keys():
        rows.append(("tokens in these steps", f"{settings['steps'] * settings['batch_tokens']:,}"))
    for name in ("loss", "eval_loss"):
        if last := next((row for row in reversed(last_stage(card.log)) if name in row), None):
            rows.append((f"{name.replace('_', ' ')} after step {last['step']}", rounded(float(last[name]))))
    files = [name for name in TRAINING if name in card.bundle.files]
    if not rows:
        return "Its settings are not beside it."
    return f"From {', '.join(map(link, files))}.\n\n{table(('', ''), [(n, plain(str(v))) for n, v in rows])}"


def last_stage(log):
    """Rows of the last of several trainings, each of which counts its steps anew."""
    log = [row for row in log if "step" in row]
    begins = [i for i in range(1, len(log)) if log[i]["step"] < log[i - 1]["step"]]
    return log[begins[-1] if begins else 0 :]


def loading(card, repo="NAMESPACE/NAME", revision=None):
    """Python that loads it, pinned."""
    bundle = card.bundle
    imports, call = loading_lines(bundle, repo, revision).split("\n")
    calls = [f"model = {call}"]
    if any(name.startswith("tokenizer") for name in bundle.files):
        imports += "\nfrom transformers import AutoTokenizer" if bundle.is_adapter else ", AutoTokenizer"
        pin = f', revision="{revision}"' if revision else ""
        calls.append(f'tokenizer = AutoTokenizer.from_pretrained("{repo}"{pin})')
    lines = "\n".join([imports, "", *calls])
    parts = [f"```python\n{lines}\n```"]
    if bundle.has_code:
        whose = "the base model's repository" if bundle.base_has_code else "this repository"
        parts.append(f"`trust_remote_code=True` runs the Python files of {whose}.")
    code = {name for name in bundle.files if name.endswith(".py")}
    if code and code <= PACKAGE_CODE.keys():
        parts[-1] += (
            " They are those of the package hf-longctx; with `import hf_longctx` instead, none of them is run."
        )
    if not revision:
        parts.append("Without a `revision`, other weights and other code may be loaded tomorrow: give a commit.")
    parts.append("[hf_longctx.json](hf_longctx.json) has the sha256 of every file.")
    return "\n\n".join(parts)


def loading_lines(bundle: Bundle, repo: str, revision: str | None) -> str:
    """Python that loads what was pushed: this revision and no other, its code included."""
    options = f', revision="{revision}"' if revision else ""
    options += ", trust_remote_code=True" if bundle.has_code else ""
    library, name = "peft" if bundle.is_adapter else "transformers", bundle.auto_class
    return f'from {library} import {name}\n{name}.from_pretrained("{repo}"{options})'


def limits(card):
    """What follows from the configuration, and from what was measured."""
    config, lines = card.bundle.config, []
    if config.get("model_type") == "hmt" and config["recall"]:
        if config["recall_mode"] == "paper":
            ahead = round(config["segment_length"] * config["sum_fraction"])
            lines.append(
                f'**It looks ahead** (`recall_mode="paper"`): the first {ahead} tokens of a segment are read before they are '
                "predicted, so its losses cannot be compared with those of a causal model."
            )
        else:
            lines.append(f'Its logits depend on no later token (`recall_mode="{config["recall_mode"]}"`).')
    claimed, trained = config.get("max_position_embeddings"), card.training.get("sequence_length")
    if trained and claimed and claimed > trained:
        lines.append(f"It claims {claimed:,} tokens and was trained on rows of {trained:,}.")
    if any(isinstance(result, ForgettingCurve) for result in card.results.values()):
        lines.append("That it copies a text shows that the text is remembered, not that it would be used.")
    if not card.results and all(is_cost(card, name) for name in card.benchmarks):
        lines.append("How far it remembers was not measured.")
    if card.bundle.has_code:
        lines.append("It needs code from outside of transformers.")
    return "\n".join(f"- {line}" for line in lines)


def provenance(card):
    """Where each file of figures is from."""
    rows = []
    for name in [*card.results, *card.benchmarks]:
        document = card.read(name)
        saved, settings = document.get("saved", {}), document.get("settings", {})
        day = (saved.get("time") or "")[:10]
        seed = settings.get("seed", "") if isinstance(settings, dict) else ""
        rows.append((link(name), day, saved.get("commit") or document.get("commit") or "", seed))
    text = "[hf_longctx.json](hf_longctx.json): versions and commit of the package that pushed these files."
    if rows:
        text += "\n\n" + table(("figures", "measured", "commit of hf-longctx", "seed"), rows)
    return text


def value(card, name, path):
    """One figure of a file, in a line of prose: `training.yaml steps`, `curve.json intervals_95.coarse.low`."""
    entry = card.read(name)
    for key in path.split("."):
        try:
            entry = entry[int(key)] if isinstance(entry, list) else entry[key]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(f"{name} has no {path}, for which {CARD} has a place.") from error
    return shown(entry)


def parameters(card):
    """How many, in a line of prose."""
    return f"{sum(card.sizes.values()) / 1e6:.3g} million"


PLACES = {
    function.__name__: function
    for function in (facts, context, loading, results, cost, measured, training, limits, provenance, value, parameters)
}
INLINE = ("value", "parameters")


def table(columns, rows):
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def link(name):
    return f"[{name}]({name})"


def at(name, revision):
    return f"{name} at {revision}" if revision else f"{name}, at no fixed commit"


def listed(names):
    return ", ".join(sorted(names)) if isinstance(names, list) else names


def shown(value):
    return f"{value:,}" if type(value) is int else rounded(value) if isinstance(value, float) else str(value)
