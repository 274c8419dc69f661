"""The two classes of a metric: a `Task` defines the inputs and their scores, a `TaskResult` interprets the scores.

CONTRIBUTING.md has a complete metric of 50 lines. `run.runner.run` runs the requests and builds the result. The Python
function, the command, the lm-eval task, the report section and the model card entry are derived from these two
classes. This file does not run a model, and imports neither PyTorch nor scipy.special, so that the command line can
list options quickly.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, get_args, get_origin, get_type_hints

import numpy as np

from .checks import as_int, check_token_ids, public_name
from .result import Result
from .run.journal import content_hash


if TYPE_CHECKING:
    from .run.reader import Reader

NO_CLAIM = 4096  # context in tokens for models that do not claim one
KINDS: dict[type, str] = {bool: "True or False", str: "a string", float: "a number", dict: "a dictionary"}
Key = Any  # key of a trial: a number, a string, or a tuple of these


# What a model reads --------------------------------------------------------------------------------------------------


class Predict(NamedTuple):
    """Greedy predictions at `positions` of rows of one length, (R, T) int64.

    The response is (R, len(positions)) bool: whether each prediction equals the next id of its row. If rows share
    their first `prefix` ids, these are read once.
    """

    rows: np.ndarray
    prefix: int
    positions: range


class Score(NamedTuple):
    """Log-probabilities of `ids[first:]`, each given all ids before it.

    The response is (T - first,) float64, in nats.
    """

    ids: np.ndarray
    first: int


class Ask(NamedTuple):
    """A question with a known answer. The response is an `Answered`.

    `reply` is the maximum number of tokens to generate if greedy decoding does not give the answer.
    """

    prompt: np.ndarray
    answer: np.ndarray
    reply: int


class Answered(NamedTuple):
    """The log-probability of an answer, whether it is greedy, and the generated response or None."""

    log_prob: float
    exact: bool
    reply: str | None


Request = Predict | Score | Ask


class Trial(NamedTuple):
    """The unit of reading, scoring, journals and processes.

    Attributes:
        key: name in the journal and in the result.
        tokens: number of positions in the longest input, including the generated response.
        inputs: number of inputs, for the progress bar.
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
    """Define a field of a task, which is also an option of its function and its command.

    Args:
        default: default value; None if `prepare` chooses it by model and corpus.
        text: help text, a noun phrase. The command line adds the default.
        least: lower bound of a number, or of each number in a list. Lists must be ascending.
        most: upper bound.
        choices: allowed values.
        selects: whether the option only selects trials, so that a journal can be resumed with another value.
    """
    metadata = {"help": text, "least": least, "most": most, "choices": tuple(choices), "selects": selects}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


class Option(NamedTuple):
    """A field of a task, for the command line and for checks.

    `kind` is the type of the value, or of each value in a list; `np.ndarray` stands for token ids.
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
        """Return the value in plain types; raise ValueError if it is invalid."""
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
                f"{self.name} must be one or more numbers in strictly ascending order, got {values}. Give each once, and "
                "the smallest first."
            )
        return values if self.listed else values[0]


def options(task: type[Task]) -> list[Option]:
    """Return the options of a task, in field order."""
    hints, found = get_type_hints(task), []
    for entry in dataclasses.fields(task):
        hint: Any = hints[entry.name]
        if get_origin(hint) is types.UnionType:
            (hint,) = (kind for kind in get_args(hint) if kind is not types.NoneType)
        listed = get_origin(hint) is list
        factory = entry.default_factory
        default = entry.default if factory is dataclasses.MISSING else factory()
        found.append(Option(entry.name, get_args(hint)[0] if listed else hint, listed, default, **entry.metadata))
    return found


# Subject, task, result -----------------------------------------------------------------------------------------------


class Subject:
    """The subject of a measurement: a model, its tokenizer and a corpus.

    Args:
        model: causal language model, which runs in its dtype, on its device, in eval mode; or a reader, such as
            `ServedModel`.
        tokenizer: the model's tokenizer. Tasks that do not ask questions in words do not need it, and also accept its
            name.
        tokens: the corpus, a flat sequence of ids, encoded without special tokens.
        context: longest input to measure with, in tokens. Default: the claimed context, else 4096.
        bos_token_id: default: the tokenizer's, then the model's, then EOS.
        eos_token_id: default: the tokenizer's, then the model's, then BOS.
        corpus_name: name of the corpus, for the settings.
        train_length: training context in tokens, for the settings.

    Raises:
        ValueError: an argument is invalid, or neither BOS nor EOS is known.
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
        self.processes = 1  # the runner sets it

    @property
    def text(self) -> np.ndarray:
        """The token ids of the corpus, (N,) int64; raises ValueError without a corpus."""
        if self.tokens is None:
            raise ValueError("tokens must be token ids, got None. Encode a corpus without special tokens.")
        return self.tokens

    def encode(self, text: str) -> list[int]:
        """Encode a string without special tokens."""
        if not callable(self.tokenizer):
            raise ValueError(f"tokenizer must be the tokenizer of the model, got {self.tokenizer!r}.")
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def settings(self, reads_text: bool) -> dict[str, Any]:
        """Return the settings that the numbers depend on: model, tokenizer, special ids and corpus."""
        settings = self.reader.settings() | {"tokenizer": self.tokenizer_name}
        settings |= {"bos_token_id": self.bos, "eos_token_id": self.eos}
        if reads_text:
            settings |= {"corpus_tokens": len(self.text), "corpus_sha256": content_hash(self.text)}
        return settings


@dataclass(frozen=True)
class Task:
    """The base class of tasks. A subclass is a frozen dataclass of `option` fields; its docstring is the help text.

    Attributes:
        name: name of the command, and of the files in a report.
        result: class of the result.
        reads_text: whether the task needs a corpus.
        asks: whether the task asks questions in words, and so needs a tokenizer.
        examples: example command lines, without `hf-longctx`.
        tasks: all tasks by name.
        subject: the model, tokenizer and corpus, set by `on`.
    """

    name: ClassVar[str]
    result: ClassVar[type[TaskResult]]
    reads_text: ClassVar[bool] = True
    asks: ClassVar[bool] = False
    examples: ClassVar[str] = ""
    tasks: ClassVar[dict[str, type[Task]]] = {}
    subject: ClassVar[Subject]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what `fill` sets

    def __init_subclass__(cls, **keywords):
        super().__init_subclass__(**keywords)
        if "name" in vars(cls):
            Task.tasks[cls.name] = cls

    def __post_init__(self):
        self.fill(**{entry.name: entry.check(getattr(self, entry.name)) for entry in options(type(self))})

    @classmethod
    def in_report(cls, **arguments: Any) -> Self:
        """Return the task with a report's options; `arguments` are the report's `seed` and `repeats`."""
        return cls(**{entry.name: arguments["seed"] for entry in options(cls) if entry.name == "seed"})

    def fill(self, **values: Any) -> None:
        """Set fields or attributes in `prepare`, although the task is frozen."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def on(self, subject: Subject) -> Self:
        """Return a copy with its subject set and all options filled in; raise ValueError if they do not match."""
        task = copy.copy(self)
        task.fill(subject=subject)
        task.prepare()
        return task

    def prepare(self) -> None:
        """Fill in options that depend on the subject; raise ValueError if the task cannot measure it."""

    def trials(self, scores: dict[Key, Any]) -> list[Trial]:
        """Return the trials that are needed given `scores`; the run ends when all of them have a score.

        Most tasks ignore the scores. An adaptive task is called after each round, and returns all trials so far plus
        the next ones. The score of a trial that could not be read is a `Missing`.
        """
        raise NotImplementedError

    def requests(self, key: Key) -> list[Request]:
        """Return the requests of a trial."""
        raise NotImplementedError

    def score(self, key: Key, responses: list[Any]) -> Any:
        """Return the score of a trial as JSON values."""
        raise NotImplementedError

    def summarize(self, scores: dict[Key, Any], missing: dict[Key, str]) -> tuple[dict, dict]:
        """Return scores and reasons for the result: unchanged, unless a mean suffices."""
        return scores, missing

    def uses_text(self) -> bool:
        """Return whether these options need the corpus."""
        return self.reads_text

    def facts(self) -> dict[str, Any]:
        """Return additional settings that the numbers depend on."""
        return {}

    def settings(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the settings that a trial's score depends on, and the others."""
        fields = {
            entry.name: getattr(self, entry.name) for entry in options(type(self)) if entry.kind is not np.ndarray
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        selected = [entry.name for entry in options(type(self)) if entry.selects and entry.name in fields]
        selecting = {name: fields.pop(name) for name in selected}
        depends = {**self.subject.settings(self.uses_text()), **fields, **self.facts()}
        return depends, selecting | self.subject.labels


class Counts(NamedTuple):
    """The correct answers at one length, grouped by independently sampled unit: target, haystack or record.

    Attributes:
        length: length in the `size_unit` of the result.
        shares: share of right answers for each unit, in drawing order, (R,) float64 from 0 to 1.
        questions: maximum questions per unit: scored tokens of a target, questions about a haystack, 1 for a record.
        tokens: length in tokens; for line retrieval, the mean over records.
        asked: number of questions in all units.
        right: number of right answers.
    """

    length: int
    shares: np.ndarray
    questions: int
    tokens: int
    asked: int
    right: float


@dataclass(frozen=True)
class TaskResult(Result):
    """The scores of a task's trials, and the numbers derived from them.

    A subclass sets `kind` and `title` and defines `explanation`, `numbers`, `table` and `draw`. Its `__post_init__`
    may raise ValueError for impossible scores. To compare models, it defines `by_length` and `places`.

    Attributes:
        scores: scores by the keys of the trials, as JSON values.
        settings: settings of the measurement.
        missing: reasons for missing scores, by the keys of the trials.
        inches: width and height of the figure.
        size_unit: unit of the lengths in `by_length`.
        verb: verb for a right answer, such as "copies".
        same_texts: settings that must match for two results to have read the same samples.
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

    def summary(self) -> str:
        return self.with_gaps(self.in_words() if self.scores else "nothing measured")

    def in_words(self) -> str:
        """Return the measured numbers in one line."""
        return ", ".join(f"{number.name}: {number.interval() or number.value}" for number in self.numbers())

    def with_gaps(self, text: str) -> str:
        """Append the lengths that were not measured, and the cause of an interruption, to a summary."""
        for reason in dict.fromkeys(self.missing.values()):
            keys = [key for key, why in self.missing.items() if why == reason]
            text += f"; {self.span(keys)} not measured: {reason}"
        return text + self.interruption

    def span(self, keys: list[Key]) -> str:
        """Describe trials, such as "3 lengths from 8 to 64"."""
        return f"{keys[0]}" if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"

    def by_length(self, replies: bool = True, overlapping: bool = False) -> list[Counts]:
        """Return the right answers at each length, ascending.

        Args:
            replies: whether to count answers found in generated responses, if any; else those given token for token.
            overlapping: whether to keep samples that share scored tokens with others.

        Raises:
            ValueError: this metric does not count right answers.
        """
        raise ValueError(f"a {type(self).__name__} has no scores by length; give curves, needle or line retrieval.")

    def places(self) -> dict[int, list]:
        """Return the identifiers of the samples of each length; an empty list for random ids."""
        raise NotImplementedError

    def distinct(self, length: int, texts: int) -> list[int]:
        """Return which of the first `texts` samples of a length do not share scored tokens."""
        return [*range(texts)]

    def unlike(self, other: Any, *more: str) -> str | None:
        """Return why this and another result of the metric did not read the same samples; None if they did.

        `more` names further settings that must be equal.
        """
        names = (*self.same_texts, *more)
        names = [name for name in names if self.settings.get(name) != other.settings.get(name)]
        return f"they differ in {', '.join(names)}" if names else None

    def extent(self) -> dict[str, str]:
        """Return the number of samples in words, for comparisons with other models."""
        return {}

    def draw(self, figure: Any, title: str, train_length: int | None) -> None:
        """Draw the result with its title into an empty figure of matplotlib; see `style`."""
        raise NotImplementedError

    def plot(self, path, *, train_length: int | None = None, title: str | None = None, **options: Any) -> None:
        from . import style

        if not self.measured:
            raise ValueError("nothing was measured, so there is nothing to draw.")
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
    """Convert a list from JSON back into a tuple key."""
    return tuple(key) if isinstance(key, list) else key
