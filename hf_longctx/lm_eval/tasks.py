"""The tasks: settings, documents, requests and metrics. A document is one repeat, with a sample at each length.

So every metric has a value for each document: lm-eval's standard errors are over repeats, and `--limit 3` takes three
repeats at all lengths. Settings come by `--metadata '{"lengths": [64, 128], "repeats": 3}'`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from difflib import get_close_matches
from functools import partial
from typing import Any, ClassVar

import datasets
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean
from lm_eval.api.task import ConfigurableTask

from ..metrics.checks import check_lengths, whole_number
from ..metrics.curve.lengths import METHODS
from ..metrics.curve.measure import check_choices
from ..metrics.curve.protocol import log_lengths, longest_length, scored_tokens
from ..metrics.curve.result import CurvePoint, ForgettingCurve
from ..metrics.retrieval.answers import holds_number
from ..metrics.retrieval.lines import draw_record
from .requests import add_request_types, block_edges


CONTEXT = 2048  # tokens, as lm-eval takes where a model says nothing

add_request_types()


class LongContextTask(ConfigurableTask):
    """What the tasks share. A subclass defines `defaults`, and, of the documents, requests and metrics.

    Attributes:
        settings: the defaults, and what `--metadata` gives in their place.
        documents: name of the setting with the number of documents.
    """

    defaults: ClassVar[dict[str, Any]]
    documents: ClassVar[str] = "repeats"
    request: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {"output_type": "loglikelihood"}

    def __init__(self, config: dict[str, Any] | None = None):
        config = config or {}
        given = config.get("metadata") or {}
        for name in given.keys() - self.defaults.keys():  # among the arguments of the model
            meant = get_close_matches(name, self.defaults, n=1, cutoff=0.8)
            if meant:
                raise ValueError(f"--metadata has {name}; did you mean {meant[0]}? Known: {', '.join(self.defaults)}.")
        self.settings = self.check(
            self.defaults | {name: given[name] for name in self.defaults if name in given}, given
        )
        whole_number(self.documents, self.settings[self.documents], 1)
        names = {"task": config.get("task"), "num_fewshot": 0, "metadata": {"version": 1, **self.settings}}
        super().__init__(config=names | deepcopy(self.options))
        self.OUTPUT_TYPE = self.request  # of which lm-eval evens out the numbers that processes get

    def check(self, settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings; raise ValueError where one does not fit. `given`: also arguments of the model."""
        raise NotImplementedError

    def samples(self, repeat: int) -> list[tuple]:
        """Return the samples of a document, which name what is asked."""
        raise NotImplementedError

    def download(self, *args, **kwargs) -> None:
        rows = [{"repeat": repeat} for repeat in range(self.settings[self.documents])]
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

    def doc_to_target(self, doc, doc_to_target=None) -> str:
        return ""

    def fewshot_context(self, doc, *args, **kwargs) -> Any:
        return ""

    def build_all_requests(self, **kwargs) -> None:
        # lm-eval's cache of requests does not tell settings apart, and these are made at once
        super().build_all_requests(**kwargs | {"cache_requests": False})

    def construct_requests(self, doc, ctx, *, metadata=None, **kwargs) -> list[Instance]:
        settings = json.dumps(self.settings, sort_keys=True)
        return [
            Instance(self.request, doc, (settings, *sample), i, metadata)
            for i, sample in enumerate(self.samples(doc["repeat"]))
        ]

    def higher_is_better(self) -> dict[str, bool]:
        return dict.fromkeys(self.aggregation(), True)

    def aggregation(self) -> dict[str, Callable]:
        raise NotImplementedError


class ForgettingCurveTask(LongContextTask):
    """Copy and LM accuracy for each length, and the fine and the coarse length: "at least", 95 % sure, in tokens."""

    defaults = {"lengths": None, "repeats": 10, "seed": 0, "text": None, "data_type": "order"}
    request = "greedy_counts"

    def check(self, settings, given):
        check_choices(settings["data_type"], "reference", 0.95)
        if settings["lengths"] is None:
            settings["lengths"] = log_lengths(longest_length(int(given.get("max_length", CONTEXT)) - 1), 8)
        return settings | {"lengths": check_lengths(settings["lengths"])}

    def samples(self, repeat):
        return [(length, kind, repeat) for length in self.settings["lengths"] for kind in ("copy", "LM")]

    def process_results(self, doc, results):
        lengths, counts = self.settings["lengths"], [*zip(results[::2], results[1::2])]
        accuracies = {
            f"{kind}_{n}": count / scored_tokens(n)
            for n, pair in zip(lengths, counts)
            for kind, count in zip(("copy", "lm"), pair)
        }
        return accuracies | {f"{method}_at_least": [*zip(lengths, counts)] for method in METHODS}

    def aggregation(self):
        names = [f"{kind}_{n}" for n in self.settings["lengths"] for kind in ("copy", "lm")]
        return dict.fromkeys(names, mean) | {f"{method}_at_least": partial(at_least, method) for method in METHODS}


def at_least(method: str, documents: list[list[tuple[int, tuple[int, int]]]]) -> int:
    """Return the lower end of the fine or coarse length. An upper end is no score, and lm-eval has no place for it."""
    points = []
    for at_length in zip(*documents):
        copy, lm = zip(*(counts for _, counts in at_length))
        points.append(CurvePoint(at_length[0][0], copy, lm))
    return ForgettingCurve(points).interval(method).low


class PositionLossTask(LongContextTask):
    """Mean loss of each block of positions, in nats: a model that makes use of more context has less in later ones."""

    defaults = {"context_length": None, "sequences": 16, "blocks": 8, "text": None}
    documents = "sequences"
    request = "block_losses"

    def check(self, settings, given):
        if settings["context_length"] is None:
            settings["context_length"] = int(given.get("max_length", CONTEXT)) - 2
        whole_number("blocks", settings["blocks"], 1)
        whole_number("context_length, in blocks,", settings["context_length"] // settings["blocks"], 1)
        return settings

    def samples(self, repeat):
        return [(repeat,)]

    def names(self) -> list[str]:
        width = len(str(self.settings["context_length"]))  # so that lm-eval's tables, sorted by name, are in order
        return [f"loss_{a + 1:0{width}}_to_{b:0{width}}" for a, b in block_edges(self.settings)]

    def process_results(self, doc, results):
        return dict(zip(self.names(), results[0]))

    def aggregation(self):
        return dict.fromkeys(self.names(), mean)

    def higher_is_better(self):
        return dict.fromkeys(self.names(), False)


class LinesTask(LongContextTask):
    """Share of numbers found in records of so many lines. The model replies, also through a chat template."""

    defaults = {"lines": [5, 10, 20, 40], "repeats": 10, "seed": 0}
    request = "generate_until"
    options = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": [], "max_gen_toks": 32, "do_sample": False},
        "target_delimiter": "",
    }

    def check(self, settings, given):
        return settings | {"lines": check_lengths(settings["lines"])}

    def records(self, repeat):
        return [draw_record(n, self.settings["seed"], repeat) for n in self.settings["lines"]]

    def doc_to_text(self, doc, doc_to_text=None):
        return doc.get("question", "")

    def fewshot_context(self, doc, *args, gen_prefix=None, **kwargs):
        contexts = []
        for record in self.records(doc["repeat"]):
            question, _, prefix = record.question.rpartition("\n")
            text = f"{record.text}{question}" + ("" if kwargs.get("apply_chat_template") else "\n")
            prompt = super(LongContextTask, self).fewshot_context(
                {"question": text}, *args, gen_prefix=prefix, **kwargs
            )
            contexts.append(prompt)
        return contexts

    def construct_requests(self, doc, ctx, *, metadata=None, **kwargs):
        options = self.config.generation_kwargs
        return [
            Instance("generate_until", doc, (prompt, deepcopy(options)), i, metadata) for i, prompt in enumerate(ctx)
        ]

    def process_results(self, doc, results):
        found = [holds_number(reply, record.number) for reply, record in zip(results, self.records(doc["repeat"]))]
        return dict(zip(self.aggregation(), map(float, found)))

    def aggregation(self):
        return {f"found_in_{n}_lines": mean for n in self.settings["lines"]}
