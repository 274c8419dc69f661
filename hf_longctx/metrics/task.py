"""The two classes of a metric: a `Task` defines the inputs and their scores, and a `TaskResult` interprets the scores.

CONTRIBUTING.md shows a complete metric in 50 lines. `run.runner.run` runs a task's requests and creates the result.
The Python function, the command, the lm-eval task, the report section and the model card entry are generated from the
two classes. This file does not run a model. To keep `--help` fast, it does not import PyTorch or scipy.special.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

import numpy as np

from ..tokenization import encode_text, tokenizer_hash
from .checks import as_int, check_token_ids, public_name
from .result import Result
from .run.journal import content_hash


if TYPE_CHECKING:
    from .run.reader import Reader

NO_CLAIM = 4096  # default context in tokens, for models that do not claim a context
KINDS: dict[type, str] = {bool: "True or False", str: "a string", float: "a number", dict: "a dictionary"}
Key = Any  # type of a trial's key: a number, a string, or a tuple of numbers and strings


# Requests and trials -------------------------------------------------------------------------------------------------


class Predict(NamedTuple):
    """A request for greedy predictions.

    The response is a bool array (R, len(positions)): whether each prediction equals the next id in its row.

    Attributes:
        rows: input ids, (R, T) int64.
        prefix: length of the prefix to share. If rows have the same first `prefix` ids, the model may read these ids
            only once.
        positions: consecutive positions in a row, ascending.
    """

    rows: np.ndarray
    prefix: int
    positions: range


class Score(NamedTuple):
    """A request for the log-probabilities of `ids[first:]`, each given all ids before it.

    The response contains the log-probabilities in nats, (T - first,) float64.
    """

    ids: np.ndarray
    first: int


class Ask(NamedTuple):
    """A request with a question and the correct answer. The response is an `Answered`.

    Attributes:
        prompt: ids of the prompt, (n,) int64.
        answer: ids of the correct answer, (n,) int64.
        reply: maximum number of tokens in a generated response; 0 for no response. If greedy decoding gives the
            answer, we use the answer as the response.
        context: number of prompt tokens before the question, below n. The cache of these tokens may be compressed.
        thinks: whether the prompt ends in a thought. An answer in the thought is then not the response.
    """

    prompt: np.ndarray
    answer: np.ndarray
    reply: int
    context: int = 0
    thinks: bool = False


class Answered(NamedTuple):
    """The response to an `Ask`.

    Attributes:
        log_prob: log-probability of the correct answer, in nats.
        exact: whether greedy decoding gives the correct answer.
        reply: generated response with its special tokens, without EOS; None if it was not requested.
    """

    log_prob: float
    exact: bool
    reply: str | None


Request = Predict | Score | Ask


class Trial(NamedTuple):
    """A part of a measurement with its own score. Trials are recorded in journals and divided among processes.

    Attributes:
        key: key of the score in the journal and in the result.
        tokens: number of tokens in the longest input, including the generated response.
        inputs: number of inputs, to estimate the cost.
    """

    key: Key
    tokens: int
    inputs: int = 1


class Missing(str):
    """The reason why a trial does not have a score."""


# Options -------------------------------------------------------------------------------------------------------------


def option(
    default: Any,
    text: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    selects: bool = False,
) -> Any:
    """Define a field of a task. The field is also an argument of the Python function and an option of the command.

    Args:
        default: default value; None if the default depends on the model or the corpus (see `Task.prepare`).
        text: help text. The command appends the default, unless it is None.
        least: minimum of a number, or of each number in a list. Lists must be in ascending order.
        most: maximum of a number, or of each number in a list.
        choices: allowed values.
        selects: whether the option selects trials without changing their scores. If True, a journal can be resumed
            with another value.
    """
    metadata = {"help": text, "least": least, "most": most, "choices": tuple(choices), "selects": selects}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class Option(NamedTuple):
    """The description of a field that was defined by `option`, for the command line and for checks.

    `kind` is the type of the value. For a list (`listed`), it is the type of each element. For token ids, it is
    `np.ndarray`.
    """

    name: str
    kind: type
    listed: bool
    default: Any
    help: str
    least: float | None
    most: float | None
    choices: tuple[str, ...]
    selects: bool

    def check(self, value: Any) -> Any:
        """Check a value, and convert it to plain Python types. Raise ValueError if the value is invalid."""
        if (value is None and self.default is None) or self.kind is np.ndarray:
            return value
        if self.listed and (isinstance(value, str) or not isinstance(value, Iterable)):
            raise ValueError(f"{self.name} must be a list of numbers, got {value!r}.")
        values, low, high = [*value] if self.listed else [value], self.least, self.most
        for i, one in enumerate(values):
            if self.choices and one not in self.choices:
                raise ValueError(f"{self.name} must be one of {', '.join(self.choices)}, got {one!r}.")
            if self.kind is int:
                one = as_int(self.name, one)
            elif self.kind is float and not isinstance(one, bool) and hasattr(one, "__float__"):
                one = float(one)
            if not isinstance(one, self.kind):
                raise ValueError(f"{self.name} must be {KINDS[self.kind]}, got {one!r}.")
            if (low is not None and not one >= low) or (high is not None and not one <= high):
                bounds = f"at least {low}" if high is None else f"from {low} to {high}"
                raise ValueError(f"{self.name} must be {bounds}, got {one}.")
            values[i] = one
        if not values or any(a >= b for a, b in pairwise(values)):
            raise ValueError(
                f"{self.name} must be one or more numbers in strictly ascending order, got {values}. Sort the values "
                "and drop duplicates."
            )
        return values if self.listed else values[0]


def options(task: type[Task]) -> list[Option]:
    """Return the options of a task, in the order of its fields."""
    hints = get_type_hints(task)
    found = []
    for entry in dataclasses.fields(task):
        hint: Any = hints[entry.name]
        if get_origin(hint) is types.UnionType:
            (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
        listed = get_origin(hint) is list
        factory = entry.default_factory
        default = entry.default if factory is dataclasses.MISSING else factory()
        found.append(Option(entry.name, get_args(hint)[0] if listed else hint, listed, default, **entry.metadata))
    return found


# Subjects, tasks and results -----------------------------------------------------------------------------------------


class Subject:
    """The subject of a measurement: a model, its tokenizer and a corpus.

    Args:
        model: a causal language model, or a reader such as `ServedModel`. A model runs in eval mode, and keeps its
            dtype and device.
        tokenizer: the model's tokenizer. For tasks that do not ask questions, it may be a name or None.
        tokens: the corpus as a flat sequence of token ids, encoded without special tokens.
        context: maximum input length in tokens, for the default options of tasks. Default: the claimed context;
            4096 if the model does not claim a context.
        bos_token_id: id of BOS. Default: BOS of the tokenizer or model; EOS if neither sets BOS.
        eos_token_id: id of EOS. Default: EOS of the tokenizer or model; BOS if neither sets EOS.
        corpus_name: name of the corpus, stored in the settings of a result.
        train_length: training context in tokens, stored in the settings of a result.

    Raises:
        ValueError: an argument is invalid, or both BOS and EOS are unknown.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        tokens: Any = None,
        *,
        context: int | None = None,
        bos_token_id: int | None = None,
        eos_token_id: int | None = None,
        corpus_name: str | None = None,
        train_length: int | None = None,
    ):
        from .run.reader import reader_for, special_ids  # imports PyTorch

        self.reader: Reader = reader_for(model)
        self.tokenizer, self.tokenizer_name = tokenizer, tokenizer
        if tokenizer is not None and not isinstance(tokenizer, str):
            self.tokenizer_name = getattr(tokenizer, "name_or_path", type(tokenizer).__name__)
        self.tokenizer_name = self.tokenizer_name and public_name(self.tokenizer_name)
        self.tokens = None if tokens is None else check_token_ids(tokens, "tokens", self.reader.vocab_size)
        self.labels = {"corpus": corpus_name and public_name(corpus_name), "train_length": train_length}
        self.labels = {name: value for name, value in self.labels.items() if value is not None}
        if train_length is not None:
            self.labels["train_length"] = as_int("train_length", train_length, 1)
        self.limit = context
        self.claimed = self.reader.claimed_context if context is None else as_int("context", context, 1)
        self.context = self.claimed or NO_CLAIM
        bos = getattr(tokenizer, "bos_token_id", None) if bos_token_id is None else bos_token_id
        eos = getattr(tokenizer, "eos_token_id", None) if eos_token_id is None else eos_token_id
        self.bos, self.eos = special_ids(self.reader, bos, eos)
        self.processes = 1  # the runner sets the number of processes

    @property
    def text(self) -> np.ndarray:
        """The token ids of the corpus, (N,) int64. Raises ValueError if there is no corpus."""
        if self.tokens is None:
            raise ValueError("tokens must be token ids, got None. Pass a corpus, encoded without special tokens.")
        return self.tokens

    def encode(self, text: str) -> list[int]:
        """Encode a string without special tokens; see `tokenization.encode_text`."""
        return encode_text(self.check_tokenizer(), text)

    def encode_chat(self, text: str) -> list[int]:
        """Encode a part of a rendered chat template, including its special tokens."""
        return self.check_tokenizer()(text, add_special_tokens=False, split_special_tokens=False, verbose=False)[
            "input_ids"
        ]

    def check_tokenizer(self) -> Any:
        """Return the tokenizer. If it is missing or a name, raise ValueError."""
        if not callable(self.tokenizer):
            raise ValueError(f"tokenizer must be the tokenizer of the model, got {self.tokenizer!r}.")
        return self.tokenizer

    @cached_property
    def tokenizer_hash(self) -> str | None:
        """The hash of the tokenizer; None if it is unknown. See `tokenization.tokenizer_hash`."""
        return tokenizer_hash(self.tokenizer)

    def settings(self, reads_text: bool) -> dict[str, Any]:
        """Return settings that describe the model, tokenizer, special ids and corpus, for a result."""
        settings = self.reader.settings() | {"tokenizer": self.tokenizer_name}
        settings |= {"bos_token_id": self.bos, "eos_token_id": self.eos}
        if self.tokenizer_hash is not None:
            settings["tokenizer_sha256"] = self.tokenizer_hash
        if reads_text:
            settings |= {"corpus_tokens": len(self.text), "corpus_sha256": content_hash(self.text)}
            if hasattr(self.tokenizer, "decode"):  # bytes are comparable between models with different tokenizers
                sample = self.text[:10_000].tolist()
                text = self.tokenizer.decode(sample, clean_up_tokenization_spaces=False)
                settings["bytes_per_token"] = round(len(text.encode()) / len(sample), 2)
        return settings


@dataclass(frozen=True)
class Task:
    """The base class of tasks. A subclass is a frozen dataclass. `option` defines its fields.

    The docstring of a subclass is the help text of its command.

    Attributes:
        name: name of the command, and of the files in a report.
        result: class of the result.
        reads_text: whether the task needs a corpus.
        asks: whether the task asks questions. If True, the task needs a tokenizer.
        examples: example command lines, without `hf-longctx`.
        tasks: all tasks, keyed by name.
        subject: model, tokenizer and corpus; set by `on`.
    """

    name: ClassVar[str]
    result: ClassVar[type[TaskResult]]
    reads_text: ClassVar[bool] = True
    asks: ClassVar[bool] = False
    examples: ClassVar[str] = ""
    tasks: ClassVar[dict[str, type[Task]]] = {}
    subject: ClassVar[Subject]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # attributes set by `fill`

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        if "name" in vars(cls):
            Task.tasks[cls.name] = cls

    def __post_init__(self):
        self.fill(**{entry.name: entry.check(getattr(self, entry.name)) for entry in options(type(self))})

    @classmethod
    def in_report(cls, **arguments: Any) -> Self:
        """Create the task with the options of a report. `arguments` contains the report's `seed` and `repeats`."""
        return cls(**{entry.name: arguments["seed"] for entry in options(cls) if entry.name == "seed"})

    def fill(self, **values: Any) -> None:
        """Set fields or attributes of the frozen dataclass. Only for use in `__post_init__` and `prepare`."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def on(self, subject: Subject) -> Self:
        """Return a copy of the task for a subject, with all options set.

        Raises:
            ValueError: the task cannot measure the subject with these options.
        """
        task = copy.copy(self)
        task.fill(subject=subject)
        task.prepare()
        return task

    def prepare(self) -> None:
        """Set options that depend on the subject. Raise ValueError if the task cannot measure the subject."""

    def trials(self, scores: dict[Key, Any]) -> list[Trial]:
        """Return the trials, including the trials that already have a score in `scores`.

        The run calls this method before each round. The run ends when all returned trials have a score. Most tasks
        ignore `scores`. An adaptive task uses the scores to add trials. If the model does not support the inputs of a
        trial, the score of the trial is a `Missing`.
        """
        raise NotImplementedError

    def all_trials(self) -> list[Trial]:
        """Return the trials of the longest possible run. Adaptive tasks override this method."""
        return self.trials({})

    def requests(self, key: Key) -> list[Request]:
        """Return the requests of a trial."""
        raise NotImplementedError

    def score(self, key: Key, responses: list[Any]) -> Any:
        """Compute the score of a trial from the responses to its requests, as JSON values."""
        raise NotImplementedError

    def summarize(self, scores: dict[Key, Any], missing: dict[Key, str]) -> tuple[dict, dict]:
        """Convert the scores of trials, and the reasons for missing scores, to the form that the result stores.

        By default, both are returned unchanged. A task may store a mean over trials instead.
        """
        return scores, missing

    def uses_text(self) -> bool:
        """Return whether the task needs a corpus with its current options."""
        return self.reads_text

    def facts(self) -> dict[str, Any]:
        """Return further settings that affect the scores, such as hashes."""
        return {}

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two dictionaries: the settings that affect the scores, and the other settings."""
        fields = {
            entry.name: getattr(self, entry.name) for entry in options(type(self)) if entry.kind is not np.ndarray
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        selected = [entry.name for entry in options(type(self)) if entry.selects and entry.name in fields]
        selecting = {name: fields.pop(name) for name in selected}
        depends = {**self.subject.settings(self.uses_text()), **fields, **self.facts()}
        return depends, selecting | self.subject.labels


class Counts(NamedTuple):
    """The number of correct answers at one length.

    A unit is an independently drawn sample: a target, a haystack or a record of lines.

    Attributes:
        length: length in the `size_unit` of the result.
        shares: share of correct answers for each unit in the order of drawing, (R,) float64.
        questions: maximum number of questions per unit. In a target, each scored token is a question. A record has one
            question.
        tokens: length in tokens; for line retrieval, the mean over records.
        asked: total number of questions.
        right: total number of correct answers.
    """

    length: int
    shares: np.ndarray
    questions: int
    tokens: int
    asked: int
    right: float


@dataclass(frozen=True)
class TaskResult(Result):
    """The base class of the results of tasks: scores, and numbers derived from the scores.

    A subclass sets `kind` and `title`. It defines `explanation`, `numbers`, `table` and `draw`. Its `__post_init__`
    may raise ValueError for impossible scores. To compare models, a subclass also defines `by_length` and `places`.

    Attributes:
        scores: maps keys to scores, as JSON values.
        settings: settings of the measurement.
        missing: maps each key without a score to the reason.
        inches: width and height of the figure.
        size_unit: unit of the lengths in `by_length`.
        verb: verb for a correct answer, such as "copies".
        same_texts: names of settings. Two results have the same samples only if these settings are equal.
    """

    version = 2
    inches: ClassVar[tuple[float, float]] = (6.6, 5)
    size_unit: ClassVar[str] = "tokens"
    verb: ClassVar[str] = ""
    same_texts: ClassVar[tuple[str, ...]] = ()

    scores: dict[Key, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    missing: dict[Key, str] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        return bool(self.scores)

    @property
    def doubts(self) -> tuple[str, ...]:
        """The `Reader.notes` of the measured model: what could not be shown about it. The summary ends with them."""
        return tuple(self.settings.get("notes", ()))

    def summary(self) -> str:
        text = self.with_gaps(self.in_words() if self.scores else "nothing measured")
        return text + "".join(f" Note: {doubt}" for doubt in self.doubts)

    def in_words(self) -> str:
        """Return the measured numbers in one line."""
        return ", ".join(f"{number.name}: {number.interval() or number.value}" for number in self.numbers())

    def with_gaps(self, text: str) -> str:
        """Append missing keys, their reasons, and the cause of an interruption to a summary."""
        for reason in dict.fromkeys(self.missing.values()):
            keys = [key for key, why in self.missing.items() if why == reason]
            text += f"; {self.span(keys)} not measured: {reason}"
        return text + self.interruption

    def span(self, keys: list[Key]) -> str:
        """Describe several keys in words, such as "3 lengths from 8 to 64"."""
        return f"{keys[0]}" if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"

    def by_length(self, replies: bool = True, overlapping: bool = False) -> list[Counts]:
        """Return the number of correct answers at each length, in ascending order of length.

        Args:
            replies: whether to count the answers in generated responses. If False, or if there are no responses,
                count the answers that greedy decoding gives exactly.
            overlapping: whether to include samples that share scored tokens with other samples.

        Raises:
            ValueError: this metric does not count correct answers.
        """
        raise ValueError(
            f"results must contain correct answers by length, got {type(self).__name__}. Pass forgetting curves, or "
            "results of needle or line retrieval."
        )

    def places(self) -> dict[int, list]:
        """Return identifiers of the samples at each length. For random ids, the list is empty."""
        raise NotImplementedError

    def distinct(self, length: int, texts: int) -> list[int]:
        """Return the indices of samples that do not share scored tokens.

        Only the first `texts` samples of a length are considered.
        """
        return [*range(texts)]

    def unlike(self, other: Any, *more: str) -> str | None:
        """Return None if another result of this metric has the same samples. Otherwise, return the reason.

        Args:
            other: the other result.
            more: names of settings that must be equal, in addition to `same_texts`.
        """
        names = (*self.same_texts, *more)
        names = [name for name in names if self.settings.get(name) != other.settings.get(name)]
        return f"they differ in {', '.join(names)}" if names else None

    def same_tokens(self, other: TaskResult) -> bool:
        """Return whether a token of this result is a token of another result: the tokenizers or corpora have one hash.

        A name is not evidence: folders of different tokenizers often have the same name. If both results are about
        random ids, and neither used a tokenizer, the tokens are the ids.
        """
        settings = self.settings, other.settings
        for name in ("tokenizer_sha256", "corpus_sha256"):
            one, two = (s.get(name) for s in settings)
            if one is not None and one == two:
                return True
        random = all(s.get("data_type") == "random" for s in settings)
        return random and not any(s.get("tokenizer") or s.get("tokenizer_sha256") for s in settings)

    def extent(self) -> dict[str, str]:
        """Return sample sizes, keyed by name. Comparisons report the sizes that differ between models."""
        return {}

    def draw(self, figure: Any, title: str, train_length: int | None) -> None:
        """Draw the result and its title into an empty matplotlib figure; see `style`."""
        raise NotImplementedError

    def plot(self, path, *, train_length: int | None = None, title: str | None = None, **options: Any) -> None:
        from . import style

        if not self.measured:
            raise ValueError("the figure cannot be drawn, because nothing was measured.")
        figure = style.figure(*self.inches)
        self.draw(figure, title or style.heading(self), train_length, **options)
        style.save(figure, path)

    def document(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "numbers": [number._asdict() for number in self.numbers()],
            "scores": [*self.scores.items()],
            "missing": [*self.missing.items()],
        }

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        scores, missing = ({as_key(key): value for key, value in document[name]} for name in ("scores", "missing"))
        return cls(scores, document["settings"], missing)


def as_key(key: Any) -> Key:
    """Convert a key from JSON: a list becomes a tuple."""
    return tuple(key) if isinstance(key, list) else key
