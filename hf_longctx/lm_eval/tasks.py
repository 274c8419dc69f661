"""Run every `Task` in lm-eval: one task class, one request type, and a reader for lm-eval's models.

A YAML file names a task by what it measures: `class: !function hf_longctx.lm_eval.tasks.forgetting_curve`.
`--metadata '{"lengths": [64, 128], "repeats": 3}'` sets the task's options. A document is a share of the trials, so
lm-eval's processes divide the trials among them. The metrics aggregate all documents and come with our own intervals
instead of lm-eval's standard errors.

A `LocalReader` reads a PyTorch model. Other models (vllm, completions endpoints) only report the log-probability of a
continuation and whether it is greedy. We then count right tokens by bisection, in 1 + about 2 e log2(k/e) requests for
e errors among k tokens, and report losses as block means.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

import datasets
import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM, hash_args
from lm_eval.api.task import ConfigurableTask
from torch import nn
from tqdm import tqdm

from ..corpus import load_tokens
from ..metrics import tasks  # noqa: F401 - registers them
from ..metrics.run.reader import LocalReader, Reader
from ..metrics.run.runner import first_ids, measure_one, scores_of
from ..metrics.task import Missing, Subject, Task, as_key, options


DOCUMENTS = 8  # number of shares that the trials are split into
BLOCKS = 8  # blocks per sequence whose mean losses are requested from models that only score continuations
ANOTHER = -2  # stands for an id that a model does not report


def __getattr__(name: str) -> type[TaskInLmEval]:
    """Return the lm-eval task class that measures `name`."""
    for task in Task.tasks.values():
        if task.result.kind == name:
            return type(name, (TaskInLmEval,), {"task": task})
    raise AttributeError(name)


class TaskInLmEval(ConfigurableTask):
    """An lm-eval task that wraps `task`.

    Attributes:
        settings: the default options, updated with `--metadata`.
    """

    task: type[Task]

    def __init__(self, config: dict[str, Any] | None = None):
        config = config or {}
        given = config.get("metadata") or {}
        known = {entry.name: entry.default for entry in options(self.task)} | {"documents": DOCUMENTS, "text": None}
        for name in given.keys() - known.keys():  # lm-eval adds the model arguments to the metadata
            meant = get_close_matches(name, known, n=1, cutoff=0.8)
            if meant:
                raise ValueError(f"--metadata has {name}; did you mean {meant[0]}? Known: {', '.join(known)}.")
        self.settings = {name: given.get(name, default) for name, default in known.items()}
        self.settings["context"] = given.get("max_length")
        task_of(self.task, self.settings)  # raises for invalid options
        if self.settings.get("protocol") == "adaptive":
            raise ValueError(
                "protocol must be reference in lm-eval, which sends all requests in one round, got adaptive."
            )
        names = {"task": config.get("task"), "num_fewshot": 0, "output_type": "loglikelihood"}
        super().__init__(config=names | {"metadata": {"version": 2, **self.settings}})
        self.OUTPUT_TYPE = "trial_scores"  # lm-eval balances the requests of this type across processes

    def download(self, *args, **kwargs) -> None:
        rows = [{"share": share} for share in range(self.settings["documents"])]
        self.dataset = {"test": datasets.Dataset.from_list(rows)}

    def has_training_docs(self) -> bool:
        return False

    has_validation_docs = has_training_docs

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self):
        return self.dataset["test"]

    def doc_to_text(self, doc, doc_to_text=None) -> str:
        return ""

    doc_to_target = doc_to_text

    def fewshot_context(self, doc, *args, **kwargs) -> str:
        return ""

    def build_all_requests(self, **kwargs) -> None:
        # lm-eval's request cache ignores settings, and building these requests takes no time
        super().build_all_requests(**kwargs | {"cache_requests": False})

    def construct_requests(self, doc, ctx, *, metadata=None, **kwargs) -> list[Instance]:
        arguments = self.task.name, json.dumps(self.settings, sort_keys=True), doc["share"]
        return [Instance("trial_scores", doc, arguments, 0, metadata)]

    def process_results(self, doc, results) -> dict[str, dict]:
        scores = {as_key(key): score for key, score in results[0]}
        return dict.fromkeys(self.numbers([scores]), scores)

    def numbers(self, documents: list[dict]) -> dict[str, float]:
        """Return the numbers of some documents and the bounds of their intervals, under names for lm-eval's tables."""
        task = task_of(self.task, self.settings)
        scores = scores_of({key: score for document in documents for key, score in document.items()})
        missing = {key: str(score) for key, score in scores.items() if isinstance(score, Missing)}
        scores, _ = task.summarize({key: score for key, score in scores.items() if key not in missing}, missing)
        named: dict[str, float] = {}
        result = self.task.result(scores)
        if len(documents) > 1:  # overlaps within a single share are not informative
            warn_once(getattr(result, "shortage", ""))
        for number in result.numbers():
            name = re.sub(r"\W+", "_", number.name).strip("_")
            ends = {"": number.value, "_low": number.low, "_high": number.high}
            named.update({name + end: math.nan if value is None else float(value) for end, value in ends.items()})
        return named

    def aggregation(self) -> Named:
        return Named(lambda name: lambda documents: self.numbers(documents)[name])

    def higher_is_better(self) -> Named:
        return Named(lambda name: not re.search("loss|perplexity", name))


class Named(dict):
    """A dictionary that computes the value of any missing name."""

    def __init__(self, value: Callable[[str], Any]):
        super().__init__()
        self.value = value

    def __missing__(self, name: str) -> Any:
        return self.value(name)


@cache
def warn_once(text: str) -> None:
    """Log a warning once, although lm-eval aggregates each number separately."""
    if text:
        logging.getLogger(__name__).warning(text.removeprefix("; "))


def task_of(task: type[Task], settings: dict[str, Any]) -> Task:
    """Return the task with those settings that are options of it."""
    return task(**{entry.name: settings[entry.name] for entry in options(task)})


def trial_scores(lm: Any, requests: list[Instance], disable_tqdm: bool = False) -> list[list]:
    """Answer requests like a method of an lm-eval model: return the scores of a share of a task's trials."""
    known = {} if lm.cache_hook.dbdict is None else lm.cache_hook.dbdict
    prepared: dict[tuple[str, str], Task] = {}
    bar, replies = tqdm(total=len(requests), desc="trials", disable=disable_tqdm or lm.rank > 0), []
    for request in requests:
        name, settings, share = request.args
        key = hash_args("trial_scores", request.args)
        if key not in known:
            if (name, settings) not in prepared:
                prepared[name, settings] = prepare(lm, name, json.loads(settings))
            task = prepared[name, settings]
            trials = task.trials({})
            with task.subject.reader.reading(first_ids(task.requests(trials[0].key)[0]), None):
                mine = trials[share :: json.loads(settings)["documents"]]
                # written only once complete, so a killed run resumes after it
                known[key] = [(trial.key, measure_one(task, trial)) for trial in mine]
        replies.append(known[key])
        bar.update()
    return replies


TemplateLM.trial_scores = trial_scores


def prepare(lm: Any, name: str, settings: dict[str, Any]) -> Task:
    """Return a task that is prepared for an lm-eval model."""
    tokenizer, model = lm.tokenizer, getattr(lm, "model", None)
    if not hasattr(tokenizer, "all_special_ids"):
        raise ValueError(
            f"this task sends token ids, and the model's tokenizer is {tokenizer!r}; give one of transformers: "
            "--model_args tokenizer_backend=huggingface,tokenizer=NAME"
        )
    local = isinstance(model, nn.Module) and getattr(lm, "mixed_precision_dtype", None) is None
    reader: Any = LocalReader(model) if local else SpanReader(lm)
    task = task_of(Task.tasks[name], settings)
    text = load_tokens(tokenizer, settings["text"]).tokens if task.uses_text() else None
    return task.on(Subject(reader, tokenizer, text, context=settings["context"]))


class SpanReader(Reader):
    """A reader for lm-eval models that only score spans of tokens."""

    def __init__(self, lm: Any):
        self.lm, self.vocab_size = lm, len(lm.tokenizer)
        self.position_limit = self.claimed_context = lm.max_length  # lm-eval silently truncates longer inputs

    def settings(self) -> dict[str, Any]:
        return {"model": getattr(self.lm, "model_name", type(self.lm).__name__)}

    def log_probs(self, ids: list[int], spans: list[tuple[int, int]]) -> list[tuple[float, bool]]:
        """Return for each span (a, b) the log-probability of ids[a:b] given ids[:a], and whether all are greedy."""
        requests = [(None, ids[:a], ids[a:b]) for a, b in spans]  # None keeps the request out of lm-eval's cache
        return self.lm._loglikelihood_tokens(requests, disable_tqdm=True)

    def predict(self, inputs: np.ndarray, prefix: int, positions: range) -> np.ndarray:
        predictions, first = np.full((len(inputs), len(positions)), ANOTHER), positions.start + 1
        for row, ids in zip(predictions, inputs.tolist()):
            spans = [(first, positions.stop + 1)]
            while spans:  # each round is one batch
                verdicts, halves = self.log_probs(ids, spans), []
                for (a, b), (_, all_likeliest) in zip(spans, verdicts):
                    if all_likeliest:
                        row[a - first : b - first] = ids[a:b]
                    elif b - a > 1:
                        halves += [(a, (a + b) // 2), ((a + b) // 2, b)]
                spans = halves
        return predictions

    def score(self, ids: np.ndarray, targets: np.ndarray, positions: range) -> tuple[np.ndarray, np.ndarray]:
        """Score targets; in a long span, each target gets the mean of its block."""
        whole, first = [*ids.tolist(), int(targets[-1])], positions.start + 1
        edges = np.linspace(0, len(targets), min(len(targets), BLOCKS) + 1).astype(int).tolist()
        spans = [*pairwise(edges if positions.start == 0 else (0, len(targets)))]
        log_probs, best = np.empty(len(targets)), np.full(len(targets), ANOTHER)
        replies = self.log_probs(whole, [(first + a, first + b) for a, b in spans])
        for (a, b), (log_prob, all_likeliest) in zip(spans, replies):
            log_probs[a:b] = log_prob / (b - a)
            best[a:b] = targets[a:b] if all_likeliest else ANOTHER
        return log_probs, best

    def reply(self, prompt: np.ndarray, tokens: int, tokenizer: Any) -> str:
        generation = {"until": [], "max_gen_toks": tokens, "do_sample": False}
        request = Instance("generate_until", {}, (tokenizer.decode(prompt), generation), 0)
        return self.lm.generate_until([request], disable_tqdm=True)[0]
