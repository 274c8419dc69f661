"""The wording of needle prompts, chat templates, and the common options of all retrieval tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_token_ids
from ..task import Answered, Ask, Task, Trial, option
from .answers import REPLY_MARGIN, Answer, contains_text
from .thoughts import opened_thought


QUESTION = "What is the best thing to do in San Francisco?"
ANSWER_BEGIN = "The best thing to do in San Francisco is"
ANSWER = " eat a sandwich and sit in Dolores Park on a sunny day."
TASK = (
    "There is an important piece of information hidden inside the above document. Now that you've read the document, I "
    "will quiz you about it. Answer the following question:"
)
MODES = ("standard", "easy")


class Wording(NamedTuple):
    """The wording of a needle prompt.

    Attributes:
        needle: sentence that is hidden in the haystack.
        question: question after the haystack.
        begin: last words of the prompt; they begin the answer.
        answer: expected continuation of the prompt.
    """

    needle: str
    question: str
    begin: str
    answer: str

    @property
    def prompt(self) -> str:
        """The part of a prompt between haystack and answer, without a chat template."""
        return self.question + (f" Answer: {self.begin}" if self.begin else "")


class Frame(NamedTuple):
    """The parts of a chat prompt before (`head`) and after (`tail`) the user message."""

    head: str
    tail: str


def wording(
    mode: str = "standard", needle: str | None = None, question: str | None = None, answer: str | None = None
) -> Wording:
    """Return the wording of a prompt (default: the wording of the paper).

    Args:
        mode: "standard" or "easy". In easy mode, the needle consists of question and answer.
        needle: custom needle, for standard mode only.
        question: custom question, in any language.
        answer: answer to the custom question. If the question contains spaces, we prepend a space to the answer.

    Raises:
        ValueError: the question, answer or needle is missing; the needle is not allowed; or the needle does not
            contain the answer.
    """
    if needle is None and question is None and answer is None:
        hidden = f"{QUESTION} Answer: {ANSWER_BEGIN}" if mode == "easy" else ANSWER_BEGIN
        return Wording(f"\n{hidden}{ANSWER}\n", f"\n{TASK} {QUESTION}", ANSWER_BEGIN, ANSWER)
    if not (question and question.strip()) or not (answer and answer.strip()):
        raise ValueError("a custom needle needs a question and an answer. Pass both --question and --answer.")
    if (needle is None) != (mode == "easy"):
        raise ValueError(
            f'needle must be set in mode="standard" and unset in mode="easy", got {needle!r} with {mode=}. In easy mode, '
            "the needle consists of question and answer."
        )
    answer = (" " if " " in question.strip() else "") + answer.strip()
    question = question.strip()
    if needle is None:
        needle = question + answer
    if not contains_text(needle, answer):
        raise ValueError(f"needle must contain the answer {answer.strip()!r}, got {needle!r}.")
    return Wording(f"\n{needle.strip()}\n", f"\n{question}", "", answer)


def chat_frame(tokenizer: Any, kwargs: dict[str, Any] | None = None) -> Frame:
    """Return the parts that the tokenizer's chat template adds before and after a user message.

    Args:
        tokenizer: a transformers tokenizer.
        kwargs: additional variables of the template, such as enable_thinking.

    Raises:
        ValueError: the chat template is missing, or does not contain the user message exactly once.
    """
    words = "HAYSTACK"
    if getattr(tokenizer, "chat_template", None) is None:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(f"the tokenizer {name} does not have a chat template. Measure without --chat-template.")
    turn = [{"role": "user", "content": words}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False, **(kwargs or {}))
    if text.count(words) != 1:
        raise ValueError(
            f"the chat template must contain the user message exactly once, got {text.count(words)} times."
        )
    return Frame(*text.split(words))


@dataclass(frozen=True)
class RetrievalTask(Task):
    """The base class of retrieval tasks, with their common options.

    Attributes:
        frame: chat prompt around the user message; None without a chat template.
        encode: function that encodes a part of a prompt. With a chat template, it encodes special tokens as such.
        opened: end of the chat prompt, if it opens the model's thinking; see `opened_thought`.
        special: the tokenizer's special tokens, longest first.
    """

    asks = True

    chat_template: bool = option(False, "format prompts as user messages with the tokenizer's chat template")
    chat_template_kwargs: dict | None = option(
        None, "variables of the chat template as JSON, such as '{\"enable_thinking\": false}'"
    )
    query_aware: bool | None = option(
        None, "with --cache, compress the question together with the context (default: the context only)"
    )
    seed: int = option(0, "random seed of the prompts")
    replies: bool = option(
        True,
        "if the most likely tokens are not exactly the answer, generate a response and search the response for the "
        "answer",
    )
    reply_tokens: int | None = option(
        None,
        "maximum number of tokens in a response, including its thinking (default: 16 more than the answer)",
        least=1,
    )

    def __post_init__(self):
        super().__post_init__()
        if self.reply_tokens is not None and not self.replies:
            raise ValueError("reply_tokens requires replies. Drop one of the two options.")

    def prepare(self):
        subject = self.subject
        if self.replies and not subject.reader.can_reply:
            raise ValueError(
                f"{subject.reader.settings()['model']} does not have a generate method. Measure without responses: "
                "replies=False, or --no-replies."
            )
        if self.query_aware and subject.reader.cache is None:
            raise ValueError(
                "query_aware requires a cache for the context. Add --cache, or pass LocalReader(model, cache=...)."
            )
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError("chat_template_kwargs requires chat_template. Add --chat-template.")
        frame = chat_frame(subject.tokenizer, self.chat_template_kwargs) if self.chat_template else None
        encode = subject.encode if frame is None else subject.encode_chat
        self.fill(frame=frame, encode=encode, opened=opened_thought(frame.tail if frame else ""))
        added = getattr(subject.tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special}
        special |= set(getattr(subject.tokenizer, "all_special_tokens", ()))
        self.fill(special=sorted(special, key=len, reverse=True))

    def check_ids(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return token ids as an int64 array. If an id is not in the model's vocabulary, raise ValueError."""
        return check_token_ids(ids, f"the {name} as the tokenizer encodes it", self.subject.reader.vocab_size)

    def ask(self, prompt: np.ndarray, answer: np.ndarray, context: int) -> Ask:
        """Create the request for a prompt and its correct answer. Each is an array of ids, (n,) int64.

        The question begins after `context` tokens of the prompt.
        """
        if self.query_aware:
            context = len(prompt) - 1  # the last token predicts the answer, so it must read the compressed cache
        return Ask(prompt, answer, self.reply_limit(len(answer)), context, bool(self.opened))

    def answer_of(self, response: Answered, tokens: int, matches: Callable[[str], bool]) -> Answer:
        """Score a response; see `Answer.of`."""
        return Answer.of(response, tokens, matches, self.opened, self.special)

    def reply_limit(self, answer: int) -> int:
        """Return the maximum number of tokens in a response to a question with an answer of `answer` tokens."""
        return self.replies * (self.reply_tokens or answer + REPLY_MARGIN)

    @property
    def reply_room(self) -> int:
        """The number of tokens of the context that default lengths leave free for responses."""
        return max(2 * REPLY_MARGIN, self.reply_tokens or 0)

    def trial(self, key: Any, lengths: Sequence[tuple[int, int]]) -> Trial:
        """Create a trial with several questions. `lengths` contains the tokens of each prompt and its answer."""
        return Trial(
            key, max(prompt + max(answer, self.reply_limit(answer)) for prompt, answer in lengths), len(lengths)
        )
