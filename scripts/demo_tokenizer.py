"""Train the tokenizer of the demo models."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast


BOS, EOS, PAD = "<s>", "</s>", "<pad>"
# Turns are joined by newlines, without roles
CHAT_TEMPLATE = (
    r"{{ bos_token }}{% for message in messages %}{{ '' if loop.first else '\n' }}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
)


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, which encodes any string and prepends a BOS, as in training."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    bos = [(BOS, tokenizer.token_to_id(BOS))]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B:1", special_tokens=bos
    )
    special = {"pad_token": PAD, "bos_token": BOS, "eos_token": EOS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special)


__all__ = ["train_tokenizer"]
