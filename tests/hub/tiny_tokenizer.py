"""A tokenizer of 61 words, for the models of 61 embeddings in these tests."""

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast


def save_tokenizer(folder):
    words = models.WordLevel({f"word{i}": i for i in range(60)} | {"</s>": 60}, unk_token="word0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="</s>").save_pretrained(folder)
