"""The wording of retrieval tasks, the chat template around it, and the options that these tasks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..checks import check_token_ids
from ..task import Ask, Task, Trial, option
from .answers import REPLY_MARGIN, contains_text, opened_thought


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
        needle: sentence to hide.
        question: question after the haystack.
        begin: beginning of the answer, which the prompt contains: after "Answer:", or in a chat as the start of the
            response.
        answer: expected continuation.
    """

    needle: str
    question: str
    begin: str
    answer: str

    @property
    def prompt(self) -> str:
        """The part of the prompt between haystack and answer, without a chat template."""
        return self.question + (f" Answer: {self.begin}" if self.begin else "")


class Frame(NamedTuple):
    """The parts of a chat prompt before and after the user message, up to the start of the response."""

    head: str
    tail: str


def wording(
    mode: str = "standard", needle: str | None = None, question: str | None = None, answer: str | None = None
) -> Wording:
    """Return the wording for a mode, with the paper's or a custom needle.

    Args:
        mode: "standard", or "easy" with the question in the needle.
        needle: sentence to hide; easy mode does not take one, because it hides question and answer.
        question: question, in any language.
        answer: answer. A space is prepended if the question contains spaces.

    Raises:
        ValueError: the question or the answer is missing, or the needle does not contain the answer.
    """
    if needle is None and question is None and answer is None:
        hidden = f"{QUESTION} Answer: {ANSWER_BEGIN}" if mode == "easy" else ANSWER_BEGIN
        return Wording(f"\n{hidden}{ANSWER}\n", f"\n{TASK} {QUESTION}", ANSWER_BEGIN, ANSWER)
    if not (question and question.strip()) or not (answer and answer.strip()):
        raise ValueError("a custom needle needs a question and an answer. Give both, --question and --answer.")
    if (needle is None) != (mode == "easy"):
        raise ValueError(
            'a custom question must come with a needle in mode="standard", and without one in mode="easy". Change needle '
            "or mode."
        )
    answer = (" " if " " in question.strip() else "") + answer.strip()
    question = question.strip()
    if needle is None:
        needle = question + answer
    if not contains_text(needle, answer):
        raise ValueError(
            f"the needle {needle!r} does not contain the answer {answer.strip()!r}, so it cannot be found."
        )
    return Wording(f"\n{needle.strip()}\n", f"\n{question}", "", answer)


def chat_frame(tokenizer: Any, kwargs: dict[str, Any] | None = None) -> Frame:
    """Return what the tokenizer's chat template adds around a user message.

    Args:
        kwargs: additional template variables, such as enable_thinking.

    Raises:
        ValueError: the chat template is missing, or does not contain the user message exactly once.
    """
    words = "HAYSTACK"
    if getattr(tokenizer, "chat_template", None) is None:
        name = getattr(tokenizer, "name_or_path", "")
        raise ValueError(f"the tokenizer {name} has no chat template: measure without --chat-template.")
    turn = [{"role": "user", "content": words}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False, **(kwargs or {}))
    if text.count(words) != 1:
        raise ValueError(
            f"the chat template must contain the user message exactly once, got it {text.count(words)} times."
        )
    return Frame(*text.split(words))


@dataclass(frozen=True)
class RetrievalTask(Task):
    """The options and steps that all retrieval tasks share.

    Attributes:
        frame: chat prompt around the user message; None without a chat template.
        opened: marker of a thought that the prompt opens, see `opened_thought`.
    """

    asks = True

    chat_template: bool = option(False, "send prompts as user messages, with the tokenizer's chat template")
    chat_template_kwargs: dict | None = option(
        None, "variables of the chat template in JSON, such as '{\"enable_thinking\": false}'"
    )
    seed: int = option(0, "random seed of the prompts")
    replies: bool = option(True, "generate a response if greedy decoding does not give the answer")

    def prepare(self):
        subject = self.subject
        if self.replies and not subject.reader.can_reply:
            raise ValueError(
                f"{subject.reader.settings()['model']} has no generate method; measure without responses: replies=False, or "
                "--no-replies."
            )
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError("chat_template_kwargs must come with chat_template, got it without. Add --chat-template.")
        frame = chat_frame(subject.tokenizer, self.chat_template_kwargs) if self.chat_template else None
        self.fill(frame=frame, opened=opened_thought(frame.tail if frame else ""))

    def check_ids(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return ids as an array, after checking that they are in the model's vocabulary."""
        return check_token_ids(ids, f"the {name} as the tokenizer encodes it", self.subject.reader.vocab_size)

    def ask(self, prompt: np.ndarray, answer: np.ndarray) -> Ask:
        """Build the request with this prompt and answer."""
        return Ask(prompt, answer, self.replies * (len(answer) + REPLY_MARGIN))

    def trial(self, key: Any, tokens: int, questions: int) -> Trial:
        """Build a trial; `tokens` is the length of its longest prompt with the answer."""
        return Trial(key, tokens + self.replies * REPLY_MARGIN, questions)
