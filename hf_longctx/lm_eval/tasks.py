"""Make every `Task` available in lm-eval.

This file defines a task class, a request type, and a `Reader` for lm-eval's models.

Each task has a YAML file that names its class, such as `class: !function hf_longctx.lm_eval.tasks.forgetting_curve`.
`--metadata '{"lengths": [64, 128], "repeats": 3}'` sets the task's options. We split the trials of a task into
documents. lm-eval distributes the documents among its processes. We compute the metrics from the scores of all
documents, and report our own confidence intervals instead of lm-eval's standard errors.

We read lm-eval's PyTorch models, vLLM engines and completions endpoints with our own readers. The counts are therefore
the same as without lm-eval.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM, hash_args
from lm_eval.api.task import ConfigurableTask
from torch import nn
from tqdm import tqdm
from transformers.utils import logging

from ..corpus import load_tokens
from ..metrics import tasks  # noqa: F401 - importing `tasks` registers every Task
from ..metrics.run.prompts import OfflineModel
from ..metrics.run.reader import LocalReader, Reader
from ..metrics.run.runner import batches, first_ids, measure, scores_of
from ..metrics.run.served import ServedModel
from ..metrics.task import Missing, Subject, Task, as_key, options


logger = logging.get_logger(__name__)
DOCUMENTS = 8  # default number of documents into which the trials are split


def __getattr__(name: str) -> type[TaskInLmEval]:
    """Create the lm-eval task class of the metric `name`, for an attribute access such as `tasks.forgetting_curve`."""
    for task in Task.tasks.values():
        if task.result.kind == name:
            return type(name, (TaskInLmEval,), {"task": task})
    raise AttributeError(name)


class TaskInLmEval(ConfigurableTask):
    """A `Task` as an lm-eval task. Each subclass sets `task`.

    Attributes:
        settings: options of the task: the defaults, updated with `--metadata`.
    """

    task: type[Task]

    def __init__(self, config: dict[str, Any] | None = None):
        config = config or {}
        given = config.get("metadata") or {}
        known = {entry.name: entry.default for entry in options(self.task)}
        known |= {"documents": DOCUMENTS, "text": None, "cache": None}
        # lm-eval adds the model arguments to the metadata; we only reject names that resemble an option
        for name in given.keys() - known.keys():
            meant = get_close_matches(name, known, n=1, cutoff=0.8)
            if meant:
                raise ValueError(f"--metadata has {name}; did you mean {meant[0]}? Options: {', '.join(known)}.")
        self.settings = {name: given.get(name, default) for name, default in known.items()}
        self.settings["context"] = given.get("max_length")
        task_of(self.task, self.settings)  # raises ValueError if an option is invalid
        if self.settings.get("protocol") == "adaptive":
            raise ValueError(
                "with lm-eval, protocol must be 'reference', got 'adaptive'. lm-eval sends all requests in one round, "
                "but the adaptive protocol chooses requests based on earlier responses."
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
        """Return the numbers of the result and their confidence bounds, keyed by name.

        Args:
            documents: for each document, the scores of its trials, keyed by trial.
        """
        task = task_of(self.task, self.settings)
        scores = scores_of({key: score for document in documents for key, score in document.items()})
        missing = {key: str(score) for key, score in scores.items() if isinstance(score, Missing)}
        scores, _ = task.summarize({key: score for key, score in scores.items() if key not in missing}, missing)
        named: dict[str, float] = {}
        result = self.task.result(scores, {"cache": self.settings["cache"]})
        shortage = getattr(result, "shortage", "")
        if shortage and len(documents) > 1:  # `process_results` passes one document, and only uses the names
            logger.warning_once(shortage.removeprefix("; "))
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
    """A dictionary that computes the value of a missing key using the function `value`."""

    def __init__(self, value: Callable[[str], Any]):
        super().__init__()
        self.value = value

    def __missing__(self, name: str) -> Any:
        return self.value(name)


def task_of(task: type[Task], settings: dict[str, Any]) -> Task:
    """Create a task from settings. Settings that are not options of the task are ignored."""
    return task(**{entry.name: settings[entry.name] for entry in options(task)})


def trial_scores(lm: Any, requests: list[Instance], disable_tqdm: bool = False) -> list[list]:
    """Return the scores of the trials in each requested document.

    lm-eval calls this function as a method of its model class, for requests of type "trial_scores".
    """
    known = {} if lm.cache_hook.dbdict is None else lm.cache_hook.dbdict
    prepared: dict[tuple[str, str], Task] = {}
    bar = tqdm(total=len(requests), desc="trials", disable=disable_tqdm or lm.rank > 0)
    replies = []
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
                # we only cache complete documents, so a killed run resumes with the next document
                known[key] = [
                    (trial.key, score)
                    for group in batches(task, mine)
                    for trial, score in zip(group, measure(task, group))
                ]
        replies.append(known[key])
        bar.update()
    return replies


# lm-eval calls the method of a model that is named after the type of the requests. It has no registry of types.
TemplateLM.trial_scores = trial_scores


def prepare(lm: Any, name: str, settings: dict[str, Any]) -> Task:
    """Create the task `name` and prepare it for an lm-eval model.

    Raises:
        ValueError: the model's tokenizer is not a transformers tokenizer.
    """
    tokenizer = lm.tokenizer
    if not hasattr(tokenizer, "all_special_ids"):
        raise ValueError(
            f"the model's tokenizer must be a tokenizer of transformers, got {tokenizer!r}. "
            "Add --model_args tokenizer_backend=huggingface,tokenizer=NAME."
        )
    task = task_of(Task.tasks[name], settings)
    text = load_tokens(tokenizer, settings["text"]).tokens if task.uses_text() else None
    return task.on(Subject(reader_of(lm, settings["cache"]), tokenizer, text, context=settings["context"]))


def reader_of(lm: Any, cache: str | None = None) -> Reader:
    """Return a `Reader` for an lm-eval model, with a cache for contexts.

    Raises:
        ValueError: no `Reader` supports the model or the cache, or the model runs in mixed precision.
    """
    model = getattr(lm, "model", None)
    if getattr(lm, "mixed_precision_dtype", None) is not None:
        raise ValueError("mixed_precision_dtype is not supported, because we run the model ourselves. Set dtype.")
    if isinstance(model, nn.Module):
        return LocalReader(model, cache)
    if cache is not None:
        raise ValueError("the metadata `cache` requires a local model: --model hf or --model hf-longctx.")
    if getattr(lm, "base_url", None):
        options = {"tokenizer": lm.tokenizer, "vocab_size": len(lm.tokenizer), "api_key": lm.api_key}
        return ServedModel(lm.base_url, model, **options)
    if hasattr(model, "model_config"):  # a vllm.LLM
        return OfflineModel(model)
    raise ValueError(f"the model must be hf, hf-longctx, vllm or local-completions, got {type(lm).__name__}.")
